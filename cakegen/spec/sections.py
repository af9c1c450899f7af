"""Leaf module: the sections of an export file as strict pydantic models. Bounds here; what fits together in `legality`.

Every field has the name of the field that it becomes in `cakegen.model` or `cakegen.rules`, where its meaning is
documented.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from cakegen.rules import MAX_ITER_PERCENT

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,47}$")]
ArchName = Annotated[str, Field(pattern=r"^sm_[0-9]{2,3}[a-z]?$")]
TemplatePath = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+(/[A-Za-z0-9_.]+)+$")]
TokenTile = Annotated[Literal[8, 16, 32, 64, 128], Field(description="the token tiles that kernels are written for")]
HopperTokenTile = Annotated[
    Literal[8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384],
    Field(description="the token tiles that kernels are written for; above 192 two CTAs split them"),
]
SplitTile = Annotated[
    Literal[0, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384], Field(description="halves are whole groups of 8 tokens")
]
Degree = Annotated[int, Field(ge=1, le=64)]
SmCount = Annotated[int, Field(ge=1, le=1024)]
Count = Annotated[int, Field(ge=0, le=2**20)]
Positive = Annotated[int, Field(ge=1, le=2**20)]
Percent = Annotated[int, Field(ge=0, le=100)]
Stages = Annotated[int, Field(ge=1, le=32)]
MinSaving = Annotated[int, Field(ge=1, le=2**20, description="a cut that saves nothing is none")]
GemmTile = Annotated[int, Field(ge=64, le=256, multiple_of=64, description="a tensor-map box has at most 256 rows")]
# operands are addressed in 32 bits, and a vector of 8 bf16 is 16 bytes
Width = Annotated[int, Field(ge=64, le=2**17, multiple_of=8)]
WeightTile = Annotated[int, Field(ge=128, le=128, description="a weight tile is two halves of 64 rows, wgmma's M")]
NarrowTile = Annotated[
    Literal[0, 64, 96], Field(description="two MMAs of 64 rows that overlap; half a tile is whole warps of 16 rows")
]
ChunkWidth = Annotated[int, Field(ge=64, le=64, description="a chunk's row is 64 bf16: one 128-byte swizzle row")]


_LEAST_FLOAT = 2.0**-126


def _hold_as_float(value: float) -> float:
    """Programs hold it as a float: below the least normal one, C++ reads 0 or a number that kernels may flush to 0."""
    if 0 < value < _LEAST_FLOAT:
        raise ValueError(f"a float of C++ holds {_LEAST_FLOAT:.9g} or more; {value!r} would be 0 or flushed to it")
    return value


class Section(BaseModel):
    """One table of an export file: no unknown key, no conversion, no change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelSection(Section):
    """`[model]`: dimensions in elements, and the constants of the norm and of SiTU."""

    hidden: Width
    latent: Width
    experts: Width
    shared_intermediate: Width
    norm_eps: Annotated[float, Field(gt=0, lt=1), AfterValidator(_hold_as_float)]
    situ_beta: Annotated[float, Field(gt=0, le=1e6), AfterValidator(_hold_as_float)]
    situ_linear_beta: Annotated[float, Field(gt=0, le=1e6), AfterValidator(_hold_as_float)]


class RequestsSection(Section):
    """`[requests]`: the largest request that must resolve to a program."""

    max_tokens: Annotated[int, Field(ge=1, le=2**20)]
    max_partials: Annotated[int, Field(ge=1, le=1024)]


class TargetSection(Section):
    """`[[targets]]`: one architecture, its TP degrees, and its SM counts (its known parts where left out)."""

    arch: ArchName
    tp_degrees: Annotated[tuple[Degree, ...], Field(min_length=1)]
    sm_counts: Annotated[tuple[SmCount, ...], Field(min_length=1)] | None = None


class KernelSection(Section):
    """`[[kernels]]`: which template writes a kernel family for one family of architectures."""

    name: Name
    arch_family: Name
    template: TemplatePath


class DecodeSection(Section):
    """`[decode]`: fields of `cakegen.rules.DecodeRules`."""

    max_tokens: Annotated[int, Field(ge=1, le=128, description="the widest token tile has 128 rows")]
    max_cta_tokens: Annotated[int, Field(ge=1, le=128, description="the widest token tile has 128 rows")]
    n_pads: Annotated[tuple[TokenTile, ...], Field(min_length=1)]
    block_m: WeightTile
    block_k: ChunkWidth
    max_stages: Stages
    barrier_bytes: Annotated[int, Field(ge=1024, le=8192, multiple_of=1024)]
    flag_bytes: Annotated[
        int, Field(ge=1024, le=8192, multiple_of=1024, description="a chaos build keeps its seed there")
    ]
    single_landing_bytes: Annotated[int, Field(ge=0, le=65536, multiple_of=1024)]
    depth2_min_stages_single: Stages
    depth2_min_stages_pair: Stages
    alias_n_pad: TokenTile
    alias_min_chunks: Count
    staged_max_down_units: Count
    staged_min_stages: Stages
    staged_wide_n_pad: TokenTile
    resident_tokens_staged: Count
    resident_tokens_long: Count
    resident_tokens_short: Count
    resident_min_stages: Stages
    small_n_pad: Annotated[int, Field(ge=0, le=256)]
    small_min_stages_plain: Stages
    issue_ahead: Stages
    front_ahead: Count
    overlap_ahead_n_pad: Annotated[int, Field(ge=0, le=256)]
    overlap_min_sm_percent: Percent
    stagger_units: Count
    split_finalize_n_pad: Annotated[
        int, Field(ge=0, le=256, multiple_of=16, description="halves are whole 8-token groups")
    ]
    front_split_n_pad: Annotated[int, Field(ge=0, le=0, description="no kernel of Blackwell's splits the tokens")]
    front_split_min_sm_percent: Percent
    tail_split_n_pad: Annotated[int, Field(ge=0, le=0, description="no kernel of Blackwell's splits the tokens")]
    tail_split_max_chunks: Count
    tail_split_long_n_pad: Annotated[int, Field(ge=0, le=0, description="no kernel of Blackwell's splits the tokens")]
    tail_depth2_min_stages: Annotated[int, Field(ge=0, le=0, description="a stage of Blackwell's tail is one chunk")]
    tail_short_stages: Stages
    tail_short_split_chunks: Count
    narrow_block_m: Annotated[int, Field(ge=0, le=0, description="Blackwell's MMA has 128 rows, all of one tile")]
    narrow_n_pad: Annotated[int, Field(ge=0, le=0, description="there is no narrow tile")]


