"""Leaf module: rules of the family of architectures with wgmma. Imports `decode` and `meaning`.

A pair of CTAs computes a tile of 256 tokens by `block_n` weight rows in steps of 64 columns: a K iteration. Costs and
savings are counted in K iterations of one pair, so that they do not depend on the clock.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from cakegen.rules.decode import DecodeRules
from cakegen.rules.meaning import Meaning, count, norm_rows, positive, raster

MAX_ITER_PERCENT = 1000
"""Of `HopperTile.iter_percent`: so dear a tile pays only where ends of tiles cost many times their iterations."""


def _saving(text: str) -> Meaning:
    return positive(text, "iterations", why="a cut that saves nothing is none")


@dataclass(frozen=True)
class HopperTile:
    """One way to lay out a GEMM, and what it costs, in K iterations of this tile.

    A plan takes the cheapest of the table, of equally cheap ones the first. Keys spell all but the first.
    """

    block_n: Annotated[
        int,
        Meaning(
            "weight rows of a tile; both CTAs of a pair multiply by all of them, and each loads half",
            "rows",
            32,
            256,
            16,
            why="gate and up halves of whole 8 columns; wgmma has N <= 256",
        ),
    ]
    num_stages: Annotated[
        int,
        Meaning(
            "K iterations that the ring in shared memory holds",
            "stages",
            2,
            32,
            why="the MMA warps free a stage when they have issued the next one",
        ),
    ]
    tile_groups: Annotated[
        int,
        Meaning(
            "2: a CTA's warpgroups share a tile; 1: they take turns, each with whole tiles", "warpgroups", one_of=(1, 2)
        ),
    ]
    iter_percent: Annotated[
        int, Meaning("what an iteration costs, of one of the first tile of the table", "percent", 1, MAX_ITER_PERCENT)
    ]
    epilogue_iters: Annotated[
        int, count("what the end of a piece costs: the accumulators are read out, nothing is multiplied", "iterations")
    ]
    segment_cost: Annotated[int, count("what each segment of a cut tile after the first costs", "iterations")]


@dataclass(frozen=True)
class CutRules:
    """The trailing wave, or it and the one before, cut into equal items."""

    min_ipc: Annotated[int, positive("fewest K iterations of an item", "iterations")]
    max_segments: Annotated[
        int, Meaning("most items that share a tile; the partials' workspace grows with it", "items", 1, 64)
    ]
    min_saving: Annotated[int, _saving("what a cut of the trailing wave must save over whole tiles")]
    wider_min_saving: Annotated[
        int, _saving("what cutting the wave before it too must save over the better of those two")
    ]


@dataclass(frozen=True)
class AllRowsFirst:
    """Where a fused norm does all rows first: few iterations are over before a norm warp has stored a row."""

    under_iters: Annotated[int, positive("with fewer shared-down iterations than these", "iterations")]
    under_rows: Annotated[int, positive("and fewer rows than these", "rows")]


@dataclass(frozen=True)
class NormCosts:
    """What the tail's norm adds, in iterations of the first tile: in a launch of its own, or inside the GEMM."""

    launch_iters: Annotated[int, count("a launch of its own: so many", "iterations")]
    launch_rows_per_iter: Annotated[int, positive("and one for so many rows", "rows")]
    first_iters: Annotated[int, count("inside, if rows are normalised before the first tile: so many", "iterations")]
    first_rows_per_iter: Annotated[int, positive("and one for so many of those rows", "rows")]
    hidden_rows_per_iter: Annotated[
        int, count("rows of the first tiles that each shared-down iteration hides; the others come first", "rows")
    ]
    all_first: AllRowsFirst | None


@dataclass(frozen=True)
class HopperPrefillRules:
    """Prefill: persistent GEMMs of CTA pairs, a CTA with 128 tokens. A plan takes the cheapest of the tiles."""

    raster_m_tiles: Annotated[
        int, raster("row tiles that pass a weight tile one after another, so that it is read from L2")
    ]
    cut: CutRules
    norm: NormCosts
    tiles: tuple[HopperTile, ...]

    def preferring(self, tile: HopperTile) -> HopperPrefillRules:
        """These rules with costs at which a plan takes one of the tiles, whatever the others would save."""
        tiles = (dataclasses.replace(t, iter_percent=1 if t == tile else MAX_ITER_PERCENT) for t in self.tiles)
        return dataclasses.replace(self, tiles=tuple(tiles))


@dataclass(frozen=True)
class HopperRules:
    """All rules of the family."""

    norm_rows_per_cta: Annotated[int, norm_rows()]
    decode: DecodeRules
    prefill: HopperPrefillRules
