"""Decode and norm forms -> program specifications. Pure; every count comes from the plan's records.

The constants are the `struct Cfg` of the templates below `templates/kernels`.
"""

from __future__ import annotations

from cakegen.emit.activation import activation_constants, activation_headers, front_activation
from cakegen.emit.decode_arguments import (
    arguments,
    front_arguments,
    front_maps,
    front_operands,
    norm_parameters,
    tail_arguments,
    tail_maps,
    tail_operands,
)
from cakegen.emit.decode_line import line_constants
from cakegen.emit.decode_pipeline import decode_pipeline
from cakegen.emit.decode_tokens import token_part_constants
from cakegen.emit.decode_warps import tensor_memory_constants
from cakegen.emit.operands import names_of, plain
from cakegen.emit.pipeline import Edge, Pipeline
from cakegen.emit.program import Constant, Header, ProgramSpec, buffer_types
from cakegen.errors import EmitError
from cakegen.model import Model
from cakegen.plan import FAMILIES
from cakegen.plan.family import WarpRoles
from cakegen.plan.gemm_layout import MBARRIER_BYTES, WARP_THREADS
from cakegen.plan.records import BLOCK_K, DecodeForm, LaunchShape, NormForm
from cakegen.plan.smem import (
    BARRIER_BYTES,
    DecodeSmem,
    a_chunk_bytes,
    a_pad_bytes,
    b_chunk_bytes,
    decode_smem,
    final_tokens,
    mma_tokens,
    pushed_bytes,
    unit_shares,
)
from cakegen.registry import LaunchRecord

VECTOR_ELEMS = 8
MAX_VECTORS_PER_LANE = 20
"""A norm warp holds its row in registers: 20 vectors of 8 fp32 sums are 160 of the 255 that a thread may have."""


_NORM_PIPELINE = Pipeline(
    "One warp normalises one row: kRowsPerCta rows a CTA, no shared memory.",
    edges=(Edge("each warp", "its row of y, in global memory", "the launch that follows"),),
)
_SUM_PIPELINE = Pipeline(
    "One warp adds up the partials of one row: kRowsPerCta rows a CTA, no shared memory.",
    edges=(Edge("each warp", "its row of the sum, in global memory", "the launch that follows"),),
)


def decode_program(model: Model, form: DecodeForm, arch_family: str) -> ProgramSpec:
    """The program of one decode form.

    Raises
    ------
    EmitError
        The row of the fused norm does not fit a warp's registers, or the barriers their bytes.
    """
    family, smem, dims = FAMILIES[arch_family], decode_smem(form), model.dims
    warps = family.warp_roles(form)
    pipeline = decode_pipeline(model.dims, form, warps)
    tail = form.stage == "tail"
    constants = (
        *_thread_constants(form, warps),
        *_tile_constants(form, arch_family),
        *token_part_constants(form, arch_family),
        *_stage_constants(form, smem),
        *(
            _tail_constants(model, form, warps, arch_family)
            if tail
            else _front_constants(model, form, smem, arch_family)
        ),
        *_smem_constants(form, smem),
        *(tensor_memory_constants(model, form, smem) if family.sums_in_tensor_memory else ()),
        *barrier_constants(pipeline, BARRIER_BYTES, model.name),
    )
    return ProgramSpec(
        export=model.name,
        role=f"decode_{form.stage}",
        arch_family=arch_family,
        body=f"decode_{form.stage}",
        headers=_headers(form, arch_family),
        operands=tail_operands(dims, form) if tail else front_operands(dims),
        summary=_summary(form),
        constants=constants,
        arg_plan=tail_arguments(dims, form) if tail else front_arguments(dims),
        tensor_maps=tail_maps(dims, form, arch_family) if tail else front_maps(dims, form, arch_family),
        pipeline=pipeline,
        launch=launch_record(family.launch_shape(form)),
        buffer_types=buffer_types(dims),
        activation=front_activation(model, form.stage),
    )


