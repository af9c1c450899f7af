"""tcgen05.mma.

The accumulator is in flight from issue until a commit covers it, for all but the mmas that the ISA orders behind, and
the operands are held. The sum itself is done at issue: with everything held, no legal moment gives another result.

PTX ISA 9.7.16.10; what is ordered: 9.7.16.6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.operands import read_address, read_lanes, refused
from cakegen.emulator.machine.warp import Strand
from cakegen.emulator.text.ptx import Address, Immediate, Instruction, Negated, Operand, Register, Vector
from cakegen.emulator.units.tcgen05.descriptors import InstructionDescriptor, check_reach
from cakegen.emulator.units.tcgen05.issue import Issued, TensorHost, cta_group_of, pair_of
from cakegen.emulator.units.tcgen05.tensor_memory import GROUP_LANES, LANES, Region, TensorMemory, split_address
from cakegen.emulator.units.tensor_core import bf16_to_f32
from cakegen.errors import EmulationError

Array = NDArray[Any]

_SIGN = np.uint16(0x8000)
# What an mma does with the buffer that can keep A for the next one (PTX ISA 9.7.16.10.9.1); without one, `discard`
_COLLECTORS = {f"collector::a::{use}": use for use in ("fill", "use", "lastuse", "discard")}


def accumulator_region(address: int, m: int, n: int, cta_group: int) -> Region:
    """Where D lies in each CTA (PTX ISA 9.7.16.10.5, layouts A, B, D and F).

    Raises
    ------
    Fault
        The address names a lane where no accumulator of this height starts.
    """
    lane, column = split_address(address)
    half_height = m == 64
    if lane not in ((0, GROUP_LANES) if half_height else (0,)):
        raise Fault(
            "descriptor",
            f"tcgen05.mma with M {m}: its accumulator starts at lane {lane}; "
            f"{'0 or 16 is' if half_height else 'only 0 is'} legal",
        )
    columns = slice(column, column + (n // 2 if cta_group == 2 and m == LANES else n))
    return Region(slice(lane // GROUP_LANES, 8, 2) if half_height else slice(0, 8), columns)


def _to_matrix(cells: Array, m: int, cta_group: int) -> Array:
    """`[groups, 16, columns]` cells -> the CTA's rows of D as fp32."""
    flat = np.ascontiguousarray(cells).view(np.float32).reshape(-1, cells.shape[2])
    if cta_group == 2 and m == LANES:
        return np.concatenate([flat[:64], flat[64:]], axis=1)
    return flat


def _to_cells(matrix: Array, m: int, cta_group: int) -> Array:
    """The inverse of `_to_matrix`."""
    if cta_group == 2 and m == LANES:
        half = matrix.shape[1] // 2
        matrix = np.concatenate([matrix[:, :half], matrix[:, half:]], axis=0)
    return np.ascontiguousarray(matrix).reshape(-1, GROUP_LANES, matrix.shape[1])


@dataclass(frozen=True)
class _Operands:
    """The operands of one mma as its thread gave them."""

    d: int
    a: int
    a_in_tensor_memory: bool
    b: int
    descriptor: InstructionDescriptor
    accumulate: bool
    scale_exponent: int
    skipped_lanes: tuple[Array, ...]


def run_mma(machine: TensorHost, strand: Strand, instruction: Instruction, active: Array) -> None:
    """`tcgen05.mma`: every active thread issues a whole one."""
    group = cta_group_of(machine, instruction)
    modifiers = set(instruction.parts[2:]) - {f"cta_group::{group}", "kind::f16"} - _COLLECTORS.keys()
    uses = [_COLLECTORS[part] for part in instruction.parts if part in _COLLECTORS]
    if modifiers or "kind::f16" not in instruction.parts or len(uses) > 1:
        raise refused(instruction)
    for lane in np.flatnonzero(active):
        operands = _read_operands(machine, strand, instruction, int(lane), group)
        _collect(machine, strand, operands, uses[0] if uses else "discard")
        _Mma(machine, strand, int(lane), instruction, operands, group).issue()


def _collect(machine: TensorHost, strand: Strand, operands: _Operands, use: str) -> None:
    """A that comes from the collector's buffer must be what an mma before has filled it with."""
    shape, cta, kept = operands.descriptor, strand.warp.cta.index, machine.tensor.collected
    a = (operands.a, operands.a_in_tensor_memory, shape.m, shape.a_across, shape.a_half)
    if use in ("use", "lastuse") and kept.get(cta) != a:
        raise Fault(
            "descriptor",
            f"tcgen05.mma with .collector::a::{use}, and the mma before of CTA {cta} did not keep this A: needs "
            ".collector::a::fill or ::use there, with the same A",
        )
    kept[cta] = a if use in ("fill", "use") else None


