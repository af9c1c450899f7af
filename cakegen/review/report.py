"""What every format of a review shows: its parts, and their tables as rows of text. Imports this package."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cakegen.review.compare import UNCHANGED, ExportReview, KeyReview
from cakegen.review.cost import Cost, CostChange

_COMPARED = (
    ("registers", "registers"),
    ("spill bytes", "spill_bytes"),
    ("shared bytes", "smem_bytes"),
    ("instructions", "instructions"),
    ("SASS bytes", "code_bytes"),
)
COST_COLUMNS = ("target", *(name for name, _ in _COMPARED), "code", "keys")

WORST_ROWS = 20
"""So many rows of what compiles to other code are shown first; the others are folded or counted."""

FOLDED_KEYS = 4
"""From so many keys on that differ in nothing but a header, a list of keys counts them in one line."""


@dataclass(frozen=True)
class Review:
    """A whole comparison.

    Parameters
    ----------
    base
        What the old trees were read from.
    exports
        One comparison an export.
    costs
        What touched programs compile to, by export; None where nothing was compiled.
    compiler
        The compiler's name, where it ran.
    selection
        Patterns of the keys that were compared; empty: all.
    """

    base: str
    exports: tuple[ExportReview, ...]
    costs: dict[str, list[CostChange]] | None
    compiler: str = ""
    selection: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What is compared."""
        keys = f", keys {' '.join(self.selection)}" if self.selection else ""
        return f"generated programs: {self.base} -> working tree{keys}"

    @property
    def clean(self) -> bool:
        """Whether nothing differs."""
        return all(not e.model and not e.texts and e.count(UNCHANGED) == len(e.keys) for e in self.exports)

    def costs_of(self, export: ExportReview) -> list[CostChange]:
        """What the touched programs of an export compile to."""
        return (self.costs or {}).get(export.export, [])

    def verdict(self, export: ExportReview) -> str:
        """One line on the compiled code of an export."""
        if self.costs is None:
            return "nothing was compiled"
        entries = self.costs_of(export)
        if not entries:
            return "no program compiles to anything else: all texts, flags and constants are the same"
        same, failed = sum(entry.same_code for entry in entries), sum(bool(entry.failure) for entry in entries)
        words = [f"{same} of {len(entries)} touched programs compile to the same machine code, byte by byte"]
        if failed:
            words.append(f"{failed} could not be compiled on both sides")
        return "; ".join([*words, self.compiler])


def touched_keys(export: ExportReview) -> list[KeyReview]:
    """The keys that are not unchanged: changed ones first, then added, then removed."""
    order = ("changed", "added", "removed")
    return sorted((e for e in export.keys if e.status in order), key=lambda e: (order.index(e.status), e.key))


def split_touched(export: ExportReview) -> tuple[list[KeyReview], list[KeyReview]]:
    """The touched keys, less those that differ in a header alone; and those: each stands below its difference."""
    touched = touched_keys(export)
    alone = [entry for entry in touched if entry.status == "changed" and entry.parts == ("header",)]
    if len(alone) < FOLDED_KEYS:
        return touched, []
    return [entry for entry in touched if entry not in alone], alone


def remark(entry: KeyReview, quote: Callable[[str], str] = str) -> str:
    """Behind a key: which parts of it differ, and what it replaces; `quote` marks up another key's name."""
    words = [", ".join(entry.parts)] if entry.parts else []
    if entry.replaces is not None:
        words.append(f"replaces {quote(entry.replaces)}")
    return "; ".join(words)


def differing_costs(entries: Sequence[CostChange]) -> list[CostChange]:
    """The entries whose machine code is not the same on both sides; the others are no more than a count."""
    return [entry for entry in entries if not entry.same_code]


def worst_first(review: Review, exports: Sequence[ExportReview]) -> list[tuple[str, CostChange]]:
    """What compiles to other code, of all exports: failures, then by how much more is spilled, and so on.

    Returns
    -------
    list
        (export, entry) pairs.
    """
    found = [(export.export, entry) for export in exports for entry in differing_costs(review.costs_of(export))]
    return sorted(found, key=lambda pair: (*_rank(pair[1]), pair[1].arch, pair[0], pair[1].keys))


def _rank(entry: CostChange) -> tuple[float, ...]:
    """Lowest for what is worst: a failure; more spills, registers, instructions (their ratio), shared memory.

    What is new or gone has nothing to be compared with, and comes last.
    """
    before, after = entry.before, entry.after
    if before is None or after is None:
        return (not entry.failure, math.inf)
    return (
        not entry.failure,
        before.spill_bytes - after.spill_bytes,
        before.registers - after.registers,
        before.instructions / max(after.instructions, 1),
        before.smem_bytes - after.smem_bytes,
    )


def cost_summary(entries: Sequence[CostChange]) -> str:
    """How many programs compile to other code, and the most that one of them takes more than before."""
    pairs = [(entry.before, entry.after) for entry in entries if entry.before is not None and entry.after is not None]
    words = []
    for name, field in _COMPARED:
        sides = [(getattr(before, field), getattr(after, field)) for before, after in pairs]
        before, after = max(sides, key=lambda side: side[1] - side[0], default=(0, 0))
        if after > before:
            share = f", {100 * (after - before) / before:+.1f} %" if before else ""
            words.append(f"{name} {before} -> {after}{share}")
    return counted(len(entries), "program") + (f"; at worst {'; '.join(words)}" if words else "; none takes more")


def cost_rows(review: Review, pairs: Sequence[tuple[str, CostChange]]) -> Iterator[tuple[str, ...]]:
    """One row a program and target, in the order of `COST_COLUMNS`; with the export, where there are several."""
    for export, entry in pairs:
        before, after = entry.before, entry.after
        cells = [
            _pair(getattr(before, field) if before else None, getattr(after, field) if after else None)
            for _, field in _COMPARED
        ]
        keys = keys_in_short(entry.keys)
        owner = f"{export}: " if len(review.exports) > 1 else ""
        yield (entry.arch, *cells, _code(entry, before, after), f"{owner}{keys}")


def counted(number: int, noun: str) -> str:
    """`1 key`, `2 keys`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def keys_in_short(keys: Sequence[str]) -> str:
    """The first key, and how many there are beside it."""
    return f"{keys[0]} (+{len(keys) - 1})" if len(keys) > 1 else "".join(keys)


def _pair(before: int | None, after: int | None) -> str:
    if before == after:
        return "-" if before is None else str(before)
    return f"{'-' if before is None else before} -> {'-' if after is None else after}"


def _code(entry: CostChange, before: Cost | None, after: Cost | None) -> str:
    if entry.failure:
        return "does not compile"
    if before is None or after is None:
        return "new" if before is None else "gone"
    return "same" if entry.same_code else "differs"
