"""tcgen05.ld, st and their waits: a warp and its 32 lanes of tensor memory.

PTX ISA 9.7.16.8; shapes 9.7.16.2.3.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.operands import read_address, read_lanes, refused, uniform
from cakegen.emulator.machine.warp import Strand
from cakegen.emulator.text.forms.writer import BANK_TYPES
from cakegen.emulator.text.ptx import Address, Immediate, Instruction, Operand, Register, Vector
from cakegen.emulator.units.tcgen05.issue import TensorHost
from cakegen.emulator.units.tcgen05.tensor_memory import GROUP_LANES, Region, TensorMemory, split_address
from cakegen.emulator.units.wgmma.issue import InFlight

Array = NDArray[Any]

_MOST_REGISTERS = 128


@dataclass(frozen=True)
class AccessMap:
    """Where register i of lane t lies: arrays `[registers, 32]`, relative to the address, and what is touched."""

    lanes: Array
    columns: Array
    height: int
    spans: tuple[tuple[int, int], ...]


@functools.cache
def access_map(shape: str, count: int, half_split: int) -> AccessMap | None:
    """The map of a shape and `.xN` (PTX ISA 9.7.16.2.3), or None where they don't go together."""
    per_repeat = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}.get(shape, 0)
    registers = per_repeat * count
    if not per_repeat or count & (count - 1) or not 1 <= registers <= _MOST_REGISTERS:
        return None
    i, t = np.arange(registers)[:, None], np.arange(32)[None, :]
    zero = np.zeros((registers, 32), np.int64)
    spans: tuple[tuple[int, int], ...] = ((0, {"16x64b": 2, "16x128b": 4, "16x256b": 8}.get(shape, 1) * count),)
    if shape == "32x32b":
        lanes, columns = t + zero, i + zero
    elif shape == "16x64b":
        lanes, columns = 8 * (t & 1) + (t >> 2) + zero, 2 * i + (t >> 1 & 1)
    elif shape == "16x128b":
        lanes, columns = (t >> 2) + 8 * (i & 1), (t & 3) + 4 * (i >> 1)
    elif shape == "16x256b":
        lanes, columns = (t >> 2) + 8 * (i >> 1 & 1), 2 * (t & 3) + (i & 1) + 8 * (i >> 2)
    else:
        lanes, columns = t % 16 + zero, i + t // 16 * half_split
        spans = ((0, count), (half_split, count))
    return AccessMap(lanes, columns, 32 if shape == "32x32b" else GROUP_LANES, spans)


@dataclass(frozen=True)
class _Access:
    """One decoded tcgen05.ld or st of a warp.

    Parameters
    ----------
    packed
        A register holds the low halves of two columns, from the one in `columns` on.
    """

    registers: tuple[Register, ...]
    lanes: Array
    columns: Array
    regions: tuple[Region, ...]
    packed: bool


