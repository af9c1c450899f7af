"""Leaf module: what each letter of a logical key says. Imports errors; `docs/keys.md` shows the same table.

A key spells every decision of a program's form. Those without a suffix are the published ones of Blackwell; `@sm_90a`
ends one of Hopper's. Decode keys with a suffix have a grammar of their own, in words, which says nothing twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cakegen.errors import PlanError


@dataclass(frozen=True)
class Letters:
    """One part of a key.

    Parameters
    ----------
    spelling
        As the key has it, with `#` for a number.
    field
        Of the form, which the numbers are values of; several are separated by blanks. Empty: the form has none.
    meaning
        What is said of a key that has the part; `{0}` and the like stand for its numbers.
    negated
        What is said where its one number is 0.
    """

    spelling: str
    field: str
    meaning: str
    negated: str = ""

    @property
    def pattern(self) -> str:
        """The part as a regular expression, a group a number."""
        return re.escape(self.spelling).replace(r"\#", "#").replace("#", r"(\d+)")


DECODE = (
    Letters("_g#", "grid_ctas", "a grid of {0} CTAs"),
    Letters("_n#", "n_pad", "a tile of {0} tokens, to which the request's are padded"),
    Letters("_r#", "num_stages", "a ring of {0} stages"),
    Letters("_d#", "chunks_per_stage", "{0} K chunk(s) of 64 columns a stage"),
    Letters("_p#", "", "launched programmatically by itself", "not launched programmatically by itself"),
    Letters("_w#", "", "weights are packed by a program", "no program packs weights"),
    Letters(
        "_t#_#_#",
        "router_tiles latent_tiles shared_tiles",
        "{0} router, {1} latent and {2} shared tiles; a tail's are its output's, counted as latent",
    ),
    Letters(
        "_k#_#",
        "k1_chunks k2_chunks",
        "{0} K chunks of hidden (front) or of the latent slice (tail), {1} of the shared slice",
    ),
    Letters("_o#", "out_cols", "{0} columns of latent (front) or of out (tail)"),
    Letters("_c#", "cluster_ctas", "clusters of {0} CTA(s); two split a tile's K"),
    Letters("_m#", "block_m", "{0} weight rows a tile, not 128"),
    Letters("_f", "fused_norm", "the tail's norm runs inside the launch"),
    Letters("_g#", "issue_gate", "{0} weight stages are issued before the routed rows are loaded"),
    Letters("_sb", "resident_b", "normalised rows stay in shared memory as the B operand"),
    Letters("_rs", "staged_rows", "routed rows are staged in shared memory first"),
    Letters("_np", "no_prefetch", "no tensor-map prefetch"),
    Letters("_st#", "stagger_units", "the first fill of the ring pauses before unit {0}"),
    Letters("_ww", "wide_wait", "only the epilogue waits for the cluster"),
    Letters("_la", "landing_alias", "a partner's sums land in the drained ring"),
    Letters("_sf", "split_finalize", "each CTA of a pair finishes half of the tokens"),
    Letters("_tt#", "token_parts", "{0} CTAs of a tile split its tokens"),
    Letters("_kt#", "k1_ragged_cols", "the last K chunk of the latent slice has {0} columns"),
)
"""In the order in which a key has them; those from `_m#` on only where they say something."""
DECODE_IN_WORDS = (
    Letters("tp#", "tp", "tensor-parallel degree {0}"),
    Letters("_n#", "n_pad", "a tile of {0} tokens, to which the request's are padded"),
    Letters("_r#", "num_stages", "a ring of {0} stages"),
    Letters("_d#", "chunks_per_stage", "{0} K chunks of 64 columns a stage, not 1"),
    Letters("_m#", "block_m", "{0} weight rows a tile, not 128"),
    Letters("_pair", "", "two CTAs of a cluster split a tile's K"),
    Letters("_tokens", "", "two CTAs split a tile's tokens"),
    Letters("_apart", "", "the norm is a launch of its own"),
    Letters("_memory", "fused_norm", "the norm runs inside the launch; its rows go through the workspace of y"),
    Letters("_resident", "resident_b", "likewise, but its rows stay in shared memory as the B operand"),
    Letters("_staged", "staged_rows", "likewise, and routed rows are staged in shared memory first"),
    Letters("_gate#", "issue_gate", "{0} weight stages are issued before the routed rows are loaded"),
    Letters("_pause#", "stagger_units", "the first fill of the ring pauses before unit {0}"),
    Letters("_alias", "landing_alias", "a partner's sums land in the drained ring"),
    Letters("_halves", "split_finalize", "each CTA of a pair finishes half of the tokens"),
)
"""Behind `front_` or `tail_`, in this order; those from `_d#` on only where they say something."""
FRONT = (
    Letters("i#", "", "{0} shared-expert columns a rank"),
    Letters("e1", "evict_first", "weights are streamed past L2"),
    Letters("s#", "num_stages", "a ring of {0} stages"),
    Letters("n#", "block_n", "tiles of {0} columns"),
    Letters("p1", "", "a CTA's warpgroups take turns, each with whole tiles"),
)
TAIL = (
    Letters("tp#", "tp", "tensor-parallel degree {0}"),
    Letters("e#", "evict_first", "weights are streamed past L2", "weights may stay in L2"),
    Letters("f#", "fused_norm", "the norm runs inside the launch", "the norm is a launch of its own"),
    Letters("kt#", "k1_ragged_cols", "the last K iteration of the latent slice has {0} columns"),
    Letters("s#", "num_stages", "a ring of {0} stages"),
    Letters("n#", "block_n", "tiles of {0} columns"),
    Letters("p1", "", "a CTA's warpgroups take turns, each with whole tiles"),
    Letters("t1", "staged_store", "the last tile is stored through shared memory"),
)
NORM = (
    Letters(
        "e#",
        "early_trigger",
        "the next launch is released at entry",
        "the next launch is released behind the stores",
    ),
)
IN_WORDS = "decode @"
GRAMMARS = {
    "decode": DECODE,
    IN_WORDS: DECODE_IN_WORDS,
    "front": FRONT,
    "tail_gemm": TAIL,
    "tail_norm": NORM,
    "tail_sum": NORM,
}
"""By what stands before the colon, and whether there is a suffix, if that matters. The parts of a GEMM's key that its
tile's defaults do not need are left out."""
_REQUIRED = {"decode": 10, IN_WORDS: 3, "front": 1, "tail_gemm": 1, "tail_norm": 1, "tail_sum": 1}
_KINDS = tuple(name for name in GRAMMARS if name != IN_WORDS)
_STAGES = ("front", "tail")


