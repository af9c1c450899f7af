"""What a decode program takes: the operands of its body's call, its argument plan and its tensor maps. Pure."""

from __future__ import annotations

from cakegen.emit.decode_tokens import token_map
from cakegen.emit.operands import (
    FRONT_MAPS,
    FRONT_OUTPUTS,
    NO_NORM,
    NORM,
    NORM_OPERANDS,
    PARTIAL_PARAMETERS,
    RESIDENT_TAIL_MAPS,
    TAIL_MAPS,
    TAIL_OUTPUT,
    names_of,
    pitches_of,
    plain,
)
from cakegen.emit.program import Operand
from cakegen.operands import FRONT, TAIL, Segment
from cakegen.plan.records import BLOCK_K, DecodeForm
from cakegen.registry import TensorMapEntry

NORM_BUFFERS = names_of(NORM.pointed)
NORM_PARAMETERS = (
    PARTIAL_PARAMETERS[0],
    *pitches_of((NORM.partials,)),
    *PARTIAL_PARAMETERS[1:],
    *pitches_of((NORM.output,)),
)
"""What every program that normalises rows takes for it, beside the number of tokens."""


def arguments(
    maps: tuple[str, ...], buffers: tuple[str, ...], parameters: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    """A program's `arg_plan`: tensor maps, buffers, i32 parameters, and the grid of the binding's entry."""
    grid = ("grid_x", "grid_y", "grid_z")
    kinds = (("tma_buffer", maps), ("buffer", buffers), ("parameter", parameters), ("grid", grid))
    return tuple((kind, name) for kind, names in kinds for name in names)


def front_operands() -> tuple[Operand, ...]:
    """What the front's body is called with."""
    return (FRONT_MAPS, FRONT_OUTPUTS, *plain("num_tokens", "weights_ahead", "wait_record"))


def tail_operands(form: DecodeForm) -> tuple[Operand, ...]:
    """What the tail's body is called with."""
    maps = RESIDENT_TAIL_MAPS if form.resident_b else TAIL_MAPS
    norm = NO_NORM
    if form.fused_norm:
        unread = _unread_by_norm(form)
        read = tuple(name for name in NORM_OPERANDS.parameters if name not in unread)
        norm = Operand(read, NORM_OPERANDS.struct)
    return (maps, norm, TAIL_OUTPUT, *plain("num_tokens", "up_col0", "weights_ahead", "wait_record"))


def front_arguments() -> tuple[tuple[str, str], ...]:
    """The front's `arg_plan`."""
    return arguments(
        names_of(FRONT.mapped),
        (*names_of(FRONT.pointed), "wait_record"),
        ("num_tokens", *pitches_of(FRONT.outputs), "weights_ahead"),
    )


def tail_arguments(form: DecodeForm) -> tuple[tuple[str, str], ...]:
    """The tail's `arg_plan`."""
    maps = names_of(spec for spec in TAIL.mapped if not (form.resident_b and spec == NORM.output))
    unread = _unread_by_norm(form)
    norm_buffers = NORM_BUFFERS if form.fused_norm else ()
    norm_parameters = NORM_PARAMETERS if form.fused_norm else ()
    counters = ("counters",) * (form.fused_norm and "counters" not in unread)
    return arguments(
        maps,
        (*norm_buffers, TAIL.output.name, *counters, "wait_record"),
        (
            "num_tokens",
            *(name for name in norm_parameters if name not in unread),
            *pitches_of((TAIL.output,)),
            *("up_col0", "weights_ahead"),
        ),
    )


def _unread_by_norm(form: DecodeForm) -> frozenset[str]:
    """What the norm inside a launch does not take: a resident y needs no counter, staged rows are one partial."""
    resident = ("counters",) * form.resident_b
    return frozenset((*resident, *PARTIAL_PARAMETERS * form.staged_rows))


def front_maps(form: DecodeForm, arch_family: str) -> tuple[TensorMapEntry, ...]:
    """The front's tensor maps; a gated tile is half gate rows, half up rows."""
    weights = (
        operand_map(product.weight.name, (BLOCK_K, form.block_m // (1 + product.gated), form.chunks_per_stage))
        for product in FRONT.products
    )
    return (*weights, token_map(form, arch_family, FRONT.tokens.name))


def tail_maps(form: DecodeForm, arch_family: str) -> tuple[TensorMapEntry, ...]:
    """The tail's tensor maps; none of a y that stays in shared memory."""
    box = (BLOCK_K, form.block_m, form.chunks_per_stage)
    mapped = [segment for segment in TAIL.along_k if segment.norm is None or not form.resident_b]
    return (
        *(operand_map(each.weight.name, box, segment_view(each, form.k1_ragged_cols)) for each in TAIL.along_k),
        *(token_map(form, arch_family, each.tokens.name, segment_view(each, form.k1_ragged_cols)) for each in mapped),
    )


def operand_map(name: str, box: tuple[int, int, int], view: str = "chunks") -> TensorMapEntry:
    """A map that is called after what it is of."""
    return TensorMapEntry(name, name, view, box)


def segment_view(segment: Segment, ragged_cols: int) -> str:
    """How maps see a segment's weight and tokens: by columns where a rank's own end inside a chunk of all ranks'."""
    return "columns" if segment.whole_k and ragged_cols else "chunks"
