"""Operands of instructions that run outside of blocks: read, written, located."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.memory import OFFSET_MASK, PARAM_WINDOW, RANK_SHIFT
from cakegen.emulator.machine.warp import Cta, Strand
from cakegen.emulator.text.ptx import Address, Immediate, Instruction, Operand, Register, Sink, Special
from cakegen.emulator.units.tma.tensor_view import TensorView
from cakegen.errors import EmulationError

Array = NDArray[Any]


def refused(instruction: Instruction) -> EmulationError:
    """The error for a form that is not modelled."""
    return EmulationError(f"{instruction.place}: {instruction.text[:120]!r} is not modelled (opcode form unknown)")


def active_lanes(strand: Strand, instruction: Instruction) -> Array:
    """The strand's lanes that pass the guard."""
    if instruction.guard is None:
        return strand.mask
    guard = strand.warp.registers[instruction.guard.index]
    active: Array = strand.mask & (~guard if instruction.guard_negated else guard)
    return active


def read_lanes(strand: Strand, operand: Operand, kind: str) -> Array:
    """An operand's 32 lanes as a numpy type."""
    if isinstance(operand, Register):
        values: Array = strand.warp.registers[operand.index]
        wanted = _type(kind)
        if values.dtype is wanted:
            return values
        return values.view(wanted) if values.itemsize == wanted.itemsize else values.astype(wanted)
    if isinstance(operand, Immediate):
        return _lanes_of(operand.value, kind)
    if isinstance(operand, Special):
        return strand.warp.special(operand.name).astype(kind)
    raise EmulationError(f"operand {operand} is not modelled here")


def read_address(strand: Strand, operand: Operand, kind: str) -> Array:
    """The 32 lanes of an address operand."""
    assert isinstance(operand, Address)
    if isinstance(operand.base, (Register, Immediate)):
        base = read_lanes(strand, operand.base, kind)
    else:
        base = strand.warp.symbol(operand.base.name).astype(kind)
    return base + _lanes_of(operand.offset, kind) if operand.offset else base


_type = functools.cache(np.dtype)


@functools.lru_cache(maxsize=4096)
def _lanes_of(value: int, kind: str) -> Array:
    """A constant in 32 lanes, which nobody may write."""
    size = _type(kind).itemsize
    lanes = np.full(32, value & ((1 << 8 * size) - 1), f"u{size}").view(kind)
    lanes.flags.writeable = False
    return lanes


def write_lanes(strand: Strand, operand: Operand, active: Array, values: Array) -> None:
    """Write a result for some lanes: as bits, where the register is as wide."""
    if isinstance(operand, Register):
        registers = strand.warp.registers
        old = registers[operand.index]
        same = values.dtype != old.dtype and values.itemsize == old.itemsize
        values = values.view(old.dtype) if same else values.astype(old.dtype, copy=False)
        registers[operand.index] = np.where(active, values, old)
    elif not isinstance(operand, Sink):
        raise EmulationError(f"{operand} can't be written")


def uniform(strand: Strand, lanes: Array, what: str) -> int:
    """A value that all lanes of a warp must agree on."""
    if (lanes != lanes[0]).any():
        raise Fault("divergence", f"the lanes of a warp disagree on {what}: {int(lanes[0]):#x}, {lanes.tolist()}")
    return int(lanes[0])


def park(strand: Strand, waiters: list[Any], reason: object) -> None:
    """Stop until somebody wakes the waiters."""
    strand.waits_for = reason
    waiters.append(strand)


def locate(strand: Strand, address: int, remote: bool) -> tuple[Cta, int]:
    """The CTA and the offset that a shared address names."""
    cta, rank = strand.warp.cta, address >> RANK_SHIFT
    if rank == cta.shared.rank:
        return cta, address & OFFSET_MASK
    if not remote:
        raise Fault("out-of-bounds", f"a shared::cta operation on an address of cluster rank {rank}")
    return cta.peer(rank), address & OFFSET_MASK


class HasTensorMaps(Protocol):
    """Has the tensor maps of a kernel's parameters."""

    def tensor_view(self, offset: int) -> TensorView:
        """The tensor map at an offset of the parameter block."""


def tensor_box(machine: HasTensorMaps, strand: Strand, operand: Operand, lane: int) -> tuple[TensorView, list[int]]:
    """The tensor and the corner that a lane's `[map, {coordinates}]` names.

    Raises
    ------
    Fault
        No map is there, or it has another number of dimensions.
    """
    assert isinstance(operand, Address)
    generic = int(read_address(strand, Address(operand.base, operand.offset), "u8")[lane])
    view = machine.tensor_view(generic - PARAM_WINDOW)
    corner = [int(read_lanes(strand, each, "i4")[lane]) for each in operand.coordinates]
    if len(corner) != len(view.record.dims):
        raise Fault("descriptor", f"{len(corner)} coordinates for {view.record.name} of {len(view.record.dims)} dims")
    return view, corner
