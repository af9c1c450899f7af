"""Leaf module: tile choices and thresholds of the decode planner, in tables by what they decide. Imports `meaning`.

A ring stage holds one or two K chunks of a weight tile (`[block_m, 64]` bf16) and of the tokens (`[n_pad, 64]` bf16).
Two CTAs of a tile either split K, and are a pair that adds its sums up, or they split the tokens and exchange nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cakegen.rules.meaning import Meaning, count, half_tile, percent, positive, stages, token_tile


@dataclass(frozen=True)
class LandingAlias:
    """Where a pair's sums land in the drained ring, not beside it."""

    from_n_pad: Annotated[int, token_tile("from this token tile on")]
    from_chunks: Annotated[int, count("where half of K has so many chunks", "chunks")]


@dataclass(frozen=True)
class NarrowTiles:
    """Narrower tiles of a front, so that more CTAs stream the weights, where all of them run at once."""

    block_m: Annotated[
        int,
        Meaning(
            "weight rows of a narrow tile",
            "rows",
            one_of=(64, 96),
            why="two MMAs of 64 rows that overlap; half a tile is whole warps of 16 rows",
        ),
    ]
    max_n_pad: Annotated[int, token_tile("up to this token tile")]


@dataclass(frozen=True)
class FrontSplit:
    """Where two CTAs of a front's tile split the tokens instead of K."""

    from_n_pad: Annotated[int, half_tile("from this token tile on")]
    min_sm_percent: Annotated[int, percent("where all CTAs are so many percent of the SMs")]


@dataclass(frozen=True)
class FrontRules:
    """Decode's front."""

    depth2_min_stages_single: Annotated[
        int, stages("one CTA a tile loads two chunks a stage where its ring then keeps so many stages")
    ]
    depth2_min_stages_pair: Annotated[int, stages("a pair does where its ring then keeps so many")]
    weights_ahead: Annotated[
        int,
        count("weight stages issued before the wait for an earlier launch; more hold up the first tokens", "stages"),
    ]
    narrow: NarrowTiles | None
    split_tokens: FrontSplit | None


@dataclass(frozen=True)
class StaggeredFill:
    """A first fill of the ring that pauses, so that it does not queue in front of the staged rows."""

    from_n_pad: Annotated[int, token_tile("from this token tile on")]
    pause_unit: Annotated[int, positive("the unit before which the producer pauses", "units")]


@dataclass(frozen=True)
class StagedRows:
    """Routed rows that are copied to shared memory first, where the norm is what a CTA waits for."""

    max_tokens: Annotated[
        int, positive("up to so many tokens, whose normalised rows then stay in shared memory", "tokens")
    ]
    min_stages: Annotated[int, stages("where the ring keeps so many stages beside them")]
    staggered: StaggeredFill | None


@dataclass(frozen=True)
class SmallTile:
    """A ring that leaves one stage free for few tokens."""

    max_n_pad: Annotated[int, token_tile("up to this token tile")]
    min_stages: Annotated[int, stages("but keeps so many stages, where neither rows nor y are beside it")]


@dataclass(frozen=True)
class TailSplit:
    """Where two CTAs of a tail's tile split the tokens instead of K: each loads all of the weights."""

    from_n_pad: Annotated[int, half_tile("from this token tile on")]
    max_chunks: Annotated[int, count("of up to so many K chunks", "chunks")]
    long_from_n_pad: Annotated[int | None, half_tile("of more chunks from this token tile on")]


@dataclass(frozen=True)
class ShortRing:
    """A ring that stays short where K is: its first weights queue in front of the routed rows and of y."""

    max_stages: Annotated[int, stages("so many stages at most")]
    pair_chunks: Annotated[int, count("where a pair splits up to so many K chunks", "chunks")]
    split_chunks: Annotated[int, count("where two CTAs each load up to so many", "chunks")]


@dataclass(frozen=True)
class TailRules:
    """Decode's tail. Whether the norm's rows are staged, stay in shared memory or pass through memory, and the ring."""

    short_down_units: Annotated[
        int, count("a CTA's shared-down units are few up to so many: they do not hide the norm", "units")
    ]
    resident_tokens_long: Annotated[
        int, count("normalised rows stay in shared memory up to so many tokens, with more units than those", "tokens")
    ]
    resident_tokens_short: Annotated[int, count("with as few units or fewer, where the rows are not staged", "tokens")]
    resident_min_stages: Annotated[int, stages("stages that the ring must keep beside rows that stay")]
    weights_ahead: Annotated[int, stages("weight stages issued before the row loads, where a gate holds those back")]
    depth2_min_stages: Annotated[
        int | None, stages("two CTAs of a tile load two chunks a stage where the ring then keeps so many stages")
    ]
    staged: StagedRows | None
    small: SmallTile | None
    split_tokens: TailSplit | None
    short_ring: ShortRing | None


@dataclass(frozen=True)
class DecodeRules:
    """Decode: one launch that streams the weights past a few tokens."""

    n_pads: Annotated[
        tuple[int, ...],
        Meaning(
            "token tiles, rising: a request takes the first that holds it, one that none holds is prefill",
            "tokens",
            8,
            384,
            8,
        ),
    ]
    max_cta_tokens: Annotated[int, Meaning("the widest token tile that one CTA multiplies", "tokens", 8, 192, 8)]
    max_stages: Annotated[int, stages("most stages of the ring, which takes what shared memory leaves")]
    single_landing_bytes: Annotated[
        int, Meaning("reserved for the sums of a partner where a CTA has none", "bytes", 0, 65536, 1024)
    ]
    overlap_min_sm_percent: Annotated[
        int,
        percent("a launch without pairs overlaps the one before it where it has CTAs for so many percent of the SMs"),
    ]
    overlap_ahead_n_pad: Annotated[
        int | None, token_tile("up to this token tile, a launch that overlaps issues its whole ring of weights first")
    ]
    split_finalize_n_pad: Annotated[
        int | None, half_tile("from this token tile on, each CTA of a pair finishes half of the tokens")
    ]
    landing_alias: LandingAlias | None
    front: FrontRules
    tail: TailRules

    @property
    def max_tokens(self) -> int:
        """Largest T of decode: what the widest token tile holds."""
        return self.n_pads[-1]

    @property
    def token_edges(self) -> set[int]:
        """Token counts up to which a plan is the same, if its tile is."""
        staged = {self.tail.staged.max_tokens} if self.tail.staged else set[int]()
        return {
            *self.n_pads,
            self.max_cta_tokens,
            self.tail.resident_tokens_long,
            self.tail.resident_tokens_short,
        } | staged
