"""What threads have issued to the tensor core, and tcgen05.commit.

Something issued is complete for others when a commit of the thread that issued it has arrived at its mbarrier. Until
then the cells that it writes are in flight and what it reads is held; touching either is a fault.

PTX ISA 9.7.16.12 (commit), 9.7.16.6 (what is ordered).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault, Where
from cakegen.emulator.machine.memory import SHARED_WINDOW, SharedMemory
from cakegen.emulator.machine.operands import locate, read_address, read_lanes, refused
from cakegen.emulator.machine.ports import Issues, Wakes
from cakegen.emulator.machine.warp import Cta, Strand
from cakegen.emulator.order.vector_clock import CLUSTER, CTA, Released
from cakegen.emulator.order.warp_order import WarpOrder
from cakegen.emulator.text.ptx import Instruction
from cakegen.emulator.units.pending import Pending
from cakegen.emulator.units.tcgen05.descriptors import InstructionDescriptor, OperandTable, decode_instruction
from cakegen.emulator.units.tcgen05.tensor_memory import Owner, Region, TensorMemory
from cakegen.emulator.units.tma.copies import require_initialised

Array = NDArray[Any]

Thread = tuple[int, int]


@dataclass(eq=False)
class Issued:
    """An mma or a copy: what it holds until a commit that covers it arrives."""

    owner: Owner
    operands: list[tuple[SharedMemory, Array]]
    writes: list[tuple[TensorMemory, Region]]
    reads: list[tuple[TensorMemory, Region]] = field(default_factory=list)
    retired: bool = False

    def retire(self) -> None:
        """It is complete: nothing is held any more."""
        if self.retired:
            return
        self.retired = True
        for shared, granules in self.operands:
            shared.end_read(granules)
        for memory, region in self.reads:
            memory.reads[region.marks] -= 1
        self.owner.in_flight -= 1
        if not self.owner.in_flight:
            for memory, region in self.writes:
                memory.end_write(region, self.owner)


@dataclass(eq=False)
class IssueQueue:
    """What one thread has issued and no arrival has covered, and its arrivals on their way.

    For the checker of happens-before it is a unit: what a commit covers is complete at the commit's number.

    Parameters
    ----------
    slot
        Of the unit; -1 until it is needed.
    access
        The number of the accesses that the next commit will cover; 0: none yet.
    """

    issued: list[Issued] = field(default_factory=list)
    arrivals: list[CommitArrival] = field(default_factory=list)
    owners: dict[tuple[int, int, int], Owner] = field(default_factory=dict)
    slot: int = -1
    access: int = 0
    commits: int = 0

    def unit(self, thread: WarpOrder | None, cta: int, what: str) -> tuple[int, int]:
        """Slot and time of what is issued now."""
        if thread is not None:
            if self.slot < 0:
                self.slot = thread.clocks.add_unit(cta)
            if not self.access:
                self.access = thread.clocks.begin(thread, what, self.slot, self.commits + 1)
        return self.slot, self.commits + 1

    def hold(self, thread: WarpOrder | None, shared: SharedMemory, granules: Array, what: str) -> None:
        """Something issued reads shared memory, by the asynchronous proxy, until it is complete."""
        shared.begin_read(granules, what)
        if thread is not None:
            thread.clocks.begin_read(thread, self.access, thread.clocks.shadow(shared), granules)


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
        # index of a CTA that issues -> the A that its last mma left in the collector's buffer
        self.collected: dict[int, tuple[int, bool, int, bool, bool] | None] = {}
        self._owners = 0
        self._decoded: dict[tuple[int, int], InstructionDescriptor] = {}

    def queue(self, thread: Thread) -> IssueQueue:
        """The queue of a thread."""
        return self.queues.setdefault(thread, IssueQueue())

    def next_owner(self, instruction: Instruction, thread: Thread) -> Owner:
        """A name for whoever writes cells in flight."""
        self._owners += 1
        return Owner(instruction, thread, self._owners)

    def decode(self, value: int, cta_group: int) -> InstructionDescriptor:
        """An instruction descriptor, decoded once."""
        key = (value, cta_group)
        if key not in self._decoded:
            self._decoded[key] = decode_instruction(value, cta_group)
        return self._decoded[key]


class TensorHost(Issues, Wakes, Protocol):
    """What tcgen05 asks of its launch."""

    @property
    def tensor(self) -> TensorUnit:
        """Its state of the launch."""

    @property
    def elect_salt(self) -> int:
        """Which of the free columns an allocation takes."""

    @property
    def multiply_add(self) -> Callable[[Array, Array, Array], Array]:
        """The tensor core's arithmetic."""

    def note_tensor_work(self, name: str, columns: int) -> None:
        """Something was issued to a CTA's tensor core."""