@dataclass(frozen=True)
class Part:
    """A part of a key as it stands there, its letters, and its numbers."""

    text: str
    letters: Letters
    numbers: tuple[int, ...]

    @property
    def words(self) -> str:
        """What it says."""
        negated = self.letters.negated
        return negated if negated and self.numbers == (0,) else self.letters.meaning.format(*self.numbers)


def split_key(key: str) -> tuple[str, str, tuple[Part, ...], str]:
    """What a key is of, the export or the stage that it names (decode: without a suffix, with one), its parts in order,
    and its architecture (empty: published).

    Raises
    ------
    PlanError
        It is no logical key; the message says from where on.
    """
    kind, colon, rest = key.partition(":")
    body, _, arch = rest.partition("@")
    if not colon or kind not in _KINDS:
        raise PlanError(f"{key!r}: no logical key; one begins with {', '.join(f'{name}:' for name in _KINDS)}")
    named, text, grammar = "", body, kind
    if kind == "decode" and arch:
        grammar = IN_WORDS
        named, _, text = body.partition("_")
        if named not in _STAGES:
            raise PlanError(f"{key!r}: a decode key with a suffix begins with decode:front_ or decode:tail_")
    elif kind == "decode":
        named, _, text = body.rpartition("_decode")
    return kind, named, tuple(_parts(key, text, grammar)), arch


def _parts(key: str, text: str, grammar: str) -> Iterator[Part]:
    position = 0
    for number, letters in enumerate(GRAMMARS[grammar]):
        # `_f` is not the start of `_fp`, nor `_s` of `_sb`: a part ends where letters do
        found = re.compile(
            letters.pattern + r"(?![a-z])" if grammar in ("decode", IN_WORDS) else letters.pattern
        ).match(text, position)
        if found is not None:
            position = found.end()
            yield Part(found[0], letters, tuple(map(int, found.groups())))
        elif number < _REQUIRED[grammar]:
            raise PlanError(
                f"{key!r}: a key of {grammar.removesuffix(' @')} has {letters.spelling} at {text[position:]!r}"
            )
    if position < len(text):
        raise PlanError(f"{key!r}: nothing is spelled {text[position:]!r}, which is at its end")


def explain_key(key: str) -> Iterator[str]:
    """A line a part of a key, in its order: how it is spelled, and what it says; raises as `split_key`."""
    kind, named, parts, arch = split_key(key)
    heads = {
        "decode": "a decode launch",
        "front": "a prefill GEMM of the front",
        "tail_gemm": "a prefill GEMM of the tail",
        "tail_norm": "the norm as a launch of its own",
        "tail_sum": "the sum of partials as a launch of its own",
    }
    yield f"{kind + ':':12} {heads[kind]}{f' of {named}' if named else ''}"
    for part in parts:
        yield f"{part.text:12} {part.words}"
    yield f"{f'@{arch}' if arch else '(no suffix)':12} {arch or 'sm_100a and sm_103a, whose keys are published'}"