def norm_program(model: Model, form: NormForm, arch_family: str) -> ProgramSpec:
    """What prepares a tail's rows in a launch of its own: the norm of the sum of partials, or the sum; one warp a row.

    Raises
    ------
    EmitError
        A row does not fit a warp's registers.
    """
    constants = (
        Constant("kNumThreads", form.rows_per_cta * WARP_THREADS, "threads of a CTA"),
        Constant("kRowsPerCta", form.rows_per_cta, "rows of a CTA, one a warp"),
        Constant("kEarlyTrigger", form.early_trigger, "dependents may start at entry, else after the stores"),
        *(norm_constants(model) if form.normed else row_constants(model)),
    )
    role, prepared = "tail_norm" if form.normed else "tail_sum", model.dims.sum_stage.preparation
    buffers, parameters = names_of(prepared.pointed), ("num_tokens", *norm_parameters(prepared))
    what = "norm" if form.normed else "sum of partials"
    return ProgramSpec(
        export=model.name,
        role=role,
        arch_family=arch_family,
        body=role,
        headers=(Header(FAMILIES[arch_family].bodies[role]),),
        operands=plain(*buffers, *parameters),
        summary=f"tail: {what} of {form.rows_per_cta} rows a CTA, {'early' if form.early_trigger else 'late'} trigger",
        constants=constants,
        arg_plan=arguments((), buffers, parameters),
        tensor_maps=(),
        pipeline=_NORM_PIPELINE if form.normed else _SUM_PIPELINE,
        launch=launch_record(FAMILIES[arch_family].launch_shape(form)),
        buffer_types=buffer_types(model.dims),
    )


def launch_record(shape: LaunchShape) -> LaunchRecord:
    """The planned shape of a launch, as the registry holds it."""
    return LaunchRecord(
        block=(shape.threads, 1, 1),
        cluster=(shape.cluster_ctas, 1, 1),
        cooperative=shape.cooperative,
        programmatic=shape.programmatic,
        overlap=shape.overlap,
        dynamic_smem_bytes=shape.dynamic_smem_bytes,
    )


def _headers(form: DecodeForm, arch_family: str) -> tuple[Header, ...]:
    family = FAMILIES[arch_family]
    own = (Header(family.bodies[f"decode_{form.stage}"]), *activation_headers(form.stage))
    return own if family.sums_in_tensor_memory else (wgmma_header(mma_tokens(form)), *own)


def wgmma_header(n: int) -> Header:
    """The header of one width of Hopper's MMA."""
    return Header("device/wgmma_mma.cuh", (("n", n),))


def _summary(form: DecodeForm) -> str:
    split = "a pair splits K" if form.cluster_ctas == 2 else "one CTA a tile"
    if form.token_parts > 1:
        split = f"{form.token_parts} CTAs split the tokens"
    norm = ""
    if form.stage == "tail":
        norm = ", no norm" if not form.fused_norm else ", norm fused"
        norm += ", y resident" if form.resident_b else ""
        norm += ", rows staged" if form.staged_rows else ""
    return (
        f"{form.stage} decode, up to {form.n_pad} tokens: {split}, "
        f"{form.num_stages} stages of {form.chunks_per_stage} chunk{'s' * (form.chunks_per_stage > 1)}{norm}"
    )


def _thread_constants(form: DecodeForm, warps: WarpRoles) -> tuple[Constant, ...]:
    return (
        Constant("kNumThreads", warps.count * WARP_THREADS, warps.comment),
        Constant("kProducerWarp", warps.producer, "index of the producer warp"),
        Constant("kMmaBarrier", 1, f"named barrier of the {warps.finishers}"),
        Constant("kClusterCtas", form.cluster_ctas, _cluster_meaning(form)),
        Constant("kTileCtas", form.cluster_ctas * form.token_parts, "CTAs that work on one weight tile"),
    )


def _cluster_meaning(form: DecodeForm) -> str:
    return "CTAs that split the K of a weight tile" if form.cluster_ctas > 1 else "a CTA has all of a weight tile's K"


def _tile_constants(form: DecodeForm, arch_family: str) -> tuple[Constant, ...]:
    clips = FAMILIES[arch_family].clips_tokens
    missing = "rows that no copy writes are cleared at the start" if clips else "those past num_tokens arrive as zeros"
    shared = " (a shared tile: half gate, half up)" if form.gated else ""
    return (
        Constant("kBlockM", form.block_m, f"weight rows of a tile{shared}"),
        Constant("kBlockK", BLOCK_K, "elements of a K chunk: one 128-byte swizzled row"),
        *_row_constants(form, arch_family),
        Constant("kNPad", mma_tokens(form), f"tokens of the MMA; {missing}"),
        Constant("kFinalTokens", final_tokens(form), "tokens that a CTA finishes"),
        Constant("kNumStages", form.num_stages, "ring stages"),
        Constant("kChunkABytes", a_chunk_bytes(form.block_m), "one K chunk of weights"),
        Constant("kChunkBBytes", b_chunk_bytes(mma_tokens(form)), "one K chunk of tokens"),
    )


