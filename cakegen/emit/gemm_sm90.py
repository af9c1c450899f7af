"""Prefill GEMM forms -> program specifications of the Hopper templates. Pure; counts come from the plan's records."""

from __future__ import annotations

from cakegen.arch import family_member
from cakegen.emit.decode import WARP_THREADS, barrier_constants, norm_constants, template_of
from cakegen.emit.gemm import (
    ARRIVAL_BYTES,
    front_gemm_arguments,
    gemm_launch,
    gemm_maps,
    gemm_summary,
    output_constants,
    tail_gemm_arguments,
)
from cakegen.emit.program import Constant, ProgramSpec
from cakegen.errors import EmitError
from cakegen.model import Model
from cakegen.plan.records import GemmForm
from cakegen.plan.smem import BF16_BYTES, STAGING_PAD_BYTES, SWIZZLE_PERIOD_BYTES
from cakegen.plan.workspace import MMA_WARPGROUPS, PAIR_CTAS
from cakegen.rules import HopperPrefillRules

WARPGROUP_WARPS = 4
MMA_WARPS = MMA_WARPGROUPS * WARPGROUP_WARPS
PRODUCER_WARPS = WARPGROUP_WARPS
NUM_THREADS = (MMA_WARPS + PRODUCER_WARPS) * WARP_THREADS
NORM_WARPS = PRODUCER_WARPS - 1
"""Beside the one whose first lane produces."""
WARPGROUP_REGISTERS = {False: (232, 40), True: (208, 88)}
"""By whether a norm is fused, registers of an MMA thread and of one of the producer's warpgroup, where rows take more:
2 * 232 + 40 = 2 * 208 + 88 = 504 registers a thread of each warpgroup, as the launch gives: 3 * 168."""
STAGING_COLS = 64
STAGING_ROWS = 16
SLAB_BYTES = STAGING_ROWS * (STAGING_COLS * BF16_BYTES + STAGING_PAD_BYTES)
"""Output rows that one warp stages at a time."""
ARRIVALS_OFFSET = SWIZZLE_PERIOD_BYTES - MMA_WARPGROUPS * ARRIVAL_BYTES
"""A warpgroup's word of arrivals; all of them end the first kilobyte, which the barriers begin."""


def gemm_program_sm90(model: Model, form: GemmForm, arch_family: str) -> ProgramSpec:
    """The program of one prefill GEMM form.

    Raises
    ------
    EmitError
        No template, more shared memory than there is, or barriers over their bytes.
    """
    rules = model.prefill_sm90
    barriers: tuple[tuple[str, int], ...] = (("stage_full", form.num_stages), ("stage_empty", form.num_stages))
    if form.tile_groups == 1:
        barriers += (("turn", MMA_WARPGROUPS),)
    smem_constants, total_bytes = _smem_constants(model, form)
    _refuse_wide(model, form, total_bytes)
    constants = (
        *_pair_constants(rules, form),
        *output_constants(model, form),
        *_norm_constants(model, form),
        *smem_constants,
        *barrier_constants(barriers, ARRIVALS_OFFSET, model.name),
    )
    return ProgramSpec(
        export=model.name,
        role=f"{form.stage}_gemm",
        arch_family=arch_family,
        template=template_of(model, f"{form.stage}_gemm", arch_family),
        summary=gemm_summary(form, "" if form.tile_groups > 1 else ", warpgroups take turns"),
        constants=constants,
        arg_plan=_arguments(form),
        tensor_maps=gemm_maps(rules.block_k, form),
        barriers=barriers,
        launch=gemm_launch(form, NUM_THREADS, total_bytes),
    )


