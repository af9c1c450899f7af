"""tcgen05.mma and tcgen05.commit. Imports tensor_memory, tensor_descriptors, copies, operands.

An mma is complete for others when a commit of the thread that issued it has arrived at its mbarrier. Until then its
accumulator is in flight (touching it is a fault, but for the mmas that the ISA orders behind it) and its operands in
shared memory are held. The sum itself is done at issue: with everything held, no legal moment gives another result.

PTX ISA 9.7.16.10 (mma), 9.7.16.12 (commit), 9.7.16.6 (what is ordered).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.copies import Pending, barrier_at
from cakegen.emulator.faults import Fault, Where
from cakegen.emulator.memory import SHARED_WINDOW
from cakegen.emulator.operands import locate, read_address, read_lanes, refused
from cakegen.emulator.ptx import Address, Immediate, Instruction, Negated, Operand, Register, Vector
from cakegen.emulator.tensor_descriptors import (
    InstructionDescriptor,
    OperandTable,
    check_reach,
    decode_instruction,
)
from cakegen.emulator.tensor_memory import GROUP_LANES, LANES, Owner, Region, TensorMemory, split_address
from cakegen.errors import EmulationError

if TYPE_CHECKING:
    from cakegen.emulator.machine import Machine
    from cakegen.emulator.memory import SharedMemory
    from cakegen.emulator.warp import Cta, Strand, Warp

Array = NDArray[Any]

Thread = tuple[int, int]
_SIGN = np.uint16(0x8000)
_COLLECTORS = {f"collector::a::{use}" for use in ("fill", "use", "lastuse", "discard")}


@dataclass(eq=False)
class Mma:
    """One issued mma: what it holds until a commit that covers it arrives."""

    owner: Owner
    operands: list[tuple[SharedMemory, Array]]
    accumulators: list[tuple[TensorMemory, Region]]
    retired: bool = False

    def retire(self) -> None:
        """It is complete: nothing is held any more."""
        if self.retired:
            return
        self.retired = True
        for shared, granules in self.operands:
            shared.end_read(granules)
        self.owner.in_flight -= 1
        if not self.owner.in_flight:
            for memory, region in self.accumulators:
                memory.end_write(region, self.owner)


@dataclass(eq=False)
class IssueQueue:
    """What one thread has issued and no arrival has covered, and its arrivals on their way."""

    mmas: list[Mma] = field(default_factory=list)
    arrivals: list[CommitArrival] = field(default_factory=list)
    owners: dict[tuple[int, ...], Owner] = field(default_factory=dict)


class TensorUnit:
    """tcgen05 state of a launch.

    Parameters
    ----------
    strict
        Only what PTX ISA 9.7.16.6.2 lists is ordered; else all mmas of one thread are, as programs widely assume.
    """

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.table = OperandTable()
        self.queues: dict[Thread, IssueQueue] = {}
        self.cta_group = 0
        self._owners = 0
        self._decoded: dict[tuple[int, int], InstructionDescriptor] = {}

    def queue(self, thread: Thread) -> IssueQueue:
        """The queue of a thread."""
        return self.queues.setdefault(thread, IssueQueue())

    def new_owner(self, instruction: Instruction, thread: Thread) -> Owner:
        """A name for whoever writes cells in flight."""
        self._owners += 1
        return Owner(instruction, thread, self._owners)

    def decode(self, value: int, cta_group: int) -> InstructionDescriptor:
        """An instruction descriptor, decoded once."""
        key = (value, cta_group)
        if key not in self._decoded:
            self._decoded[key] = decode_instruction(value, cta_group)
        return self._decoded[key]


def cta_group_of(machine: Machine, instruction: Instruction) -> int:
    """1 or 2; all tcgen05 instructions of a kernel must agree (PTX ISA 9.7.16.7)."""
    groups = [int(part[-1]) for part in instruction.parts if part in ("cta_group::1", "cta_group::2")]
    if len(groups) != 1:
        raise refused(instruction)
    unit = machine.tensor
    if unit.cta_group not in (0, groups[0]):
        raise Fault("descriptor", "a kernel mixes .cta_group::1 and .cta_group::2")
    unit.cta_group = groups[0]
    return groups[0]


def _pair(cta: Cta, cta_group: int) -> list[Cta]:
    """The CTAs that an mma works for: itself, or the pair, the one with the even rank first."""
    if cta_group == 1:
        return [cta]
    even = cta.shared.rank & ~1
    if even + 1 >= len(cta.cluster.ctas):
        raise Fault("tensor-memory", f"cta_group::2 in CTA rank {cta.shared.rank}, which has no pair in its cluster")
    pair = [cta.peer(even), cta.peer(even + 1)]
    for each in pair:
        if each.shared.exited:
            raise Fault("exit", f"cta_group::2 needs CTA {each.index}, which has exited")
    return pair


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
    b: int
    descriptor: InstructionDescriptor
    accumulate: bool
    scale_exponent: int
    skipped_lanes: tuple[Array, ...]


def run_mma(machine: Machine, strand: Strand, instruction: Instruction, active: Array) -> None:
    """`tcgen05.mma`: every active thread issues a whole one."""
    group = cta_group_of(machine, instruction)
    modifiers = set(instruction.parts[2:]) - {f"cta_group::{group}", "kind::f16"} - _COLLECTORS
    if modifiers or "kind::f16" not in instruction.parts or isinstance(instruction.operands[1], Address):
        raise refused(instruction)
    for lane in np.flatnonzero(active):
        operands = _read_operands(machine, strand, instruction, int(lane), group)
        _issue(machine, strand.warp, int(lane), instruction, operands, group)


def _read_operands(machine: Machine, strand: Strand, instruction: Instruction, lane: int, group: int) -> _Operands:
    target, a, b, idesc, *rest = instruction.operands
    mask = rest[0] if isinstance(rest[0], Vector) else None
    rest = rest[1:] if mask else rest
    scale = rest[1].value if len(rest) == 2 and isinstance(rest[1], Immediate) else 0
    skipped = () if mask is None else _skipped_lanes(strand, mask, lane, group, instruction)
    return _Operands(
        int(read_address(strand, target, "u4")[lane]),
        int(read_lanes(strand, a, "u8")[lane]),
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


def _issue(
    machine: Machine, warp: Warp, lane: int, instruction: Instruction, operands: _Operands, cta_group: int
) -> None:
    unit, thread = machine.tensor, (warp.number, lane)
    queue, shape = unit.queue(thread), operands.descriptor
    pair = _pair(warp.cta, cta_group)
    region = accumulator_region(operands.d, shape.m, shape.n, cta_group)
    key = (operands.d, shape.m, shape.n)
    owner = queue.owners.get(key)
    if owner is None or not owner.in_flight:
        owner = queue.owners[key] = unit.new_owner(instruction, thread)
    for cta in pair:
        _claim(cta.tensor_memory, region, warp, owner, unit.strict, operands.accumulate)
    a_bits, a_held = _gather(unit, pair, operands.a, shape.a_across, shape.m // cta_group, "a", shape.a_negated)
    b_bits, b_held = _gather(unit, pair, operands.b, shape.b_across, shape.n // cta_group, "b", shape.b_negated)
    b_all = b_bits[0] if cta_group == 1 else np.concatenate(b_bits)
    for number, cta in enumerate(pair):
        skipped = operands.skipped_lanes[number] if operands.skipped_lanes else None
        _accumulate(machine, cta.tensor_memory, region, a_bits[number], b_all, operands, cta_group, skipped)
    owner.in_flight += 1
    queue.mmas.append(Mma(owner, a_held + b_held, [(cta.tensor_memory, region) for cta in pair]))


def _claim(memory: TensorMemory, region: Region, warp: Warp, owner: Owner, strict: bool, reads_d: bool) -> None:
    """Check that D is free for this mma, and mark it."""
    memory.check_allocated(region, "tcgen05.mma")
    if strict and warp.tensor.unfenced:
        raise Fault(
            "fence", "tcgen05.mma after a wait, and no tcgen05.fence::after_thread_sync between (practice mode allows)"
        )
    memory.refuse_writers(region, "tcgen05.mma", owner, same_thread=not strict)
    memory.refuse_readers(region, "tcgen05.mma")
    memory.hand_over(region, warp, "tcgen05.mma", committed=True)
    if reads_d:
        memory.require_written(region, "tcgen05.mma with enable-input-d")
    memory.begin_write(region, owner)


def _gather(
    unit: TensorUnit, pair: list[Cta], value: int, across: bool, rows: int, name: str, negated: bool
) -> tuple[list[Array], list[tuple[SharedMemory, Array]]]:
    """An operand's bits `[rows, 16]` from each CTA's shared memory, at one descriptor; and what they hold."""
    elements, granules = unit.table.operand(value, across, rows, name)
    found, held = [], []
    for cta in pair:
        check_reach(granules, cta.shared.num_bytes, name)
        cta.shared.begin_read(granules, "tcgen05.mma")
        bits = cta.shared.data.view(np.uint16)[elements]
        found.append(bits ^ _SIGN if negated else bits)
        held.append((cta.shared, granules))
    return found, held


def _accumulate(
    machine: Machine,
    memory: TensorMemory,
    region: Region,
    a_bits: Array,
    b_bits: Array,
    operands: _Operands,
    cta_group: int,
    skipped: Array | None,
) -> None:
    m = operands.descriptor.m
    if operands.accumulate:
        sums = _to_matrix(memory.load(region), m, cta_group)
        if operands.scale_exponent:
            sums = sums * np.float32(2.0**-operands.scale_exponent)
    else:
        sums = np.zeros((a_bits.shape[0], b_bits.shape[0]), np.float32)
    cells = _to_cells(machine.multiply_add(a_bits, b_bits, sums), m, cta_group)
    if skipped is None:
        memory.store(region, cells)
        return
    kept = np.broadcast_to(skipped[region.groups][:, :, None], cells.shape)
    written = memory.written[region.cells] | ~kept
    memory.store(region, np.where(kept, memory.load(region), cells.view(np.uint32)))
    memory.written[region.cells] = written


# ---- commit ----


@dataclass(eq=False)
class CommitArrival(Pending):
    """The arrival of a commit on its way to one CTA's barrier; earlier ones of the thread come before it there."""

    queue: IssueQueue
    covered: list[Mma]
    cta: Cta
    barrier_offset: int
    what: str
    where: Where | None = None

    def complete(self) -> None:
        """Arrive, after the earlier ones of the thread at this CTA."""
        if self not in self.queue.arrivals:
            return
        for each in [arrival for arrival in self.queue.arrivals if arrival.cta is self.cta]:
            self.queue.arrivals.remove(each)
            each._arrive()
            if each is self:
                break

    def _arrive(self) -> None:
        for mma in self.covered:
            mma.retire()
        self.queue.mmas = [mma for mma in self.queue.mmas if not mma.retired]
        self.cta.landings -= 1
        self.cta.arrive(self.barrier_offset, 1)