def _row_constants(form: DecodeForm, arch_family: str) -> tuple[Constant, ...]:
    """Which weight rows a thread's two halves of a tile are."""
    half, warp = (16, 32) if FAMILIES[arch_family].sums_in_tensor_memory else (form.block_m - 64, 16)
    shared = "; a shared tile's are gate and up" if form.gated else ""
    return (
        Constant("kHalfRows", half, f"weight rows between a thread's halves{shared}"),
        Constant("kWarpRows", warp, "weight rows from a warp's to the next warp's, in a half"),
    )


def _stage_constants(form: DecodeForm, smem: DecodeSmem) -> tuple[Constant, ...]:
    pad = " and kPadBytes behind them" if a_pad_bytes(form.gated, form.block_m) else ""
    return (
        Constant("kChunksPerStage", form.chunks_per_stage, "K chunks of a stage"),
        Constant("kStageABytes", smem.a_stage_bytes, f"weights of a stage{pad}"),
        Constant("kStageBBytes", smem.b_stage_bytes, "tokens of a stage"),
    )


def _front_constants(model: Model, form: DecodeForm, smem: DecodeSmem, arch_family: str) -> tuple[Constant, ...]:
    dims = model.dims
    shares = unit_shares(form)
    pad = a_pad_bytes(form.gated, form.block_m)
    weights = smem.a_stage_bytes - pad
    return (
        Constant("kStageWeightBytes", weights, "what stage_full expects of weights"),
        Constant("kRank0Units", shares[0].k1_count, f"ring units of {whose(form, 0)}, from K chunk 0 on"),
        *(Constant("kRank1Units", share.k1_count, "ring units of rank 1") for share in shares[1:]),
        Constant("kRouterTiles", form.router_tiles, "tiles of gate_weight"),
        Constant("kLatentTiles", form.latent_tiles, "tiles of down_weight"),
        Constant("kRouterCols", dims.experts, "columns of logits"),
        Constant("kLatentCols", dims.latent, "columns of latent"),
        *line_constants(f"columns of shared_act{': the up rows start there' if form.gated else ''}", "SHARED_COLS"),
        *activation_constants(model),
        *(
            (Constant("kPadBytes", pad, "behind a stage's weights: the rows that its up half is short of 64"),)
            * (pad > 0)
        ),
    )


def _tail_constants(model: Model, form: DecodeForm, warps: WarpRoles, arch_family: str) -> tuple[Constant, ...]:
    shares = unit_shares(form)
    constants: tuple[Constant, ...] = (
        *(
            constant
            for rank in range(len(shares))
            for constant in (
                *line_constants(f"shared-down units of {whose(form, rank)}", f"RANK{rank}_DOWN_UNITS"),
                *line_constants(f"up units of {whose(form, rank)}", f"RANK{rank}_UP_UNITS"),
            )
        ),
        Constant("kUpRagged", form.k1_ragged_cols != 0, "the latent slice ends inside its last chunk"),
        Constant("kOutCols", form.out_cols, "columns of out"),
        Constant("kFusedNorm", form.fused_norm, "the launch normalises the routed rows itself"),
        Constant("kResidentB", form.resident_b, "y of the own up chunks stays in shared memory"),
        Constant("kStagedRows", form.staged_rows, "routed rows and norm weight are copied to shared memory first"),
        Constant("kIssueGate", form.issue_gate > 0, "row loads are issued before all but the first weights"),
        Constant("kNoPrefetch", form.no_prefetch, "no tensor-map prefetch"),
        Constant("kStaggerUnits", form.stagger_units, "the cold fill pauses before this unit (0: never)"),
    )
    if not form.fused_norm:
        return constants
    if form.resident_b:
        constants += line_constants("columns of the own latent slice", "UP_COLS")
        columns = form.chunks_per_stage * BLOCK_K
        constants += (Constant("kUnitCols", columns, "columns of a unit"),)
    else:
        constants += (_ahead_of_y(form, arch_family),)
    norm = (
        *line_constants("CTAs of the launch", "GRID_CTAS"),
        Constant("kNormWarps", warps.norm, "warps that normalise rows"),
        Constant("kNormBarrier", 2, "named barrier of the norm warps"),
    )
    return constants + norm + norm_constants(model)


