"""Prefill GEMM forms -> program specifications of the Hopper templates. Pure; counts come from the plan's records."""

from __future__ import annotations

from cakegen.arch import family_member
from cakegen.emit.activation import activation_headers, front_activation
from cakegen.emit.decode import barrier_constants, launch_record, norm_constants, wgmma_header
from cakegen.emit.gemm import (
    front_gemm_arguments,
    front_gemm_operands,
    gemm_maps,
    gemm_summary,
    output_constants,
    tail_gemm_arguments,
    tail_gemm_operands,
)
from cakegen.emit.gemm_pipeline import hopper_gemm_pipeline
from cakegen.emit.operands import NO_NORM, one_partial_norm, pitches_of, tail_output
from cakegen.emit.program import Constant, Header, Operand, ProgramSpec, buffer_types
from cakegen.errors import EmitError
from cakegen.model import Model, ModelDims
from cakegen.plan import FAMILIES
from cakegen.plan.gemm_layout import (
    GROUP_WARPS,
    HOPPER_ARRIVALS_OFFSET,
    HOPPER_MMA_WARPS,
    HOPPER_SLAB_BYTES,
    HOPPER_THREADS,
    STAGES_OFFSET,
    hopper_gemm_smem,
)
from cakegen.plan.records import BLOCK_K, GemmForm
from cakegen.plan.smem import BF16_BYTES, SWIZZLE_PERIOD_BYTES
from cakegen.plan.workspace import MMA_WARPGROUPS, PAIR_CTAS

NORM_WARPS = GROUP_WARPS - 1
"""Beside the one whose first lane produces."""
WARPGROUP_REGISTERS = {False: (232, 40), True: (208, 88)}
"""By whether a norm is fused, registers of an MMA thread and of one of the producer's warpgroup, where rows take more:
2 * 232 + 40 = 2 * 208 + 88 = 504 registers a thread of each warpgroup, as the launch gives: 3 * 168."""


def gemm_program_sm90(model: Model, form: GemmForm, arch_family: str) -> ProgramSpec:
    """The program of one prefill GEMM form.

    Raises
    ------
    EmitError
        No template, more shared memory than there is, or barriers over their bytes.
    """
    rules = FAMILIES[arch_family].rules(model).prefill
    pipeline = hopper_gemm_pipeline(model.dims, form)
    smem_constants = _smem_constants(form)
    _refuse_wide(model, form)
    constants = (
        *_pair_constants(rules.raster_m_tiles, form),
        *output_constants(model, form),
        *_norm_constants(model, form),
        *smem_constants,
        *barrier_constants(pipeline, HOPPER_ARRIVALS_OFFSET, model.name),
    )
    return ProgramSpec(
        export=model.name,
        role=f"{form.stage}_gemm",
        arch_family=arch_family,
        body=f"{form.stage}_gemm",
        headers=(
            wgmma_header(form.block_n),
            Header(FAMILIES[arch_family].bodies[f"{form.stage}_gemm"]),
            *activation_headers(form.stage),
        ),
        operands=_operands(model.dims, form),
        summary=gemm_summary(form, "" if form.tile_groups > 1 else ", warpgroups take turns"),
        constants=constants,
        arg_plan=_arguments(model.dims, form),
        tensor_maps=gemm_maps(model.dims, form),
        pipeline=pipeline,
        launch=launch_record(FAMILIES[arch_family].launch_shape(form)),
        buffer_types=buffer_types(model.dims),
        activation=front_activation(model, form.stage),
    )