def _read_operands(machine: TensorHost, strand: Strand, instruction: Instruction, lane: int, group: int) -> _Operands:
    target, a, b, idesc, *rest = instruction.operands
    in_tensor_memory = isinstance(a, Address)
    mask = rest[0] if isinstance(rest[0], Vector) else None
    rest = rest[1:] if mask else rest
    scale = rest[1].value if len(rest) == 2 and isinstance(rest[1], Immediate) else 0
    skipped = () if mask is None else _skipped_lanes(strand, mask, lane, group, instruction)
    return _Operands(
        int(read_address(strand, target, "u4")[lane]),
        int(read_address(strand, a, "u4")[lane] if in_tensor_memory else read_lanes(strand, a, "u8")[lane]),
        in_tensor_memory,
        int(read_lanes(strand, b, "u8")[lane]),
        machine.tensor.decode(int(read_lanes(strand, idesc, "u4")[lane]), group),
        _predicate(strand, rest[0], lane),
        scale,
        skipped,
    )


def _predicate(strand: Strand, operand: Operand, lane: int) -> bool:
    if isinstance(operand, Immediate):
        return operand.value != 0
    negated = isinstance(operand, Negated)
    register = operand.register if isinstance(operand, Negated) else operand
    assert isinstance(register, Register)
    return bool(strand.warp.registers[register.index][lane]) != negated


def _skipped_lanes(
    strand: Strand, mask: Vector, lane: int, cta_group: int, instruction: Instruction
) -> tuple[Array, ...]:
    """A mask `[8, 16]` a CTA of lanes that are not written; empty where all are."""
    words = np.array([read_lanes(strand, item, "u4")[lane] for item in mask.items], np.uint32)
    if len(words) != 4 * cta_group:
        raise Fault("descriptor", f"a mask of {len(words)} words with cta_group::{cta_group}; needs {4 * cta_group}")
    if not words.any():
        return ()
    if cta_group == 2 and (words[:4] != words[4:]).any():
        raise EmulationError(f"{instruction.place}: masks that differ between the CTAs of a pair are not modelled")
    bits = words[:4, None] >> np.arange(32, dtype=np.uint32) & np.uint32(1)
    return (bits.reshape(8, GROUP_LANES) != 0,) * cta_group


def _single(bits: Array, half: bool) -> Array:
    """The fp32 values of f16 or bf16 bits."""
    return bits.view(np.float16).astype(np.float32) if half else bf16_to_f32(bits)


