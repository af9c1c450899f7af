"""What a decode program takes: the operands of its body's call, its argument plan and its tensor maps. Pure."""

from __future__ import annotations

from cakegen.emit.decode_tokens import token_map
from cakegen.emit.operands import (
    FRONT_MAPS,
    FRONT_OUTPUTS,
    NO_NORM,
    NORM_OPERANDS,
    RESIDENT_TAIL_MAPS,
    TAIL_MAPS,
    TAIL_OUTPUT,
    plain,
)
from cakegen.emit.program import Operand
from cakegen.plan.records import BLOCK_K, DecodeForm
from cakegen.registry import TensorMapEntry

NORM_BUFFERS = ("routed", "norm_weight", "y_workspace")
NORM_PARAMETERS = ("num_partials", "routed_pitch", "routed_partial_stride", "y_pitch")
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
        ("gate_weight", "down_weight", "shared_gate_up_weight", "x"),
        ("logits", "latent", "shared_act", "wait_record"),
        ("num_tokens", "logits_pitch", "latent_pitch", "shared_act_pitch", "weights_ahead"),
    )


def tail_arguments(form: DecodeForm) -> tuple[tuple[str, str], ...]:
    """The tail's `arg_plan`."""
    maps = ("shared_down_weight", "up_weight", "shared_act", *("y_workspace",) * (not form.resident_b))
    if not form.fused_norm:
        return arguments(maps, ("out", "wait_record"), ("num_tokens", "out_pitch", "up_col0", "weights_ahead"))
    unread = _unread_by_norm(form)
    counters = ("counters",) * ("counters" not in unread)
    return arguments(
        maps,
        (*NORM_BUFFERS, "out", *counters, "wait_record"),
        (
            "num_tokens",
            *(name for name in NORM_PARAMETERS if name not in unread),
            *("out_pitch", "up_col0", "weights_ahead"),
        ),
    )


def _unread_by_norm(form: DecodeForm) -> frozenset[str]:
    """What the norm inside a launch does not take: a resident y needs no counter, staged rows are one partial."""
    resident = ("counters",) * form.resident_b
    return frozenset((*resident, *("num_partials", "routed_partial_stride") * form.staged_rows))


def front_maps(form: DecodeForm, arch_family: str) -> tuple[TensorMapEntry, ...]:
    """The front's tensor maps."""
    rows = {
        "gate_weight": form.block_m,
        "down_weight": form.block_m,
        "shared_gate_up_weight": form.block_m // 2,
    }
    weights = tuple(
        TensorMapEntry(name, name, "chunks", (BLOCK_K, count, form.chunks_per_stage)) for name, count in rows.items()
    )
    return (*weights, token_map(form, arch_family, "x"))


def tail_maps(form: DecodeForm, arch_family: str) -> tuple[TensorMapEntry, ...]:
    """The tail's tensor maps; none of a y that stays in shared memory."""
    up_view = "columns" if form.k1_ragged_cols else "chunks"
    box = (BLOCK_K, form.block_m, form.chunks_per_stage)
    y = () if form.resident_b else (token_map(form, arch_family, "y_workspace", up_view),)
    return (
        TensorMapEntry("shared_down_weight", "shared_down_weight", "chunks", box),
        TensorMapEntry("up_weight", "up_weight", up_view, box),
        token_map(form, arch_family, "shared_act"),
        *y,
    )