class DecodeSm90Section(Section):
    """`[decode_sm90]`: what Hopper does differently from `[decode]`."""

    max_tokens: Annotated[int, Field(ge=1, le=384, description="two CTAs split a tile, and have 192 rows each")]
    max_cta_tokens: Annotated[
        int, Field(ge=1, le=192, description="two MMAs of 192 tokens take 192 of a thread's 255 registers")
    ]
    n_pads: Annotated[tuple[HopperTokenTile, ...], Field(min_length=1)]
    single_landing_bytes: Annotated[int, Field(ge=0, le=65536, multiple_of=1024)]
    depth2_min_stages_single: Stages
    depth2_min_stages_pair: Stages
    alias_min_chunks: Count
    resident_tokens_staged: Count
    issue_ahead: Stages
    overlap_min_sm_percent: Percent
    split_finalize_n_pad: Annotated[
        int, Field(ge=0, le=256, multiple_of=16, description="halves are whole 8-token groups")
    ]
    front_split_n_pad: SplitTile
    front_split_min_sm_percent: Percent
    tail_split_n_pad: SplitTile
    tail_split_max_chunks: Count
    tail_split_long_n_pad: SplitTile
    tail_depth2_min_stages: Annotated[int, Field(ge=0, le=32)]
    tail_short_stages: Stages
    tail_short_split_chunks: Count
    narrow_block_m: NarrowTile
    narrow_n_pad: Annotated[int, Field(ge=0, le=256)]


class PrefillSection(Section):
    """`[prefill]`: fields of `cakegen.rules.PrefillRules`."""

    block_m: Annotated[int, Field(ge=128, le=128, description="a CTA's lanes of tensor memory: a pair has M = 256")]
    block_n: GemmTile
    block_k: ChunkWidth
    raster_m_tiles: Annotated[int, Field(ge=2, le=2**20, multiple_of=2, description="a pair of CTAs has two row tiles")]
    front_epilogue_iters: Count
    front_min_saving_percent: Percent
    front_evict_first_pair_rows: Count
    narrow_block_n: GemmTile
    narrow_stages: Stages
    narrow_min_tp: Degree
    narrow_tokens: Positive
    default_stages: Stages
    short_ring_stages: Stages
    short_ring_max_tokens: Count
    short_ring_tp: Degree
    stream_k_min_chunks: Positive
    stream_k_min_ipc: Positive
    stream_k_max_segments: Positive
    stream_k_segment_cost: Count
    stream_k_min_saving: Count
    stream_k_max_remainder_percent: Percent
    stream_k_full_reuse: Positive
    fused_norm_min_down_chunks: Count
    fused_norm_rows_per_cta: Positive
    norm_rows_per_cta: Annotated[int, Field(ge=1, le=32, description="a row a warp; a CTA has at most 32 warps")]


class HopperTileSection(Section):
    """`[[prefill_sm90.tiles]]`: fields of `cakegen.rules.HopperTile`."""

    block_n: Annotated[
        int,
        Field(ge=32, le=256, multiple_of=16, description="gate and up halves of whole 8 columns; wgmma has N <= 256"),
    ]
    num_stages: Annotated[
        int, Field(ge=2, le=32, description="the MMA warps free a stage when they have issued the next one")
    ]
    tile_groups: Annotated[int, Field(ge=1, le=2, description="2: the MMA warpgroups share a tile, 1: they take turns")]
    iter_percent: Annotated[int, Field(ge=1, le=MAX_ITER_PERCENT)]
    epilogue_iters: Count
    segment_cost: Count


class PrefillSm90Section(Section):
    """`[prefill_sm90]`: fields of `cakegen.rules.HopperPrefillRules`."""

    block_m: Annotated[int, Field(ge=128, le=128, description="two warpgroups of 64 tokens, wgmma's M")]
    block_k: ChunkWidth
    raster_m_tiles: Annotated[int, Field(ge=2, le=2**20, multiple_of=2, description="a pair of CTAs has two row tiles")]
    stream_k_min_ipc: Positive
    stream_k_max_segments: Annotated[int, Field(ge=1, le=64)]
    stream_k_min_saving: MinSaving
    stream_k_wider_min_saving: MinSaving
    norm_launch_iters: Count
    norm_launch_rows_per_iter: Positive
    norm_first_iters: Count
    norm_first_rows_per_iter: Positive
    norm_hidden_rows_per_iter: Count
    norm_hidden_iters: Count
    norm_hidden_min_rows: Count
    tiles: Annotated[tuple[HopperTileSection, ...], Field(min_length=1)]