def _ahead_of_y(form: DecodeForm, arch_family: str) -> Constant:
    """Units of weights that are loaded before the producer waits for y; each must become free without y.

    Blackwell's stages are freed by their own commits. Hopper's MMA warps free the last down unit's only once they have
    issued the next unit, which needs y.
    """
    waits_for_next = not FAMILIES[arch_family].sums_in_tensor_memory
    meaning = "units, from the first up one on, whose weights do not wait for y"
    return Constant("kAheadOfY", form.num_stages - waits_for_next, meaning)


def whose(form: DecodeForm, rank: int) -> str:
    """Of whom a share of K is: of a rank, or of a tile that one CTA multiplies."""
    return f"rank {rank}" if form.cluster_ctas > 1 else "a tile"


def norm_constants(model: Model) -> tuple[Constant, ...]:
    """What `kernels/norm_row.cuh` needs to normalise a row by one warp; raises as `row_constants`."""
    assert model.dims.norm_eps is not None  # only a block with a norm has programs that take one
    return (*row_constants(model), Constant("kNormEps", model.dims.norm_eps, "added to the mean of squares"))


def row_constants(model: Model) -> tuple[Constant, ...]:
    """What `kernels/norm_row.cuh` needs to add up the partials of a row by one warp.

    Raises
    ------
    EmitError
        A row is too wide for a warp's registers.
    """
    vectors = -(-model.dims.latent // VECTOR_ELEMS)
    per_lane = -(-vectors // WARP_THREADS)
    if per_lane > MAX_VECTORS_PER_LANE:
        limit = MAX_VECTORS_PER_LANE * WARP_THREADS * VECTOR_ELEMS
        raise EmitError(
            f"{model.name}: latent {model.dims.latent} is {per_lane} vectors of {VECTOR_ELEMS} a lane; a norm warp "
            f"holds at most {MAX_VECTORS_PER_LANE} in registers. Use a latent width of at most {limit}."
        )
    prepared = model.dims.sum_stage.preparation
    names = f"{prepared.partials.short} and {prepared.output.short}"
    return (
        Constant("kLatentCols", model.dims.latent, f"columns of {names}"),
        Constant("kRowVectors", vectors, "16-byte vectors of a row"),
        Constant("kVectorsPerLane", per_lane, "vectors that a lane owns at most"),
    )


def _smem_constants(form: DecodeForm, smem: DecodeSmem) -> tuple[Constant, ...]:
    constants: tuple[Constant, ...] = ()
    if form.cluster_ctas == 2:
        constants += (
            Constant("kSplitFinalize", form.split_finalize, "each CTA of a pair finishes half of the tokens"),
            Constant("kLandingAlias", form.landing_alias, "the partner's sums land in the drained ring"),
            Constant("kLandingOffset", smem.landing_offset, "byte offset of the partner's sums"),
            Constant("kLandingBytes", pushed_bytes(form), "fp32 sums of a tile that land there"),
        )
    constants += (
        Constant("kARingOffset", smem.a_ring_offset, "byte offset of the weight stages"),
        Constant("kBRingOffset", smem.b_ring_offset, "byte offset of the token stages"),
        Constant("kStagingOffset", smem.staging_offset, "byte offset of the staged output rows, over the drained ring"),
    )
    if form.resident_b:
        constants += (Constant("kResidentBOffset", smem.resident_b_offset, "byte offset of the resident y chunks"),)
    if form.staged_rows:
        constants += (
            Constant("kStagedRowsOffset", smem.rows_offset, "byte offset of the staged routed rows"),
            Constant("kNormWeightOffset", smem.norm_weight_offset, "byte offset of the staged norm weight"),
        )
    return constants


def barrier_constants(pipeline: Pipeline, reserved_bytes: int, where: str) -> tuple[Constant, ...]:
    """Byte offsets of a program's barriers.

    Raises
    ------
    EmitError
        They need more than the reserved bytes.
    """
    if pipeline.barrier_bytes > reserved_bytes:
        raise EmitError(
            f"{where}: {pipeline.barrier_bytes // MBARRIER_BYTES} barriers need {pipeline.barrier_bytes} bytes; "
            f"{reserved_bytes} are reserved. Lower the number of stages."
        )
    return tuple(
        Constant(f"k{barrier.camel}Offset", offset, f"byte offset of {barrier.label}")
        for barrier, offset in pipeline.offsets()
    )
