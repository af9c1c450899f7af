"""`ldmatrix`, `stmatrix` and `movmatrix` of 8 x 8 matrices of 16 bits.

PTX ISA 9.7.14.5.15 to 9.7.14.5.17. Lane l gives the address of row l % 8 of matrix l / 8, and holds elements 2 (l % 4)
and 2 (l % 4) + 1 of row l / 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.memory import RANK_SHIFT, SHARED_WINDOW, SharedMemory
from cakegen.emulator.order.warp_order import WarpOrder
from cakegen.emulator.text.ptx import Address, Instruction, Register, Symbol
from cakegen.emulator.units.warp_matrix.collective import (
    Collective,
    RegisterWarp,
    by_whole_warp,
    read_registers,
    refused,
    registers_of,
    write_registers,
)

Array = NDArray[Any]


class MatrixCta(Protocol):
    """A CTA, as far as matrices go."""

    @property
    def shared(self) -> SharedMemory:
        """Where rows lie."""


class MatrixWarp(RegisterWarp, Protocol):
    """A warp, as far as matrices go."""

    @property
    def cta(self) -> MatrixCta:
        """Its CTA."""

    @property
    def thread(self) -> WarpOrder | None:
        """How the checker of happens-before sees it; None: nothing is checked."""

    def symbol(self, name: str) -> Array:
        """The shared address of a variable."""


def _count(instruction: Instruction) -> int:
    """How many matrices a form moves."""
    parts = set(instruction.parts[1:])
    count = next((count for count in (1, 2, 4) if f"x{count}" in parts), 0)
    expected = {"sync", "aligned", "m8n8", f"x{count}", "b16"}
    if parts - {"trans", "shared", "shared::cta"} != expected:
        raise refused(instruction)
    return count


def _addressing(instruction: Instruction, address: Any, count: int) -> Callable[[MatrixWarp], Array]:
    """What gives the shared addresses of the rows; without a state space they are generic."""
    if not isinstance(address, Address) or not isinstance(address.base, (Register, Symbol)):
        raise refused(instruction)
    base, offset = address.base, address.offset
    generic = not {"shared", "shared::cta"} & set(instruction.parts)

    def rows(warp: MatrixWarp) -> Array:
        if isinstance(base, Symbol):
            addresses: Array = warp.symbol(base.name) + np.uint32(offset & 0xFFFFFFFF)
        elif generic:
            wide = warp.registers[base.index].view("u8") + np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
            addresses = (wide - np.uint64(SHARED_WINDOW)).astype(np.uint32)
        else:
            addresses = warp.registers[base.index].astype("u4") + np.uint32(offset & 0xFFFFFFFF)
        addresses = addresses[: 8 * count]
        if (addresses >> np.uint32(RANK_SHIFT) != warp.cta.shared.rank).any():
            raise Fault("out-of-bounds", f"{instruction.opcode} with the address of another CTA of the cluster")
        return addresses

    return rows


def _matrices(registers: Array) -> Array:
    """`[matrices, 32]` registers <-> `[matrices, 8, 8]` elements."""
    return np.ascontiguousarray(registers).view(np.uint16).reshape(len(registers), 8, 8)


def _registers(matrices: Array, transposed: bool) -> Array:
    if transposed:
        matrices = matrices.transpose(0, 2, 1)
    return np.ascontiguousarray(matrices).reshape(len(matrices), 64).view(np.uint32)


def _thread(warp: MatrixWarp, index: int) -> WarpOrder | None:
    return None if warp.thread is None else warp.thread.at(index, None, collective=True)


def decode_load(instruction: Instruction, index: int) -> Collective:
    """`ldmatrix`."""
    count, transposed = _count(instruction), "trans" in instruction.parts
    target, address = instruction.operands
    registers = registers_of(instruction, target, (count,))
    rows = _addressing(instruction, address, count)

    def load(warp: MatrixWarp) -> None:
        found = warp.cta.shared.load(rows(warp), 16, _thread(warp, index))
        matrices = found.view(np.uint16).reshape(count, 8, 8)
        write_registers(warp, registers, _registers(matrices, transposed))

    return by_whole_warp(instruction, load)


def decode_store(instruction: Instruction, index: int) -> Collective:
    """`stmatrix`."""
    count, transposed = _count(instruction), "trans" in instruction.parts
    address, source = instruction.operands
    registers = registers_of(instruction, source, (count,))
    rows = _addressing(instruction, address, count)

    def store(warp: MatrixWarp) -> None:
        matrices = _matrices(read_registers(warp, registers, "u4"))
        values = _registers(matrices, transposed).view(np.uint8).reshape(8 * count, 16)
        warp.cta.shared.store(rows(warp), values, _thread(warp, index))

    return by_whole_warp(instruction, store)


def decode_move(instruction: Instruction, index: int) -> Collective:
    """`movmatrix.sync.aligned.m8n8.trans.b16`."""
    if set(instruction.parts[1:]) != {"sync", "aligned", "m8n8", "trans", "b16"}:
        raise refused(instruction)
    target, source = (registers_of(instruction, operand, (1,)) for operand in instruction.operands)

    def move(warp: RegisterWarp) -> None:
        write_registers(warp, target, _registers(_matrices(read_registers(warp, source, "u4")), True))

    return by_whole_warp(instruction, move)
