"""Prefill GEMM forms -> program specifications of the Blackwell templates. Pure; counts come from the plan's records.

Every count of bytes and arrivals that a kernel uses stands here, once.
"""

from __future__ import annotations

from cakegen.arch import family_member
from cakegen.emit.activation import activation_headers, front_activation
from cakegen.emit.decode import barrier_constants, launch_record, norm_constants
from cakegen.emit.decode_arguments import norm_parameters, operand_map
from cakegen.emit.decode_warps import MIN_TENSOR_COLUMNS
from cakegen.emit.gemm import (
    front_gemm_arguments,
    front_gemm_operands,
    gemm_maps,
    gemm_summary,
    output_constants,
    tail_gemm_arguments,
    tail_gemm_operands,
)
from cakegen.emit.gemm_pipeline import blackwell_gemm_pipeline
from cakegen.emit.operands import NO_NORM, norm_operands, tail_output
from cakegen.emit.program import Constant, Header, Operand, ProgramSpec, buffer_types
from cakegen.errors import EmitError
from cakegen.model import Model, ModelDims
from cakegen.plan import FAMILIES
from cakegen.plan.gemm_layout import (
    ANSWER_BYTES,
    BLACKWELL_THREADS,
    EPILOGUE_WARPS,
    FIRST_EPILOGUE_WARP,
    TURNS,
    WARP_THREADS,
    BlackwellGemmSmem,
    blackwell_gemm_smem,
)
from cakegen.plan.records import BLOCK_K, GemmForm
from cakegen.plan.smem import BF16_BYTES
from cakegen.plan.workspace import EPILOGUE_GROUPS, PAIR_CTAS, norm_words
from cakegen.registry import TensorMapEntry

SLAB_COLS = 64
"""Columns of a staged slab, one swizzled row: an epilogue group's in a half of the tile. Its rows are a warp's 32."""
SLAB_BYTES = WARP_THREADS * SLAB_COLS * BF16_BYTES


def gemm_program_sm100(model: Model, form: GemmForm, arch_family: str) -> ProgramSpec:
    """The program of one prefill GEMM form.

    Raises
    ------
    EmitError
        More shared or tensor memory than there is, or barriers over their bytes.
    """
    rules, smem = FAMILIES[arch_family].rules(model).prefill, blackwell_gemm_smem(form)
    _refuse_unfit(model, form, smem)
    pipeline = blackwell_gemm_pipeline(model.dims, form)
    constants = (
        *_warp_constants(form),
        *_tile_constants(rules.raster_m_tiles, form, smem),
        *output_constants(model, form),
        *(_tail_constants(model, form) if form.stage == "tail" else ()),
        *_smem_constants(form, smem),
        *barrier_constants(pipeline, smem.tensor_base_offset, model.name),
    )
    return ProgramSpec(
        export=model.name,
        role=f"{form.stage}_gemm",
        arch_family=arch_family,
        body=f"{form.stage}_gemm",
        headers=(Header(FAMILIES[arch_family].bodies[f"{form.stage}_gemm"]), *activation_headers(form.stage)),
        operands=_operands(model.dims, form),
        summary=gemm_summary(form, ", weights evict-first" if form.evict_first else ""),
        constants=constants,
        arg_plan=_arguments(model.dims, form),
        tensor_maps=(*gemm_maps(model.dims, form), *_out_maps(model.dims, form)),
        pipeline=pipeline,
        launch=launch_record(FAMILIES[arch_family].launch_shape(form)),
        buffer_types=buffer_types(model.dims),
        activation=front_activation(model, form.stage),
    )


def _warp_constants(form: GemmForm) -> tuple[Constant, ...]:
    return (
        Constant("kNumThreads", BLACKWELL_THREADS, "the loading warp, the multiplying warp, 8 epilogue warps"),
        Constant("kMmaWarp", FIRST_EPILOGUE_WARP - 1, "index of the multiplying warp; CTA 0's works for both"),
        Constant("kFirstEpilogueWarp", FIRST_EPILOGUE_WARP, "index of the first epilogue warp"),
        Constant("kGroupBarrier", 1, "named barrier of epilogue warps 0 to 3; the next is that of 4 to 7"),
        Constant("kOneItem", form.fused_norm, "the whole grid is resident, a cluster an item"),
    )


def _tail_constants(model: Model, form: GemmForm) -> tuple[Constant, ...]:
    constants: tuple[Constant, ...] = (
        Constant("kFusedNorm", form.fused_norm, "the launch normalises the routed rows itself"),
        Constant("kStagedStore", form.staged_store, "a cluster's last tile is stored through the drained ring"),
        Constant("kNormCounters", norm_words(form), "control words in front of those of the segments"),
    )
    if not form.fused_norm:
        return constants
    norm = (
        Constant("kEpilogueWarps", EPILOGUE_WARPS, "warps that normalise rows, then store"),
        Constant("kNormBarrier", 1 + EPILOGUE_GROUPS, "named barrier of all of them"),
    )
    return constants + norm + norm_constants(model)