class _Mma:
    """One mma as it is issued, by one thread, for its CTA or its pair."""

    def __init__(
        self,
        machine: TensorHost,
        strand: Strand,
        lane: int,
        instruction: Instruction,
        operands: _Operands,
        cta_group: int,
    ) -> None:
        shape = operands.descriptor
        self._machine, self._unit, self._warp = machine, machine.tensor, strand.warp
        self._operands, self._shape, self._cta_group = operands, shape, cta_group
        self._pair = pair_of(strand.warp.cta, cta_group)
        self._region = accumulator_region(operands.d, shape.m, shape.n, cta_group)
        thread = (strand.warp.number, lane)
        self._queue = self._unit.queue(thread)
        key = (operands.d, shape.m, shape.n)
        owner = self._queue.owners.get(key)
        if owner is None or not owner.in_flight:
            owner = self._queue.owners[key] = self._unit.next_owner(instruction, thread)
        clock = strand.warp.at(strand.pc - 1, np.arange(32) == lane)
        self._stamp = self._queue.unit(clock, strand.warp.cta.index, "tcgen05.mma")
        self._issued = Issued(owner, [], [(cta.tensor_memory, self._region) for cta in self._pair])

    def issue(self) -> None:
        """Claim D, hold the operands, and add up."""
        shape, operands = self._shape, self._operands
        for cta in self._pair:
            self._claim(cta.tensor_memory)
        if operands.a_in_tensor_memory:
            a_bits = [self._read_a(cta.tensor_memory) for cta in self._pair]
        else:
            a_bits = self._gather("a", operands.a, shape.m, shape.a_across, shape.a_negated)
        b_bits = self._gather("b", operands.b, shape.n, shape.b_across, shape.b_negated)
        b_all = b_bits[0] if self._cta_group == 1 else np.concatenate(b_bits)
        if shape.a_half or shape.b_half:
            a_bits = [_single(bits, shape.a_half) for bits in a_bits]
            b_all = _single(b_all, shape.b_half)
        for number, cta in enumerate(self._pair):
            skipped = operands.skipped_lanes[number] if operands.skipped_lanes else None
            self._accumulate(cta.tensor_memory, a_bits[number], b_all, skipped)
        self._machine.note_tensor_work(f"m{shape.m}n{shape.n}k16", shape.n)
        self._issued.owner.in_flight += 1
        self._queue.issued.append(self._issued)

    def _claim(self, memory: TensorMemory) -> None:
        """Check that D is free, and mark it."""
        region, owner, strict = self._region, self._issued.owner, self._unit.strict
        memory.check_allocated(region, "tcgen05.mma")
        if strict and self._warp.tensor.unfenced:
            raise Fault(
                "fence", "tcgen05.mma behind a wait, and no tcgen05.fence::after_thread_sync between (a strict order)"
            )
        memory.refuse_writers(region, "tcgen05.mma", owner, same_thread=not strict)
        memory.refuse_readers(region, "tcgen05.mma")
        memory.hand_over(region, self._warp, "tcgen05.mma", self._stamp)
        if self._operands.accumulate:
            memory.require_written(region, "tcgen05.mma with enable-input-d")
        memory.begin_write(region, owner)

    def _read_a(self, memory: TensorMemory) -> Array:
        """A from tensor memory: row m in the lane where D has it, two elements of K a column, the even one lowest.

        A pair with M = 128 needs its 64 rows twice, in the lower and in the upper 64 lanes (PTX ISA 9.7.16.10.5).
        """
        shape, what = self._shape, "tcgen05.mma (A)"
        lane, column = split_address(self._operands.a)
        if shape.a_across or lane != split_address(self._operands.d)[0]:
            raise Fault("descriptor", f"A in tensor memory at lane {lane}: needs K-major elements, and the lane of D")
        region = Region(self._region.groups, slice(column, column + 8))
        memory.check_allocated(region, what)
        earlier = memory.writer_in(region)
        if earlier is not None and (earlier.thread != self._issued.owner.thread or not earlier.is_copy):
            memory.refuse_writers(region, what)
        memory.hand_over(region, self._warp, what, self._stamp)
        memory.require_written(region, what)
        memory.reads[region.marks] += 1
        self._issued.reads.append((memory, region))
        words = np.ascontiguousarray(memory.load(region)).reshape(-1, 8)
        if self._cta_group == 2 and shape.m == LANES:
            if (words[:64] != words[64:]).any():
                raise Fault("descriptor", "A of a pair with M 128 differs between the lower and the upper 64 lanes")
            words = words[:64]
        bits = words.view(np.uint16)
        return bits ^ _SIGN if shape.a_negated else bits

    def _gather(self, name: str, descriptor: int, rows: int, across: bool, negated: bool) -> list[Array]:
        """An operand's bits `[rows of a CTA, 16]` from each CTA's shared memory, at one descriptor."""
        elements, granules = self._unit.table.operand(descriptor, across, rows // self._cta_group, name)
        found = []
        for cta in self._pair:
            check_reach(granules, cta.shared.num_bytes, name)
            self._queue.hold(self._warp.thread, cta.shared, granules, "tcgen05.mma")
            self._issued.operands.append((cta.shared, granules))
            bits = cta.shared.data.view(np.uint16)[elements]
            found.append(bits ^ _SIGN if negated else bits)
        return found

    def _accumulate(self, memory: TensorMemory, a_bits: Array, b_bits: Array, skipped: Array | None) -> None:
        m, region, group = self._shape.m, self._region, self._cta_group
        if self._operands.accumulate:
            sums = _to_matrix(memory.load(region), m, group)
            if self._operands.scale_exponent:
                sums = sums * np.float32(2.0**-self._operands.scale_exponent)
        else:
            sums = np.zeros((a_bits.shape[0], b_bits.shape[0]), np.float32)
        cells = _to_cells(self._machine.multiply_add(a_bits, b_bits, sums), m, group)
        if skipped is None:
            memory.store(region, cells)
            return
        kept = np.broadcast_to(skipped[region.groups][:, :, None], cells.shape)
        written = memory.written[region.cells] | ~kept
        memory.store(region, np.where(kept, memory.load(region), cells.view(np.uint32)))
        memory.written[region.cells] = written
