"""The models that tests plan, render and run, as plain records (no TOML, no pydantic).

`kimi_k3_model` and `tiny_model` equal what `exports/*/export.toml` declares; a test of the spec holds them together.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cakegen.model import Family, Model, ModelDims, Target
from cakegen.rules import DecodeRules, HopperPrefillRules, HopperTile, PrefillRules

DECODE = DecodeRules(
    max_tokens=128,
    max_cta_tokens=128,
    n_pads=(8, 16, 32, 64, 128),
    block_m=128,
    block_k=64,
    max_stages=12,
    barrier_bytes=1024,
    flag_bytes=1024,
    single_landing_bytes=1024,
    depth2_min_stages_single=4,
    depth2_min_stages_pair=6,
    alias_n_pad=128,
    alias_min_chunks=32,
    staged_max_down_units=16,
    staged_min_stages=5,
    staged_wide_n_pad=16,
    resident_tokens_staged=16,
    resident_tokens_long=8,
    resident_tokens_short=4,
    resident_min_stages=6,
    small_n_pad=8,
    small_min_stages_plain=2,
    issue_ahead=3,
    stagger_units=2,
    front_ahead=3,
    overlap_ahead_n_pad=8,
    overlap_min_sm_percent=0,
    split_finalize_n_pad=0,
    front_split_n_pad=0,
    front_split_min_sm_percent=0,
    tail_split_n_pad=0,
    tail_split_max_chunks=0,
    tail_split_long_n_pad=0,
    tail_depth2_min_stages=0,
    tail_short_stages=12,
    tail_short_split_chunks=0,
    narrow_block_m=0,
    narrow_n_pad=0,
)

# What Hopper does differently.
SM90_DECODE_CHANGES: dict[str, Any] = {
    "max_tokens": 320,
    "max_cta_tokens": 192,
    "n_pads": (8, 16, 32, 64, 96, 128, 160, 192, 256, 320),
    "single_landing_bytes": 0,
    "depth2_min_stages_single": 5,
    "depth2_min_stages_pair": 4,
    "alias_min_chunks": 4096,
    "resident_tokens_staged": 4,
    "issue_ahead": 2,
    "overlap_min_sm_percent": 75,
    "split_finalize_n_pad": 32,
    "front_split_n_pad": 256,
    "front_split_min_sm_percent": 70,
    "tail_split_n_pad": 16,
    "tail_split_max_chunks": 76,
    "tail_split_long_n_pad": 64,
    "tail_depth2_min_stages": 5,
    "tail_short_stages": 7,
    "tail_short_split_chunks": 19,
    "narrow_block_m": 96,
    "narrow_n_pad": 64,
}
# The small model's K is shorter; it has the widest tile that two CTAs split too.
TINY_SM90_DECODE_CHANGES = SM90_DECODE_CHANGES | {
    "max_tokens": 384,
    "n_pads": (*SM90_DECODE_CHANGES["n_pads"], 384),
    "tail_split_max_chunks": 12,
    "tail_short_split_chunks": 6,
    "overlap_min_sm_percent": 5,
}

PREFILL = PrefillRules(
    block_m=128,
    block_n=256,
    block_k=64,
    raster_m_tiles=16,
    front_epilogue_iters=18,
    front_min_saving_percent=4,
    front_evict_first_pair_rows=2,
    narrow_block_n=128,
    narrow_stages=9,
    narrow_min_tp=8,
    narrow_tokens=512,
    default_stages=7,
    short_ring_stages=6,
    short_ring_max_tokens=256,
    short_ring_tp=1,
    stream_k_min_chunks=64,
    stream_k_min_ipc=32,
    stream_k_max_segments=4,
    stream_k_segment_cost=12,
    stream_k_min_saving=32,
    stream_k_max_remainder_percent=55,
    stream_k_full_reuse=8,
    fused_norm_min_down_chunks=48,
    fused_norm_rows_per_cta=8,
    norm_rows_per_cta=4,
)

PREFILL_SM90 = HopperPrefillRules(
    block_m=128,
    block_k=64,
    raster_m_tiles=16,
    stream_k_min_ipc=8,
    stream_k_max_segments=4,
    stream_k_min_saving=7,
    stream_k_wider_min_saving=60,
    norm_launch_iters=3,
    norm_launch_rows_per_iter=170,
    norm_first_iters=4,
    norm_first_rows_per_iter=140,
    norm_hidden_rows_per_iter=33,
    norm_hidden_iters=48,
    norm_hidden_min_rows=641,
    tiles=(
        HopperTile(256, 4, tile_groups=2, iter_percent=100, epilogue_iters=2, segment_cost=12),
        HopperTile(224, 4, tile_groups=2, iter_percent=87, epilogue_iters=3, segment_cost=16),
        HopperTile(176, 5, tile_groups=2, iter_percent=70, epilogue_iters=3, segment_cost=16),
        HopperTile(192, 5, tile_groups=2, iter_percent=75, epilogue_iters=4, segment_cost=10),
        HopperTile(240, 4, tile_groups=2, iter_percent=94, epilogue_iters=3, segment_cost=16),
        HopperTile(144, 6, tile_groups=2, iter_percent=61, epilogue_iters=2, segment_cost=18),
        HopperTile(128, 6, tile_groups=1, iter_percent=51, epilogue_iters=7, segment_cost=20),
    ),
)

FAMILIES = (
    Family(name="decode", arch_family="sm90", template="kernels/sm90/decode.cu"),
    Family(name="tail_norm", arch_family="sm90", template="kernels/tail_norm.cu"),
    Family(name="front_gemm", arch_family="sm90", template="kernels/sm90/front_gemm.cu"),
    Family(name="tail_gemm", arch_family="sm90", template="kernels/sm90/tail_gemm.cu"),
    Family(name="decode", arch_family="sm100", template="kernels/sm100/decode.cu"),
    Family(name="tail_norm", arch_family="sm100", template="kernels/tail_norm.cu"),
    Family(name="front_gemm", arch_family="sm100", template="kernels/sm100/front_gemm.cu"),
    Family(name="tail_gemm", arch_family="sm100", template="kernels/sm100/tail_gemm.cu"),
)

# What the small model changes, so that it reaches the forms of the large one. Token limits and ring depths stay: they
# follow from shared memory, which is the same; the limits on K shrink with K (8 chunks of hidden instead of 112).
TINY_DECODE_CHANGES: dict[str, int] = {"alias_min_chunks": 4, "staged_max_down_units": 3}
TINY_PREFILL_CHANGES: dict[str, int] = {
    "front_epilogue_iters": 1,
    "stream_k_min_chunks": 16,
    "stream_k_min_ipc": 2,
    "stream_k_segment_cost": 1,
    "stream_k_min_saving": 2,
    "fused_norm_min_down_chunks": 16,
    "fused_norm_rows_per_cta": 40,
}
TINY_PREFILL_SM90_CHANGES: dict[str, Any] = {
    "stream_k_min_ipc": 3,
    "stream_k_min_saving": 1,
    "stream_k_wider_min_saving": 1,
    "norm_launch_iters": 0,
    "norm_first_iters": 0,
    "norm_first_rows_per_iter": 110,
    "norm_hidden_iters": 8,
    "norm_hidden_min_rows": 200,
    "tiles": (
        HopperTile(256, 4, tile_groups=2, iter_percent=100, epilogue_iters=0, segment_cost=0),
        HopperTile(224, 4, tile_groups=2, iter_percent=90, epilogue_iters=0, segment_cost=0),
        HopperTile(192, 5, tile_groups=2, iter_percent=78, epilogue_iters=0, segment_cost=0),
        HopperTile(240, 4, tile_groups=2, iter_percent=95, epilogue_iters=0, segment_cost=0),
        HopperTile(176, 5, tile_groups=2, iter_percent=74, epilogue_iters=0, segment_cost=0),
        HopperTile(144, 6, tile_groups=2, iter_percent=66, epilogue_iters=0, segment_cost=0),
        HopperTile(128, 6, tile_groups=1, iter_percent=64, epilogue_iters=0, segment_cost=0),
    ),
}
# Decode: at 3 SMs no tail grid of 4 CTAs is resident (the norm apart), at 6 one CTA a tile is, from 8 on pairs are.
# Prefill: at 8 and 10 SMs the Blackwell GEMMs take one wave, several, or a cut one; on Hopper all counts together reach
# every way to cut. The other counts are the products' own.
TINY_TARGETS = (
    Target(arch="sm_90a", tp_degrees=(1, 2, 4, 8, 16), sm_counts=(3, 6, 48, 114, 132)),
    Target(arch="sm_100a", tp_degrees=(1, 4, 8), sm_counts=(3, 6, 8, 10, 148, 152)),
    Target(arch="sm_103a", tp_degrees=(1, 4, 8), sm_counts=(3, 6, 8, 10, 148, 152)),
)


def kimi_k3_model() -> Model:
    """The product's model, at every TP degree on each architecture."""
    return Model(
        name="kimi_k3_latent_moe",
        dims=ModelDims(
            hidden=7168,
            latent=3584,
            experts=896,
            shared_intermediate=6144,
            norm_eps=1e-5,
            situ_beta=4.0,
            situ_linear_beta=25.0,
        ),
        max_tokens=16384,
        max_partials=64,
        targets=(
            Target(arch="sm_90a", tp_degrees=(1, 2, 4, 8, 16), sm_counts=(32, 78, 96, 114, 132)),
            Target(arch="sm_100a", tp_degrees=(1, 2, 4, 8, 16), sm_counts=(148, 152)),
            Target(arch="sm_103a", tp_degrees=(1, 2, 4, 8, 16), sm_counts=(148, 152)),
        ),
        families=FAMILIES,
        decode=DECODE,
        decode_sm90=dataclasses.replace(DECODE, **SM90_DECODE_CHANGES),
        prefill=PREFILL,
        prefill_sm90=PREFILL_SM90,
    )