def _decode_access(
    strand: Strand, instruction: Instruction, address: Operand, vector: Operand, strict: bool
) -> _Access:
    shape, repeat, *rest = instruction.parts[4:]
    packed = rest[:1] == [{"ld": "pack::16b", "st": "unpack::16b"}[instruction.parts[1]]]
    half = instruction.operands[2 if instruction.parts[1] == "ld" else 1] if shape == "16x32bx2" else Immediate(0)
    items = vector.items if isinstance(vector, Vector) else ()
    registers = tuple(item for item in items if isinstance(item, Register))
    count = int(repeat[1:]) if repeat[1:].isdigit() else 0
    mapped = access_map(shape, count, half.value) if isinstance(half, Immediate) else None
    if mapped is None or len(registers) != len(mapped.lanes) or rest[packed:] != ["b32"]:
        raise refused(instruction)
    assert isinstance(address, Address)
    at = uniform(strand, read_address(strand, address, "u4"), "a tensor memory address")
    lane, column = split_address(at)
    quadrant = 32 * (strand.warp.index % 4)
    allowed = (quadrant,) if mapped.height == 32 else (quadrant, quadrant + GROUP_LANES)
    if not strict:
        # published kernels ran on devices with the lane of another quadrant, or beyond 127: the warp decides
        # (docs/emulator-public-kernels.md)
        lane = quadrant + lane % 32
    if lane not in allowed:
        raise Fault(
            "tensor-memory",
            f"`{instruction.opcode}` at lane {lane} by warp {strand.warp.index}, which may touch lanes {quadrant} to "
            f"{quadrant + 31} only: needs a start at lane {' or '.join(map(str, allowed))}",
        )
    groups = slice(lane // GROUP_LANES, (lane + mapped.height) // GROUP_LANES)
    wide = 2 if packed else 1
    regions = tuple(
        Region(groups, slice(column + wide * first, column + wide * (first + size))) for first, size in mapped.spans
    )
    return _Access(registers, mapped.lanes + lane, wide * mapped.columns + column, regions, packed)


@dataclass(eq=False)
class _Load:
    """A load whose registers are in flight."""

    access: _Access
    values: Array
    token: InFlight


def load(machine: TensorHost, strand: Strand, instruction: Instruction) -> None:
    """`tcgen05.ld` (PTX ISA 9.7.16.8): registers are in flight until `wait::ld`."""
    warp, memory = strand.warp, strand.warp.cta.tensor_memory
    strict = machine.tensor.strict
    access = _decode_access(strand, instruction, instruction.operands[1], instruction.operands[0], strict)
    for region in access.regions:
        memory.check_allocated(region, "tcgen05.ld")
        memory.refuse_writers(region, "tcgen05.ld")
        # programs widely take `wait::ld` for enough (docs/emulator-public-kernels.md)
        memory.hand_over(region, warp, "tcgen05.ld", needs_fence=strict)
        _require_one_half(memory, region)
        memory.reads[region.marks] += 1
    cells = memory.cells.reshape(128, -1)
    values = cells[access.lanes, access.columns]
    if access.packed:
        values = values & np.uint32(0xFFFF) | cells[access.lanes, access.columns + 1] << np.uint32(16)
    token = InFlight(f"`{instruction.opcode}` at {instruction.place}", "tcgen05.ld's register")
    load = _Load(access, values, token)
    warp.tensor.loads.append(load)
    if strict:
        for register in access.registers:
            warp.registers[register.index] = token
    else:
        _write_registers(warp.registers, load)


def _require_one_half(memory: TensorMemory, region: Region) -> None:
    """Columns where neither half of the quadrant was written hold nothing that a program can mean to read.

    An accumulator with M = 64 fills one half: a load of the whole quadrant gets poison for the other.
    """
    whole = memory.written[region.cells].all(axis=1)
    if not whole.any(axis=0).all():
        column = region.columns.start + int(np.flatnonzero(~whole.any(axis=0))[0])
        raise Fault("unwritten-read", f"tcgen05.ld reads {region}; nothing wrote column {column}")


def _write_registers(registers: list[Any], load: _Load) -> None:
    for register, values in zip(load.access.registers, load.values, strict=True):
        registers[register.index] = values.view(BANK_TYPES[register.bank])


def wait_loads(machine: TensorHost, strand: Strand, instruction: Instruction) -> None:
    """`tcgen05.wait::ld` (PTX ISA 9.7.16.8)."""
    warp = strand.warp
    for load in warp.tensor.loads:
        if machine.tensor.strict:
            for register in load.access.registers:
                if warp.registers[register.index] is not load.token:
                    raise Fault("pending-write", f"{register.name} was written while a tcgen05.ld to it was in flight")
            _write_registers(warp.registers, load)
        for region in load.access.regions:
            warp.cta.tensor_memory.reads[region.marks] -= 1
    warp.tensor.loads.clear()


def store(machine: TensorHost, strand: Strand, instruction: Instruction) -> None:
    """`tcgen05.st` (PTX ISA 9.7.16.8): cells are in flight until `wait::st`."""
    warp, memory = strand.warp, strand.warp.cta.tensor_memory
    strict = machine.tensor.strict
    access = _decode_access(strand, instruction, instruction.operands[0], instruction.operands[-1], strict)
    owner = machine.tensor.next_owner(instruction, (warp.number, -1))
    for region in access.regions:
        memory.check_allocated(region, "tcgen05.st")
        memory.refuse_writers(region, "tcgen05.st")
        memory.refuse_readers(region, "tcgen05.st")
        memory.hand_over(region, warp, "tcgen05.st")
    for region in access.regions:
        memory.begin_write(region, owner)
    values = np.stack([read_lanes(strand, register, "u4") for register in access.registers])
    cells, written = memory.cells.reshape(128, -1), memory.written.reshape(128, -1)
    if access.packed:
        # the upper halves of the cells: the ISA does not say; zeros
        cells[access.lanes, access.columns + 1] = values >> np.uint32(16)
        written[access.lanes, access.columns + 1] = True
        values = values & np.uint32(0xFFFF)
    cells[access.lanes, access.columns] = values
    written[access.lanes, access.columns] = True
    warp.tensor.stores.append((owner, access.regions))


def wait_stores(machine: TensorHost, strand: Strand, instruction: Instruction) -> None:
    """`tcgen05.wait::st` (PTX ISA 9.7.16.8)."""
    warp = strand.warp
    for owner, regions in warp.tensor.stores:
        for region in regions:
            warp.cta.tensor_memory.end_write(region, owner)
    warp.tensor.stores.clear()