def _pair_constants(raster_m_tiles: int, form: GemmForm) -> tuple[Constant, ...]:
    a_bytes = form.block_m * BLOCK_K * BF16_BYTES
    b_bytes = form.block_n * BLOCK_K * BF16_BYTES
    mma_registers, producer_registers = WARPGROUP_REGISTERS[form.fused_norm]
    return (
        Constant("kNumThreads", HOPPER_THREADS, "2 MMA warpgroups, 1 producer warpgroup"),
        Constant("kMmaWarps", HOPPER_MMA_WARPS, "warps of the MMA warpgroups, which come first"),
        Constant("kMmaRegisters", mma_registers, "registers of an MMA thread"),
        Constant("kProducerRegisters", producer_registers, "registers of a producer thread"),
        Constant("kGroupBarrier", 1, "named barrier of MMA warpgroup 0; the next is warpgroup 1's"),
        Constant("kBlockM", form.block_m, "token rows of a CTA"),
        Constant("kBlockN", form.block_n, "weight rows of a pair tile"),
        Constant("kBlockK", BLOCK_K, "elements of a K block: one 128-byte swizzled row"),
        Constant("kTileGroups", form.tile_groups, "MMA warpgroups that share a tile; 1: they take turns"),
        Constant(
            "kGroupBlocks", MMA_WARPGROUPS // form.tile_groups, "blocks of 64 rows that a warpgroup has of a tile"
        ),
        Constant("kNumStages", form.num_stages, "ring stages"),
        Constant("kStageABytes", a_bytes, "token rows of a stage"),
        Constant("kHalfBBytes", b_bytes // PAIR_CTAS, "half of a stage's weight rows"),
        Constant(
            "kStageBytes",
            a_bytes + b_bytes,
            "what stage_full expects; kStageABytes less without tokens",
        ),
        Constant("kRasterPairRows", raster_m_tiles // PAIR_CTAS, "pair rows of a raster group"),
    )


def _norm_constants(model: Model, form: GemmForm) -> tuple[Constant, ...]:
    if form.stage == "front":
        return ()
    fused = Constant("kFusedNorm", form.fused_norm, "spare warps normalise the routed rows")
    if not form.fused_norm:
        return (fused,)
    warps = Constant("kNormWarps", NORM_WARPS, "warps that normalise rows beside the MMA warps")
    return (fused, warps, *norm_constants(model))


def _arguments(dims: ModelDims, form: GemmForm) -> tuple[tuple[str, str], ...]:
    if form.stage == "front":
        return front_gemm_arguments(dims)
    if not form.fused_norm:
        return tail_gemm_arguments(dims)
    prepared = dims.sum_stage.preparation
    return tail_gemm_arguments(
        dims, pitches_of((prepared.partials, prepared.output)), plan_parameters=("norm_first_rows",)
    )


def _operands(dims: ModelDims, form: GemmForm) -> tuple[Operand, ...]:
    if form.stage == "front":
        return front_gemm_operands(dims)
    norm = one_partial_norm(dims.sum_stage.preparation) if form.fused_norm else NO_NORM
    return tail_gemm_operands(dims, norm, tail_output(dims))


def _smem_constants(form: GemmForm) -> tuple[Constant, ...]:
    staging = hopper_gemm_smem(form).staging_offset
    return (
        Constant("kArrivalsOffset", HOPPER_ARRIVALS_OFFSET, "byte offset of the arrival words, 16 bytes a warpgroup"),
        Constant("kStagesOffset", STAGES_OFFSET, "byte offset of the ring: tokens, then weights, a stage"),
        Constant("kStagingOffset", staging, "byte offset of the output slabs, 16 rows x 64 columns a warp"),
    )


def _refuse_wide(model: Model, form: GemmForm) -> None:
    smem, limit = hopper_gemm_smem(form), family_member("sm90").max_dynamic_smem_bytes
    stages = f"{form.num_stages} stages * {smem.stage_bytes}"
    if smem.total_bytes > limit:
        raise EmitError(
            f"{model.name}: {form.stage} GEMM: 2 * {SWIZZLE_PERIOD_BYTES} bytes of barriers and flags + {stages} +"
            f" {HOPPER_MMA_WARPS} warps * {HOPPER_SLAB_BYTES} of output = {smem.total_bytes} bytes of shared memory; a"
            f" CTA has {limit}. Lower num_stages of the tiles of {form.block_n} columns in hopper.prefill.tiles."
        )
