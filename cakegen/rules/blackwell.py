"""Leaf module: rules of the family of architectures with tensor memory. Imports `decode` and `meaning`.

Prefill counts K in chunks of 64 columns; costs and savings in K iterations of one pair of CTAs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cakegen.rules.decode import DecodeRules
from cakegen.rules.meaning import Meaning, count, norm_rows, percent, positive, raster, stages


def _columns(text: str) -> Meaning:
    return Meaning(text, "columns", 64, 256, 64, why="a tensor-map box has at most 256 rows")


def _degree(text: str) -> Meaning:
    return Meaning(text, "ranks", 1, 64)


@dataclass(frozen=True)
class FrontHalves:
    """The front's trailing tiles as two K halves each."""

    epilogue_iters: Annotated[int, count("what the end of a tile counts as", "iterations")]
    min_saving_percent: Annotated[int, percent("where that saves so much of the whole")]


@dataclass(frozen=True)
class NarrowGemm:
    """The tail's narrow tiles, at the one token count at which they fill the waves better."""

    block_n: Annotated[int, _columns("columns of a narrow tile")]
    num_stages: Annotated[int, stages("stages of its ring")]
    min_tp: Annotated[int, _degree("from this TP degree on")]
    tokens: Annotated[int, positive("at exactly so many tokens", "tokens")]


@dataclass(frozen=True)
class ShortGemmRing:
    """The tail's shorter ring, where few rows meet the whole shared expert: a stage makes room for the staged store."""

    num_stages: Annotated[int, stages("stages of the short ring")]
    max_tokens: Annotated[int, count("up to so many tokens", "tokens")]
    tp: Annotated[int, _degree("at this TP degree")]


@dataclass(frozen=True)
class StreamK:
    """The tail's trailing wave, cut into equal runs of K iterations."""

    min_chunks: Annotated[int, positive("from so many chunks of K on", "chunks")]
    min_ipc: Annotated[int, positive("fewest iterations of an item", "iterations")]
    max_segments: Annotated[int, positive("most items that share a tile", "items")]
    segment_cost: Annotated[int, count("what a further segment of a tile costs", "iterations")]
    min_saving: Annotated[int, count("what a cut must save over whole tiles", "iterations")]
    max_remainder_percent: Annotated[
        int, percent("below full reuse, a cut needs a full wave before it and at most so much of one behind it")
    ]
    full_reuse: Annotated[int, positive("pair rows of a raster group that are full reuse", "pair rows")]


@dataclass(frozen=True)
class EarlyFusedNorm:
    """The norm inside the GEMM, where the shared-down segment hides it and the grid is one wave."""

    min_down_chunks: Annotated[int, count("from so many shared-down chunks on", "chunks")]
    rows_per_cta: Annotated[int, positive("at most so many rows a CTA", "rows")]


@dataclass(frozen=True)
class BlackwellPrefillRules:
    """Prefill: persistent GEMMs of CTA pairs, a CTA with 128 tokens."""

    block_n: Annotated[int, _columns("columns of a pair's tile")]
    num_stages: Annotated[int, stages("stages of the ring")]
    raster_m_tiles: Annotated[int, raster("row tiles that share the weights while they are in L2")]
    evict_first_pair_rows: Annotated[
        int | None, count("the front streams the weights evict-first up to so many pair rows", "pair rows")
    ]
    halves: FrontHalves | None
    narrow: NarrowGemm | None
    short_ring: ShortGemmRing | None
    stream_k: StreamK | None
    fused_norm: EarlyFusedNorm | None


@dataclass(frozen=True)
class BlackwellRules:
    """All rules of the family."""

    norm_rows_per_cta: Annotated[int, norm_rows()]
    decode: DecodeRules
    prefill: BlackwellPrefillRules