def run_commit(machine: Machine, strand: Strand, instruction: Instruction, active: Array, where: Where) -> None:
    """`tcgen05.commit`: covers what the executing thread has issued, and nothing else."""
    group = cta_group_of(machine, instruction)
    parts = set(instruction.parts[2:])
    multicast = "multicast::cluster" in parts
    known = {f"cta_group::{group}", "mbarrier::arrive::one", "b64", "shared::cluster", "multicast::cluster"}
    if parts - known or not {"mbarrier::arrive::one", "b64"} <= parts:
        raise refused(instruction)
    narrow = "shared::cluster" in parts
    addresses = read_address(strand, instruction.operands[0], "u4" if narrow else "u8")
    masks = read_lanes(strand, instruction.operands[1], "u2") if multicast else None
    for lane in np.flatnonzero(active):
        address = int(addresses[lane]) - (0 if narrow else SHARED_WINDOW)
        cta, offset = locate(strand, address, True)
        targets = [cta]
        if masks is not None:
            targets = [strand.warp.cta.peer(rank) for rank in range(16) if int(masks[lane]) >> rank & 1]
        queue = machine.tensor.queue((strand.warp.number, int(lane)))
        covered = list(queue.mmas)
        for target in targets:
            barrier_at(target, offset)
            arrival = CommitArrival(queue, covered, target, offset, "the arrival of a tcgen05.commit", where)
            target.landings += 1
            queue.arrivals.append(arrival)
            machine.issue(arrival)


def uncommitted(unit: TensorUnit, memory: TensorMemory) -> Mma | None:
    """An mma into a tensor memory that no arrival has covered."""
    for queue in unit.queues.values():
        for mma in queue.mmas:
            if any(each is memory for each, _ in mma.accumulators):
                return mma
    return None