def cta_group_of(machine: TensorHost, instruction: Instruction) -> int:
    """1 or 2; all tcgen05 instructions of a kernel must agree (PTX ISA 9.7.16.7)."""
    groups = [int(part[-1]) for part in instruction.parts if part in ("cta_group::1", "cta_group::2")]
    if len(groups) != 1:
        raise refused(instruction)
    unit = machine.tensor
    if unit.cta_group not in (0, groups[0]):
        raise Fault("descriptor", "a kernel mixes .cta_group::1 and .cta_group::2")
    unit.cta_group = groups[0]
    return groups[0]


def pair_of(cta: Cta, cta_group: int) -> list[Cta]:
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


@dataclass(eq=False)
class CommitArrival(Pending):
    """The arrival of a commit on its way to one CTA's barrier; earlier ones of the thread come before it there."""

    queue: IssueQueue
    covered: list[Issued]
    cta: Cta
    barrier_offset: int
    what: str
    time: int
    released: Released | None
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
        for each in self.covered:
            each.retire()
        self.queue.issued = [each for each in self.queue.issued if not each.retired]
        self.cta.landings -= 1
        order = self.cta.barrier_at(self.barrier_offset).order
        if order is not None and self.queue.slot >= 0:
            # as of a copy: who waits for the barrier learns it, whatever its scope
            order.arrivals.land(self.queue.slot, self.time, self.cta.position, CTA)
        self.cta.arrive(self.barrier_offset, 1, released=self.released)


def run_commit(machine: TensorHost, strand: Strand, instruction: Instruction, active: Array, where: Where) -> None:
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
    thread = strand.warp.at(strand.pc - 1, active)
    for lane in np.flatnonzero(active):
        address = int(addresses[lane]) if narrow else _in_window(machine, int(addresses[lane]))
        cta, offset = locate(strand, address, True)
        targets = [cta]
        if masks is not None:
            targets = [strand.warp.cta.peer(rank) for rank in range(16) if int(masks[lane]) >> rank & 1]
        queue = machine.tensor.queue((strand.warp.number, int(lane)))
        covered = list(queue.issued)
        queue.commits, queue.access = queue.commits + 1, 0
        released = None if thread is None else thread.released(CLUSTER)
        what = "the arrival of a tcgen05.commit"
        for target in targets:
            require_initialised(thread, target.barrier_at(offset))
            arrival = CommitArrival(queue, covered, target, offset, what, queue.commits, released, where)
            target.landings += 1
            queue.arrivals.append(arrival)
            machine.issue(arrival)


def _in_window(machine: TensorHost, generic: int) -> int:
    """The shared address that a generic one names; published kernels pass a shared one, and a device takes it."""
    if generic < SHARED_WINDOW:
        if machine.tensor.strict:
            raise Fault(
                "out-of-bounds",
                f"tcgen05.commit without .shared::cluster takes a generic address; {generic:#x} is none of shared "
                "memory (a shared::cta address would look like this)",
            )
        return generic
    return generic - SHARED_WINDOW


def uncommitted(unit: TensorUnit, memory: TensorMemory) -> Issued | None:
    """Something that writes a tensor memory and that no arrival has covered."""
    for queue in unit.queues.values():
        for each in queue.issued:
            if any(written is memory for written, _ in each.writes):
                return each
    return None
