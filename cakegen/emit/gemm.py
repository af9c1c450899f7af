"""What the prefill GEMMs of all architectures share: summary, launch, arguments, maps, facts of their outputs. Pure.

Both families take the same operands in the same order; tiles and pipelines are each family's own.
"""

from __future__ import annotations

from cakegen.emit.activation import activation_constants
from cakegen.emit.decode_arguments import NORM_BUFFERS, arguments, operand_map, segment_view
from cakegen.emit.operands import (
    FRONT_MAPS,
    FRONT_OUTPUTS,
    PARTIALS,
    SPLIT,
    TAIL_MAPS,
    names_of,
    pitches_of,
    plain,
)
from cakegen.emit.program import Constant, Operand
from cakegen.model import Model
from cakegen.operands import FRONT, TAIL
from cakegen.plan.records import BLOCK_K, GemmForm
from cakegen.plan.workspace import PAIR_CTAS
from cakegen.registry import TensorMapEntry

_SPLIT_PARAMETERS = ("m_tiles", *SPLIT.parameters)


def gemm_summary(form: GemmForm, remark: str) -> str:
    """A GEMM in one line; `remark` is what its family adds."""
    ragged = ", last up block partly out of bounds" if form.k1_ragged_cols else ""
    tile = f"{PAIR_CTAS * form.block_m} x {form.block_n}"
    return f"{form.stage} prefill GEMM: pair tiles of {tile}, {form.num_stages} stages{remark}{ragged}"


def front_gemm_arguments() -> tuple[tuple[str, str], ...]:
    """The `arg_plan` of the front's GEMM."""
    return arguments(
        names_of(FRONT.mapped),
        (*names_of(FRONT.pointed), *PARTIALS.parameters, "wait_record"),
        ("num_tokens", *pitches_of(FRONT.outputs), *_SPLIT_PARAMETERS),
    )


def tail_gemm_arguments(
    norm_parameters: tuple[str, ...] = (), *, maps: tuple[str, ...] = (), plan_parameters: tuple[str, ...] = ()
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
    return arguments(
        (*names_of(TAIL.mapped), *maps),
        (*(NORM_BUFFERS if norm_parameters else ()), TAIL.output.name, *PARTIALS.parameters, "wait_record"),
        ("num_tokens", *norm_parameters, *pitches_of((TAIL.output,)), "up_col0", *plan_parameters, *_SPLIT_PARAMETERS),
    )


def front_gemm_operands() -> tuple[Operand, ...]:
    """What the front's body takes."""
    return (FRONT_MAPS, FRONT_OUTPUTS, SPLIT, PARTIALS, *plain("num_tokens", "m_tiles", "wait_record"))


def tail_gemm_operands(norm: Operand, output: Operand) -> tuple[Operand, ...]:
    """What the tail's body takes, beside its norm and its output."""
    return (TAIL_MAPS, norm, output, SPLIT, PARTIALS, *plain("num_tokens", "up_col0", "m_tiles", "wait_record"))


def gemm_maps(form: GemmForm) -> tuple[TensorMapEntry, ...]:
    """Boxes of one K block: a CTA's token rows, and half of a tile's weight rows."""
    weights, tokens = (BLOCK_K, form.block_n // PAIR_CTAS, 1), (BLOCK_K, form.block_m, 1)
    if form.stage == "front":
        return (*(operand_map(spec.name, weights) for spec in FRONT.weights), operand_map(FRONT.tokens.name, tokens))
    views = [(segment, segment_view(segment, form.k1_ragged_cols)) for segment in TAIL.along_k]
    return (
        *(operand_map(segment.weight.name, weights, view) for segment, view in views),
        *(operand_map(segment.tokens.name, tokens, view) for segment, view in views),
    )


def output_constants(model: Model, form: GemmForm) -> tuple[Constant, ...]:
    """What the epilogue knows of the outputs, and the loader of K."""
    dims = model.dims
    if form.stage == "front":
        return (
            Constant("kSharedCols", "I_LOCAL", "columns of shared_act: the up rows start there"),
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
