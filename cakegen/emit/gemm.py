"""What the prefill GEMMs of all architectures share: summary, launch, arguments, maps, facts of their outputs. Pure.

Both families take the same operands in the same order; tiles and pipelines are each family's own.
"""

from __future__ import annotations

from cakegen.emit.activation import activation_constants
from cakegen.emit.decode_arguments import arguments, operand_map, segment_view
from cakegen.emit.operands import (
    PARTIALS,
    SPLIT,
    front_maps_operand,
    front_outputs,
    names_of,
    pitches_of,
    plain,
    tail_maps_operand,
)
from cakegen.emit.program import Constant, Operand
from cakegen.model import Model, ModelDims
from cakegen.plan.records import BLOCK_K, GemmForm
from cakegen.plan.workspace import PAIR_CTAS
from cakegen.registry import TensorMapEntry

_SPLIT_PARAMETERS = ("m_tiles", *SPLIT.parameters)


def gemm_summary(form: GemmForm, remark: str) -> str:
    """A GEMM in one line; `remark` is what its family adds."""
    ragged = ", last up block partly out of bounds" if form.k1_ragged_cols else ""
    tile = f"{PAIR_CTAS * form.block_m} x {form.block_n}"
    return f"{form.stage} prefill GEMM: pair tiles of {tile}, {form.num_stages} stages{remark}{ragged}"


def front_gemm_arguments(dims: ModelDims) -> tuple[tuple[str, str], ...]:
    """The `arg_plan` of the front's GEMM."""
    stage = dims.rows_stage
    return arguments(
        names_of(stage.mapped),
        (*names_of(stage.pointed), *PARTIALS.parameters, "wait_record"),
        ("num_tokens", *pitches_of(stage.outputs), *_SPLIT_PARAMETERS),
    )


def tail_gemm_arguments(
    dims: ModelDims,
    norm_parameters: tuple[str, ...] = (),
    *,
    maps: tuple[str, ...] = (),
    plan_parameters: tuple[str, ...] = (),
) -> tuple[tuple[str, str], ...]:
    """The `arg_plan` of the tail's GEMM.

    Parameters
    ----------
    norm_parameters
        What a fused norm needs beside its buffers; empty: the norm is a launch of its own.
    maps
        Tensor maps beside those of the operands.
    plan_parameters
        What the plan decides beside the split.
    """
    stage = dims.sum_stage
    buffers = names_of(stage.preparation.pointed) if norm_parameters else ()
    return arguments(
        (*names_of(stage.mapped), *maps),
        (*buffers, stage.output.name, *PARTIALS.parameters, "wait_record"),
        ("num_tokens", *norm_parameters, *pitches_of((stage.output,)), "up_col0", *plan_parameters, *_SPLIT_PARAMETERS),
    )


def front_gemm_operands(dims: ModelDims) -> tuple[Operand, ...]:
    """What the front's body takes."""
    return (
        front_maps_operand(dims),
        front_outputs(dims),
        SPLIT,
        PARTIALS,
        *plain("num_tokens", "m_tiles", "wait_record"),
    )


def tail_gemm_operands(dims: ModelDims, norm: Operand, output: Operand) -> tuple[Operand, ...]:
    """What the tail's body takes, beside its norm and its output."""
    return (
        tail_maps_operand(dims),
        norm,
        output,
        SPLIT,
        PARTIALS,
        *plain("num_tokens", "up_col0", "m_tiles", "wait_record"),
    )


def gemm_maps(dims: ModelDims, form: GemmForm) -> tuple[TensorMapEntry, ...]:
    """Boxes of one K block: a CTA's token rows, and half of a tile's weight rows."""
    weights, tokens = (BLOCK_K, form.block_n // PAIR_CTAS, 1), (BLOCK_K, form.block_m, 1)
    if form.stage == "front":
        return (
            *(operand_map(spec.name, weights) for spec in dims.rows_stage.weights),
            operand_map(dims.rows_stage.tokens.name, tokens),
        )
    views = [(segment, segment_view(segment, form.k1_ragged_cols)) for segment in dims.sum_stage.along_k]
    return (
        *(operand_map(segment.weight.name, weights, view) for segment, view in views),
        *(operand_map(segment.tokens.name, tokens, view) for segment, view in views),
    )


def output_constants(model: Model, form: GemmForm) -> tuple[Constant, ...]:
    """What the epilogue knows of the outputs, and the loader of K."""
    dims, gated = model.dims, model.dims.rows_stage.gated
    if form.stage == "front":
        return (
            Constant("kSharedCols", "I_LOCAL", f"columns of shared_act{': the up rows start there' if gated else ''}"),
            Constant("kNumNTiles", "N_TILES", "column tiles of all classes"),
            Constant("kSharedTiles", "S_TILES", "column tiles of shared_act"),
            Constant("kNumK", form.num_k, "K blocks of a tile"),
            Constant("kRouterCols", dims.experts, "columns of logits"),
            Constant("kLatentCols", dims.latent, "columns of latent"),
            Constant("kLatentTiles", -(-dims.latent // form.block_n), "column tiles of latent"),
            *activation_constants(model),
        )
    return (
        Constant("kDownBlocks", "K2_ITERS", "shared-down blocks of K, which come first"),
        Constant("kUpBlocks", "K1_ITERS", "up blocks of K"),
        Constant("kNumK", "NUM_K_ITERS", "K blocks of a tile"),
        Constant("kOutCols", dims.hidden, "columns of out"),
        Constant("kNumNTiles", -(-dims.hidden // form.block_n), "column tiles of out"),
        Constant("kUpRagged", form.k1_ragged_cols != 0, "the latent slice ends inside its last block"),
    )
