"""What a decode program takes: the operands of its body's call, its argument plan and its tensor maps. Pure."""

from __future__ import annotations

from cakegen.emit.decode_tokens import token_map
from cakegen.emit.operands import (
    NO_NORM,
    front_maps_operand,
    front_outputs,
    names_of,
    norm_operands,
    partial_parameters,
    pitches_of,
    plain,
    tail_maps_operand,
    tail_output,
)
from cakegen.emit.program import Operand
from cakegen.model import ModelDims
from cakegen.operands import Preparation, Segment
from cakegen.plan.records import BLOCK_K, DecodeForm
from cakegen.registry import TensorMapEntry


def norm_parameters(prepared: Preparation) -> tuple[str, ...]:
    """What every program that prepares rows takes for it, beside its buffers and the number of tokens."""
    count, stride = partial_parameters(prepared)
    return (count, *pitches_of((prepared.partials,)), stride, *pitches_of((prepared.output,)))


def arguments(
    maps: tuple[str, ...], buffers: tuple[str, ...], parameters: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    """A program's `arg_plan`: tensor maps, buffers, i32 parameters, and the grid of the binding's entry."""
    grid = ("grid_x", "grid_y", "grid_z")
    kinds = (("tma_buffer", maps), ("buffer", buffers), ("parameter", parameters), ("grid", grid))
    return tuple((kind, name) for kind, names in kinds for name in names)


def front_operands(dims: ModelDims) -> tuple[Operand, ...]:
    """What the front's body is called with."""
    return (front_maps_operand(dims), front_outputs(dims), *plain("num_tokens", "weights_ahead", "wait_record"))


def tail_operands(dims: ModelDims, form: DecodeForm) -> tuple[Operand, ...]:
    """What the tail's body is called with."""
    norm = NO_NORM
    if form.fused_norm:
        every = norm_operands(dims.sum_stage.preparation)
        unread = _unread_by_norm(dims, form)
        norm = Operand(tuple(name for name in every.parameters if name not in unread), every.struct)
    maps = tail_maps_operand(dims, resident=form.resident_b)
    return (maps, norm, tail_output(dims), *plain("num_tokens", "up_col0", "weights_ahead", "wait_record"))


def front_arguments(dims: ModelDims) -> tuple[tuple[str, str], ...]:
    """The front's `arg_plan`."""
    stage = dims.rows_stage
    return arguments(
        names_of(stage.mapped),
        (*names_of(stage.pointed), "wait_record"),
        ("num_tokens", *pitches_of(stage.outputs), "weights_ahead"),
    )


def tail_arguments(dims: ModelDims, form: DecodeForm) -> tuple[tuple[str, str], ...]:
    """The tail's `arg_plan`."""
    stage = dims.sum_stage
    prepared = stage.preparation
    maps = names_of(spec for spec in stage.mapped if not (form.resident_b and spec == prepared.output))
    unread = _unread_by_norm(dims, form)
    buffers = names_of(prepared.pointed) if form.fused_norm else ()
    parameters = norm_parameters(prepared) if form.fused_norm else ()
    counters = ("counters",) * (form.fused_norm and "counters" not in unread)
    return arguments(
        maps,
        (*buffers, stage.output.name, *counters, "wait_record"),
        (
            "num_tokens",
            *(name for name in parameters if name not in unread),
            *pitches_of((stage.output,)),
            *("up_col0", "weights_ahead"),
        ),
    )


def _unread_by_norm(dims: ModelDims, form: DecodeForm) -> frozenset[str]:
    """What the norm inside a launch does not take: a resident y needs no counter, staged rows are one partial."""
    resident = ("counters",) * form.resident_b
    return frozenset((*resident, *partial_parameters(dims.sum_stage.preparation) * form.staged_rows))


def front_maps(dims: ModelDims, form: DecodeForm, arch_family: str) -> tuple[TensorMapEntry, ...]:
    """The front's tensor maps; a gated tile is half gate rows, half up rows."""
    stage = dims.rows_stage
    weights = (
        operand_map(product.weight.name, (BLOCK_K, form.block_m // (1 + product.gated), form.chunks_per_stage))
        for product in stage.products
    )
    return (*weights, token_map(form, arch_family, stage.tokens.name))


def tail_maps(dims: ModelDims, form: DecodeForm, arch_family: str) -> tuple[TensorMapEntry, ...]:
    """The tail's tensor maps; none of a y that stays in shared memory."""
    box = (BLOCK_K, form.block_m, form.chunks_per_stage)
    along_k = dims.sum_stage.along_k
    mapped = [segment for segment in along_k if segment.prepared is None or not form.resident_b]
    return (
        *(operand_map(each.weight.name, box, segment_view(each, form.k1_ragged_cols)) for each in along_k),
        *(token_map(form, arch_family, each.tokens.name, segment_view(each, form.k1_ragged_cols)) for each in mapped),
    )


def operand_map(name: str, box: tuple[int, int, int], view: str = "chunks") -> TensorMapEntry:
    """A map that is called after what it is of."""
    return TensorMapEntry(name, name, view, box)


def segment_view(segment: Segment, ragged_cols: int) -> str:
    """How maps see a segment's weight and tokens: by columns where a rank's own end inside a chunk of all ranks'."""
    return "columns" if segment.shares_k and ragged_cols else "chunks"