def _pair_constants(rules: HopperPrefillRules, form: GemmForm) -> tuple[Constant, ...]:
    readers = form.tile_groups * WARPGROUP_WARPS * PAIR_CTAS
    a_bytes = form.block_m * rules.block_k * BF16_BYTES
    b_bytes = form.block_n * rules.block_k * BF16_BYTES
    mma_registers, producer_registers = WARPGROUP_REGISTERS[form.fused_norm]
    return (
        Constant("kNumThreads", NUM_THREADS, "2 MMA warpgroups, 1 producer warpgroup"),
        Constant("kMmaWarps", MMA_WARPS, "warps of the MMA warpgroups, which come first"),
        Constant("kMmaRegisters", mma_registers, "registers of an MMA thread"),
        Constant("kProducerRegisters", producer_registers, "registers of a producer thread"),
        Constant("kGroupBarrier", 1, "named barrier of MMA warpgroup 0; the next is warpgroup 1's"),
        Constant("kBlockM", form.block_m, "token rows of a CTA"),
        Constant("kBlockN", form.block_n, "weight rows of a pair tile"),
        Constant("kBlockK", rules.block_k, "elements of a K block: one 128-byte swizzled row"),
        Constant("kTileGroups", form.tile_groups, "MMA warpgroups that share a tile; 1: they take turns"),
        Constant("kGroupBlocks", MMA_WARPGROUPS // form.tile_groups, "blocks of 64 rows of a warpgroup's tile"),
        Constant("kNumStages", form.num_stages, "ring stages"),
        Constant("kStageABytes", a_bytes, "token rows of a stage"),
        Constant("kHalfBBytes", b_bytes // PAIR_CTAS, "weight rows that one CTA loads for both"),
        Constant("kStageBytes", a_bytes + b_bytes, "what stage_full expects: tokens and both halves of the weights"),
        Constant("kEmptyArrivals", readers, "warps that read a stage, of both CTAs"),
        Constant("kRasterPairRows", rules.raster_m_tiles // PAIR_CTAS, "pair rows of a raster group"),
    )


def _norm_constants(model: Model, form: GemmForm) -> tuple[Constant, ...]:
    if form.stage == "front":
        return ()
    fused = Constant("kFusedNorm", form.fused_norm, "spare warps normalise the routed rows")
    if not form.fused_norm:
        return (fused,)
    warps = Constant("kNormWarps", NORM_WARPS, "warps that normalise rows beside the MMA warps")
    return (fused, warps, *norm_constants(model))


def _arguments(form: GemmForm) -> tuple[tuple[str, str], ...]:
    if form.stage == "front":
        return front_gemm_arguments()
    if not form.fused_norm:
        return tail_gemm_arguments()
    return tail_gemm_arguments(("routed_pitch", "y_pitch"), plan_parameters=("norm_first_rows",))


def _smem_constants(model: Model, form: GemmForm) -> tuple[tuple[Constant, ...], int]:
    """Offsets, and the bytes in all: barriers and arrival words, the flags (the chaos seed), the ring, the slabs."""
    ring = 2 * SWIZZLE_PERIOD_BYTES
    staging = ring + form.num_stages * _stage_bytes(model, form)
    return (
        Constant("kArrivalsOffset", ARRIVALS_OFFSET, "byte offset of the arrival words, 16 bytes a warpgroup"),
        Constant("kStagesOffset", ring, "byte offset of the ring: tokens, then weights, a stage"),
        Constant("kStagingOffset", staging, "byte offset of the output slabs, 16 rows x 64 columns a warp"),
    ), staging + MMA_WARPS * SLAB_BYTES


def _stage_bytes(model: Model, form: GemmForm) -> int:
    return (form.block_m + form.block_n) * model.prefill_sm90.block_k * BF16_BYTES


def _refuse_wide(model: Model, form: GemmForm, total_bytes: int) -> None:
    limit = family_member("sm90").max_dynamic_smem_bytes
    stages = f"{form.num_stages} stages * {_stage_bytes(model, form)}"
    if total_bytes > limit:
        raise EmitError(
            f"{model.name}: {form.stage} GEMM: 2 * {SWIZZLE_PERIOD_BYTES} bytes of barriers and flags + {stages} +"
            f" {MMA_WARPS} warps * {SLAB_BYTES} of output = {total_bytes} bytes of shared memory; a CTA has {limit}."
            f" Lower num_stages of the tiles of {form.block_n} columns in prefill_sm90.tiles."
        )