def _arguments(dims: ModelDims, form: GemmForm) -> tuple[tuple[str, str], ...]:
    """With a map of `out` where it is stored through one."""
    if form.stage == "front":
        return front_gemm_arguments(dims)
    stage = dims.sum_stage
    norm = norm_parameters(stage.preparation) if form.fused_norm else ()
    return tail_gemm_arguments(dims, norm, maps=(stage.output.name,) * form.staged_store)


def _operands(dims: ModelDims, form: GemmForm) -> tuple[Operand, ...]:
    if form.stage == "front":
        return front_gemm_operands(dims)
    norm = norm_operands(dims.sum_stage.preparation) if form.fused_norm else NO_NORM
    return tail_gemm_operands(dims, norm, tail_output(dims, mapped=form.staged_store))


def _out_maps(dims: ModelDims, form: GemmForm) -> tuple[TensorMapEntry, ...]:
    box = (SLAB_COLS, WARP_THREADS, 1)
    return (operand_map(dims.sum_stage.output.name, box),) if form.staged_store else ()


def _tile_constants(raster_m_tiles: int, form: GemmForm, smem: BlackwellGemmSmem) -> tuple[Constant, ...]:
    return (
        Constant("kBlockM", form.block_m, "token rows of a CTA"),
        Constant("kBlockN", form.block_n, "weight rows of a pair's tile, of which a CTA loads half"),
        Constant("kBlockK", BLOCK_K, "elements of a K block: one 128-byte swizzled row"),
        Constant("kNumStages", form.num_stages, "ring stages"),
        Constant("kStageABytes", smem.a_bytes, "token rows of a stage"),
        Constant("kStageBytes", smem.stage_bytes, "token rows and half of the weight rows: one CTA's copies"),
        Constant("kEvictFirst", form.evict_first, "weights are the first to leave L2"),
        Constant("kRasterPairRows", raster_m_tiles // PAIR_CTAS, "pair rows of a raster group"),
        Constant("kTensorColumns", _tensor_columns(form), "columns of tensor memory: two tiles' sums"),
    )


def _smem_constants(form: GemmForm, smem: BlackwellGemmSmem) -> tuple[Constant, ...]:
    answers = (
        Constant("kAnswerBytes", ANSWER_BYTES, "an answer of the launch control"),
        Constant("kAnswersOffset", smem.answers_offset, "byte offset of the two answers"),
    )
    return (
        *(() if form.fused_norm else answers),
        Constant("kTensorBaseOffset", smem.tensor_base_offset, "byte offset of the address of tensor memory"),
        Constant("kArrivalsOffset", smem.arrivals_offset, "byte offset of the arrival words, 16 bytes a group"),
        Constant("kStagesOffset", smem.stages_offset, "byte offset of the ring: tokens, then weights, a stage"),
    )


def _tensor_columns(form: GemmForm) -> int:
    """A power of two, as an allocation must be (PTX ISA 9.7.16.7)."""
    return max(MIN_TENSOR_COLUMNS, 1 << (TURNS * form.block_n - 1).bit_length())


def _refuse_unfit(model: Model, form: GemmForm, smem: BlackwellGemmSmem) -> None:
    arch = family_member("sm100")
    where = f"{model.name}: {form.stage} GEMM"
    if form.staged_store and form.block_n != PAIR_CTAS * EPILOGUE_GROUPS * SLAB_COLS:
        raise EmitError(
            f"{where}: a staged store of tiles of {form.block_n} columns; a group of epilogue warps stages {SLAB_COLS} "
            f"of each half, so a tile has 2 halves * {EPILOGUE_GROUPS} groups * {SLAB_COLS} = "
            f"{PAIR_CTAS * EPILOGUE_GROUPS * SLAB_COLS}. Set blackwell.prefill.block_n to that."
        )
    slabs, ring = PAIR_CTAS * EPILOGUE_WARPS * SLAB_BYTES, form.num_stages * smem.stage_bytes
    if form.staged_store and slabs > ring:
        raise EmitError(
            f"{where}: a staged store takes 2 slabs * {EPILOGUE_WARPS} warps * {SLAB_BYTES} = {slabs} bytes of the "
            f"drained ring, which has {form.num_stages} * {smem.stage_bytes} = {ring}. Raise the stages of tiles of "
            f"{form.block_n} columns in blackwell.prefill."
        )
    columns = _tensor_columns(form)
    if columns > arch.tensor_memory_cols:
        raise EmitError(
            f"{where}: {TURNS} tiles' sums of {form.block_n} columns take {columns} columns of tensor memory; an SM has"
            f" {arch.tensor_memory_cols}. Use narrower tiles in blackwell.prefill."
        )
    if smem.total_bytes > arch.max_dynamic_smem_bytes:
        raise EmitError(
            f"{where}: {smem.stages_offset} bytes of barriers and flags + {form.num_stages} stages * "
            f"{smem.stage_bytes} = {smem.total_bytes} bytes of shared memory; a CTA has "
            f"{arch.max_dynamic_smem_bytes}. Lower the stages of tiles of {form.block_n} columns in blackwell.prefill."
        )
