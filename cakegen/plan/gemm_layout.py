"""Leaf module: the warps and the shared memory of a prefill GEMM's CTA, a layout a family. Imports the plan's records.

The one place for both: the planner says what a launch takes, the emitter takes the offsets from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from cakegen.plan.records import BLOCK_K, GemmForm
from cakegen.plan.smem import BF16_BYTES, STAGING_PAD_BYTES, SWIZZLE_PERIOD_BYTES
from cakegen.plan.workspace import EPILOGUE_GROUPS, MMA_WARPGROUPS, PAIR_CTAS

WARP_THREADS = 32
GROUP_WARPS = 4
MBARRIER_BYTES = 8
ARRIVAL_BYTES = 16
"""The word by which a group of warps learns how many segments of a tile have arrived."""
STAGES_OFFSET = 2 * SWIZZLE_PERIOD_BYTES
"""Barriers and words, then the flags (the chaos seed), then the ring."""

HOPPER_MMA_WARPS = MMA_WARPGROUPS * GROUP_WARPS
HOPPER_THREADS = (HOPPER_MMA_WARPS + GROUP_WARPS) * WARP_THREADS
"""2 MMA warpgroups, 1 producer warpgroup."""
HOPPER_ARRIVALS_OFFSET = SWIZZLE_PERIOD_BYTES - MMA_WARPGROUPS * ARRIVAL_BYTES
"""A warpgroup's word of arrivals; all of them end the first kilobyte, which the barriers begin."""
_HOPPER_STAGING_COLS, _HOPPER_STAGING_ROWS = 64, 16
HOPPER_SLAB_BYTES = _HOPPER_STAGING_ROWS * (_HOPPER_STAGING_COLS * BF16_BYTES + STAGING_PAD_BYTES)
"""Output rows that one warp stages at a time."""

FIRST_EPILOGUE_WARP = 2
"""Warp 0 loads, warp 1 multiplies."""
EPILOGUE_WARPS = EPILOGUE_GROUPS * GROUP_WARPS
BLACKWELL_THREADS = (FIRST_EPILOGUE_WARP + EPILOGUE_WARPS) * WARP_THREADS
TURNS = 2
"""Accumulators in tensor memory, and answers of the launch control."""
ANSWER_BYTES = 16


@dataclass(frozen=True)
class HopperGemmSmem:
    """Byte offsets in dynamic shared memory, and the bytes of a stage: a CTA's token rows and a tile's weight rows."""

    stage_bytes: int
    staging_offset: int
    total_bytes: int


@dataclass(frozen=True)
class BlackwellGemmSmem:
    """Byte offsets in dynamic shared memory, and the bytes of a stage: a CTA's token rows, half of the weight rows."""

    tensor_base_offset: int
    answers_offset: int
    arrivals_offset: int
    stages_offset: int
    a_bytes: int
    b_bytes: int
    total_bytes: int

    @property
    def stage_bytes(self) -> int:
        """One CTA's copies of a K block."""
        return self.a_bytes + self.b_bytes


def hopper_gemm_smem(form: GemmForm) -> HopperGemmSmem:
    """The ring, and behind it the slabs of the output, one a warp that multiplies."""
    stage_bytes = (form.block_m + form.block_n) * BLOCK_K * BF16_BYTES
    staging = STAGES_OFFSET + form.num_stages * stage_bytes
    return HopperGemmSmem(stage_bytes, staging, staging + HOPPER_MMA_WARPS * HOPPER_SLAB_BYTES)


def blackwell_gemm_smem(form: GemmForm) -> BlackwellGemmSmem:
    """A CTA holds its token rows and half of the tile's weight rows; output is staged in the drained ring."""
    a_bytes = form.block_m * BLOCK_K * BF16_BYTES
    b_bytes = form.block_n // PAIR_CTAS * BLOCK_K * BF16_BYTES
    arrivals = SWIZZLE_PERIOD_BYTES - EPILOGUE_GROUPS * ARRIVAL_BYTES
    answers = arrivals - TURNS * ANSWER_BYTES
    total = STAGES_OFFSET + form.num_stages * (a_bytes + b_bytes)
    return BlackwellGemmSmem(answers - MBARRIER_BYTES, answers, arrivals, STAGES_OFFSET, a_bytes, b_bytes, total)
