"""Leaf module: where a decode CTA keeps what in shared memory, and which rank of a pair owns which K units.

The one place for both: the planner sizes the ring with it, the emitter takes the offsets from it. Imports only the
plan's records.
"""

from __future__ import annotations

from dataclasses import dataclass

from cakegen.plan.records import BLOCK_K, DecodeForm

BF16_BYTES = 2
FP32_BYTES = 4
# A 128-byte swizzle pattern repeats every 1024 bytes: rings and the resident operand start at a multiple of it.
SWIZZLE_PERIOD_BYTES = 1024
# Reserved in front of the ring: mbarriers; then words that are no barriers, of which a chaos build keeps its seed.
BARRIER_BYTES = 1024
FLAG_BYTES = 1024
# Output rows staged in shared memory are padded by 16 bytes, so that a column of rows meets distinct banks.
STAGING_PAD_BYTES = 16
# A weight tile is two MMAs of 64 rows; where it has fewer than 128, they overlap.
MMA_ROWS = 64


@dataclass(frozen=True)
class UnitShare:
    """K units of one rank, per segment, behind those of the rank before it; a unit is one ring stage's chunks.

    front: k1 is the hidden dimension, k2 is empty. tail: k1 is up (the latent slice), k2 is down (the shared slice);
    a CTA runs its k2 units first.
    """

    k1_count: int
    k2_count: int

    @property
    def units(self) -> int:
        """Units of both segments."""
        return self.k1_count + self.k2_count


def unit_shares(form: DecodeForm) -> tuple[UnitShare, ...]:
    """The share of each rank of a cluster, by rank: in a pair rank 0 takes the larger half of each segment."""
    k1_units, k2_units = form.k1_chunks // form.chunks_per_stage, form.k2_chunks // form.chunks_per_stage
    if form.cluster_ctas == 1:
        return (UnitShare(k1_units, k2_units),)
    k1_half, k2_half = larger_half(k1_units), larger_half(k2_units)
    return UnitShare(k1_half, k2_half), UnitShare(k1_units - k1_half, k2_units - k2_half)


def larger_half(units: int) -> int:
    """What rank 0 of a pair takes of a segment."""
    return -(-units // 2)


def a_chunk_bytes(block_m: int) -> int:
    """One K chunk of a weight tile: `[block_m, BLOCK_K]` bf16."""
    return block_m * BLOCK_K * BF16_BYTES


def a_pad_bytes(gated: bool, block_m: int) -> int:
    """Behind the weights of a gated front's stage: the rows by which the up half is short of the MMA's 64."""
    return (MMA_ROWS - block_m // 2) * BLOCK_K * BF16_BYTES if gated else 0


def b_chunk_bytes(n_pad: int) -> int:
    """One K chunk of the tokens: `[n_pad, BLOCK_K]` bf16."""
    return n_pad * BLOCK_K * BF16_BYTES


def final_tokens(form: DecodeForm) -> int:
    """Token rows that one CTA finishes: those that it multiplies, or half of them."""
    return mma_tokens(form) // 2 if form.split_finalize else mma_tokens(form)


def mma_tokens(form: DecodeForm) -> int:
    """Token rows that one CTA multiplies."""
    return form.n_pad // form.token_parts


def pushed_bytes(form: DecodeForm) -> int:
    """What the partner hands over: fp32 sums of the tile's rows and of the tokens that a CTA finishes."""
    return final_tokens(form) * form.block_m * FP32_BYTES


def row_bytes(form: DecodeForm) -> int:
    """One row of the routed experts' sum in a tail: `[latent]` bf16, of which a rank multiplies `k1_cols`."""
    return form.tp * form.k1_cols * BF16_BYTES


def staging_bytes(block_m: int, stage: str, tokens: int) -> int:
    """The epilogue's output tile `[tokens, block_m]` with padded rows: fp32 for the front's router tiles, else bf16."""
    element_bytes = FP32_BYTES if stage == "front" else BF16_BYTES
    return tokens * (block_m * element_bytes + STAGING_PAD_BYTES)


@dataclass(frozen=True)
class DecodeSmem:
    """Byte offsets (from a 1024-aligned base) and sizes of a decode CTA's shared memory.

    Parameters
    ----------
    barriers_offset, flags_offset
        mbarriers; then words that are not barriers.
    landing_offset, landing_bytes
        The partner's fp32 sums (a pair), or a reserve. Where `landing_alias` is set it lies over the A ring's start.
    a_ring_offset, a_stage_bytes, a_ring_bytes
        Weight stages.
    b_ring_offset, b_stage_bytes, b_ring_bytes
        Token stages; they follow the A ring without a gap.
    resident_b_offset, resident_b_bytes
        Normalised rows of this rank's up chunks (0 bytes: none).
    rows_offset, rows_bytes
        Staged routed rows `[n_pad, latent]` bf16 (0 bytes: none).
    norm_weight_offset, norm_weight_bytes
        Staged norm weight `[latent]` bf16 (0 bytes: none).
    staging_offset, staging_bytes
        The epilogue's output tile, over the drained ring; behind the landing zone where that aliases the ring.
    total_bytes
        Dynamic shared memory of the launch.
    """

    barriers_offset: int
    flags_offset: int
    landing_offset: int
    landing_bytes: int
    a_ring_offset: int
    a_stage_bytes: int
    a_ring_bytes: int
    b_ring_offset: int
    b_stage_bytes: int
    b_ring_bytes: int
    resident_b_offset: int
    resident_b_bytes: int
    rows_offset: int
    rows_bytes: int
    norm_weight_offset: int
    norm_weight_bytes: int
    staging_offset: int
    staging_bytes: int
    total_bytes: int


def decode_smem(form: DecodeForm) -> DecodeSmem:
    """Lay out the shared memory of one decode program."""
    landing = BARRIER_BYTES + FLAG_BYTES
    a_ring = landing if form.landing_alias else landing + form.landing_bytes
    a_stage = form.chunks_per_stage * a_chunk_bytes(form.block_m) + a_pad_bytes(form.gated, form.block_m)
    b_stage = form.chunks_per_stage * b_chunk_bytes(mma_tokens(form))
    b_ring = a_ring + form.num_stages * a_stage
    resident = b_ring + form.num_stages * b_stage
    up_chunks = max(share.k1_count for share in unit_shares(form)) * form.chunks_per_stage
    resident_size = up_chunks * b_chunk_bytes(form.n_pad) if form.resident_b else 0
    rows = resident + resident_size
    rows_size = form.n_pad * row_bytes(form) if form.staged_rows else 0
    norm_weight = rows + rows_size
    norm_weight_size = row_bytes(form) if form.staged_rows else 0
    return DecodeSmem(
        barriers_offset=0,
        flags_offset=BARRIER_BYTES,
        landing_offset=landing,
        landing_bytes=form.landing_bytes,
        a_ring_offset=a_ring,
        a_stage_bytes=a_stage,
        a_ring_bytes=form.num_stages * a_stage,
        b_ring_offset=b_ring,
        b_stage_bytes=b_stage,
        b_ring_bytes=form.num_stages * b_stage,
        resident_b_offset=resident,
        resident_b_bytes=resident_size,
        rows_offset=rows,
        rows_bytes=rows_size,
        norm_weight_offset=norm_weight,
        norm_weight_bytes=norm_weight_size,
        staging_offset=a_ring + (form.landing_bytes if form.landing_alias else 0),
        staging_bytes=staging_bytes(form.block_m, form.stage, final_tokens(form)),
        total_bytes=norm_weight + norm_weight_size,
    )