def tiny_model() -> Model:
    """A small model that reaches the forms of the large one at a few SM counts."""
    kimi = kimi_k3_model()
    return dataclasses.replace(
        kimi,
        name="tiny_latent_moe",
        dims=dataclasses.replace(kimi.dims, hidden=512, latent=512, experts=384, shared_intermediate=1024),
        targets=TINY_TARGETS,
        decode=dataclasses.replace(kimi.decode, **TINY_DECODE_CHANGES),
        decode_sm90=dataclasses.replace(kimi.decode, **TINY_DECODE_CHANGES | TINY_SM90_DECODE_CHANGES),
        prefill=dataclasses.replace(kimi.prefill, **TINY_PREFILL_CHANGES),
        prefill_sm90=dataclasses.replace(kimi.prefill_sm90, **TINY_PREFILL_SM90_CHANGES),
    )


def with_tile(model: Model, block_n: int) -> Model:
    """A model whose Hopper prefill plans take tiles of one width; its tree holds the programs of every width."""
    (tile,) = (tile for tile in model.prefill_sm90.tiles if tile.block_n == block_n)
    return model.preferring(tile)


def one_tile_models(model: Model) -> tuple[Model, ...]:
    """A model with each of its Hopper prefill tiles in turn."""
    return tuple(with_tile(model, tile.block_n) for tile in model.prefill_sm90.tiles)


def tiny_quarters_model(block_n: int) -> Model:
    """The tiny model with one tile whose 8 K iterations may be cut in quarters: segments that end where tiles do."""
    model = with_tile(tiny_model(), block_n)
    return dataclasses.replace(model, prefill_sm90=dataclasses.replace(model.prefill_sm90, stream_k_min_ipc=2))


def tiny_ragged_model() -> Model:
    """The tiny model with a latent width whose slices end inside a K chunk while a pair can still split them.

    640 / TP 4 = 160 columns are 3 chunks, the last of 32; the tiny model's own 512 end raggedly only at TP 16, where
    one chunk is left and no pair splits it. 640 / 8 = 80 vectors also leave the norm's 32 lanes unequal shares.
    """
    tiny = tiny_model()
    return dataclasses.replace(tiny, name="tiny_ragged_moe", dims=dataclasses.replace(tiny.dims, latent=640))


def short_decode(model: Model) -> Model:
    """The model with prefill from 193 tokens on, also where two CTAs could split the tokens of a decode tile."""
    return dataclasses.replace(model, decode_sm90=dataclasses.replace(model.decode_sm90, max_tokens=192))
