"""Warps, CTAs and clusters as state.

A warp's lanes run in strands: lanes at one instruction. Strands that meet become one again; the one that is furthest
behind runs first, so that lanes reconverge where their paths do. An instruction that wants the whole warp waits for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault, Where, lanes_text
from cakegen.emulator.machine.adversary import MAX_WARPS
from cakegen.emulator.machine.memory import SHARED_START, GlobalMemory, SharedMemory
from cakegen.emulator.machine.ports import WarpHost
from cakegen.emulator.machine.special_registers import ThreadPlace, read_special
from cakegen.emulator.order.vector_clock import Position, Released
from cakegen.emulator.order.warp_order import WarpOrder
from cakegen.emulator.units.barriers import BarrierOrder, CountedBarrier, MBarrier
from cakegen.emulator.units.copy_groups import CopyQueue
from cakegen.emulator.units.pending import Pending
from cakegen.emulator.units.tcgen05.tensor_memory import TensorMemory, TensorTraffic
from cakegen.emulator.units.tma.bulk_groups import BulkQueue
from cakegen.emulator.units.wgmma.issue import WgmmaUnit

Lanes = NDArray[Any]
_ALL = b"\x01" * 32
_POISON = 0xA5


@dataclass(eq=False)
class Strand:
    """Lanes of a warp at one instruction. `waits_for` is what keeps them from going on."""

    warp: Warp
    mask: NDArray[np.bool_]
    pc: int
    waits_for: object = None
    last_poll: tuple[int, int, bytes] | None = None

    @property
    def whole(self) -> bool:
        """All 32 lanes."""
        # for 32 lanes, bytes compare ten times as fast as numpy reduces
        return self.mask.tobytes() == _ALL

    def lanes(self) -> str:
        """Its lanes in words."""
        return _lanes_of(self.mask.tobytes())


@functools.lru_cache(maxsize=1024)
def _lanes_of(mask: bytes) -> str:
    return lanes_text([lane for lane, is_active in enumerate(mask) if is_active])


class Warp:
    """One warp: registers of 32 lanes, and its strands."""

    def __init__(self, machine: WarpHost, cta: Cta, index: int, registers: list[Any], mask: NDArray[np.bool_]) -> None:
        self.machine = machine
        self.memory: GlobalMemory = machine.memory
        self.cta = cta
        self.index = index
        self.registers = registers
        self.strands = [Strand(self, mask, 0)]
        self.wgmma = WgmmaUnit(self, machine)
        self.tensor = TensorTraffic()
        self.bulk: dict[int, BulkQueue] = {}
        self.copies = CopyQueue(cta)
        self.number = cta.index * MAX_WARPS + index
        self.queued = False
        self.remote_arrivals: list[RemoteArrival] = []
        self.cluster_ticket = -1
        self.thread: WarpOrder | None = None
        self._specials: dict[str, Lanes] = {}

    @functools.cached_property
    def local(self) -> NDArray[np.uint8]:
        """Its lanes' own memory: `[32, bytes]`, poison at first."""
        return np.full((32, self.machine.kernel.local_bytes), _POISON, np.uint8)

    @property
    def done(self) -> bool:
        """All lanes have exited."""
        return not self.strands

    def at(self, index: int, lanes: NDArray[np.bool_] | None, strong: int = -1) -> WarpOrder | None:
        """Its thread, about to touch memory; None where the order of accesses is not checked."""
        return None if self.thread is None else self.thread.at(index, lanes, strong)

    def sync_lanes(self, lanes: NDArray[np.bool_] | None) -> None:
        """`bar.warp.sync`."""
        if self.thread is not None:
            self.thread.sync_lanes(lanes)

    def release(self) -> None:
        """What was sent to other CTAs arrives before what is released now."""
        if self.remote_arrivals:
            self.remote_arrivals[-1].complete()

    def live_lanes(self) -> NDArray[np.bool_]:
        """Lanes that have not exited."""
        mask = np.zeros(32, np.bool_)
        for strand in self.strands:
            mask |= strand.mask
        return mask

    def merge(self) -> None:
        """Join strands that stand at one instruction and wait for nothing."""
        if len(self.strands) < 2:
            return
        at: dict[int, Strand] = {}
        kept = []
        for strand in self.strands:
            other = at.get(strand.pc) if strand.waits_for is None else None
            if other is not None:
                other.mask = other.mask | strand.mask
                other.last_poll = None
                continue
            if strand.waits_for is None:
                at[strand.pc] = strand
            kept.append(strand)
        self.strands = kept

    def special(self, name: str) -> Lanes:
        """A special register, as u32."""
        if name not in self._specials:
            self._specials[name] = read_special(name, self._place())
        return self._specials[name]

    def _place(self) -> ThreadPlace:
        machine, cta = self.machine, self.cta
        end = cta.shared.num_bytes
        return ThreadPlace(
            target=machine.kernel.target,
            grid=machine.grid,
            block=machine.block,
            cluster=machine.cluster,
            warp=self.index,
            cta=cta.index,
            coordinates=cta.coordinates,
            cluster_coordinates=cta.cluster_coordinates,
            rank=cta.shared.rank,
            dynamic_bytes=end - machine.dynamic_start,
            shared_bytes=end,
        )

    def clock(self) -> Lanes:
        """`%globaltimer` and `%clock64`: the machine's modelled time in ns."""
        return np.full(32, self.machine.read_clock(), np.uint64)

    def symbol(self, name: str) -> Lanes:
        """Address of a variable: in global memory, or in the shared window with the CTA's rank."""
        address = self.machine.variables.get(name)
        if address is not None:
            return np.full(32, address, np.uint64)
        offset = self.machine.shared_symbols[name]
        return np.full(32, offset | self.cta.shared.rank << 24, np.uint32)

    def parameter(self, offset: int, kind: str) -> Lanes:
        """A kernel parameter."""
        return self.machine.parameter(offset, kind)


@dataclass(eq=False)
class Cta:
    """One CTA: its shared memory, barriers and warps."""

    index: int
    coordinates: tuple[int, int, int]
    cluster_coordinates: tuple[int, int, int]
    cluster: Cluster
    shared: SharedMemory
    machine: WarpHost
    position: Position
    warps: list[Warp] = field(default_factory=list)
    named: dict[int, CountedBarrier] = field(default_factory=dict)
    landings: int = 0
    launches_refused: bool = False
    _groups: dict[tuple[int, int], tuple[Any, int]] = field(default_factory=dict)

    @functools.cached_property
    def tensor_memory(self) -> TensorMemory:
        """Its tensor memory, made when it is first used."""
        return TensorMemory()

    def peer(self, rank: int) -> Cta:
        """A CTA of the cluster by its rank."""
        if rank >= len(self.cluster.ctas):
            raise Fault("out-of-bounds", f"cluster rank {rank}; the cluster has {len(self.cluster.ctas)} CTAs")
        return self.cluster.ctas[rank]

    def live_warps(self) -> list[Warp]:
        """Warps with lanes that have not exited."""
        return [warp for warp in self.warps if not warp.done]

    def barrier_at(self, offset: int) -> MBarrier:
        """The mbarrier at a shared offset.

        Raises
        ------
        Fault
            None lives there.
        """
        barrier = self.shared.barriers.get(offset)
        if barrier is None:
            raise Fault("barrier", f"no mbarrier lives at {self.barrier_name(offset)}")
        return barrier

    def barrier_name(self, offset: int) -> str:
        """`stage_full[2]` where the program's record names it, else its offset."""
        relative = offset - self.machine.dynamic_start
        name = self.machine.barrier_names.get(relative)
        return name if name else f"shared offset {offset - SHARED_START}"

    def place(self, offset: int) -> str:
        """What an offset of its shared memory is called."""
        return f"shared offset {offset - SHARED_START} of CTA {self.index}"

    def init_barrier(self, offset: int, count: int, thread: WarpOrder | None) -> None:
        """`mbarrier.init` by a thread."""
        if offset in self.shared.barriers:
            raise Fault("barrier", f"{self.shared.barriers[offset]} is initialised again while it lives")
        self.shared.offsets(np.array([offset], np.uint32), 8, "mbarrier.init")
        barrier = self.shared.barriers[offset] = MBarrier(self.barrier_name(offset), count)
        if thread is not None:
            slot = thread.clocks.add_unit(self.index)
            barrier.order = BarrierOrder(slot, (thread.slot, thread.now), thread.lanes)
        self.shared.valid[offset : offset + 8] = 0

    def arrive(self, offset: int, count: int, tx_bytes: int = 0, released: Released | None = None) -> None:
        """`mbarrier.arrive`, after expecting bytes; `released` reaches those who wait, who are threads of this CTA."""
        self._refuse_exited()
        barrier = self.barrier_at(offset)
        if released is not None and barrier.order is not None:
            barrier.order.arrivals.release(released.clock, released.position, released.scope, self.position)
        if barrier.arrive(count, tx_bytes):
            self.machine.wake(barrier.waiters)

    def expect_bytes(self, offset: int, num_bytes: int) -> None:
        """Bytes will land."""
        barrier = self.barrier_at(offset)
        if barrier.expect_bytes(num_bytes):
            self.machine.wake(barrier.waiters)

    def complete_bytes(self, offset: int, num_bytes: int) -> None:
        """Bytes have landed."""
        self._refuse_exited()
        barrier = self.barrier_at(offset)
        if barrier.complete_bytes(num_bytes):
            self.machine.wake(barrier.waiters)

    def _refuse_exited(self) -> None:
        if self.shared.exited:
            raise Fault("exit", f"an arrival at a barrier of CTA {self.index}, which has exited")

    @property
    def partial_warpgroups(self) -> list[tuple[int, int]]:
        """(warpgroup, number of the wgmma) of those that some of its four warps have not issued."""
        return list(self._groups)

    def match_warpgroup(self, warp: int, number: int, what: Sequence[Any]) -> None:
        """The four warps of a warpgroup must issue the same wgmmas, from that number on, with the same descriptors."""
        key = (warp // 4, number)
        first, count = self._groups.get(key, (what, 0))
        if first is not what and first != what:
            pairs = enumerate(zip(first, what, strict=False))
            at = next((at for at, (other, mine) in pairs if other != mine), min(len(first), len(what)) - 1)
            other, mine = first[at], what[at]
            raise Fault(
                "descriptor",
                f"wgmma number {number + at} of warp {warp} is at PTX line {mine[0]} with operands {mine[1:]}; "
                f"another warp of its warpgroup issued line {other[0]} with {other[1:]}",
            )
        self._groups[key] = (first, count + 1)
        if count == 3:
            del self._groups[key]


@dataclass(eq=False)
class Cluster:
    """CTAs that are resident together, and their barrier."""

    ctas: list[Cta] = field(default_factory=list)
    barrier: CountedBarrier = field(default_factory=lambda: CountedBarrier("barrier.cluster"))

    def live_warps(self) -> list[Warp]:
        """Warps of all CTAs with lanes that have not exited."""
        return [warp for cta in self.ctas for warp in cta.live_warps()]


@dataclass(eq=False)
class RemoteArrival(Pending):
    """An arrival at a barrier, which may be on its way to another CTA.

    It is a release by its thread: earlier ones of the warp arrive before it, and whatever the warp releases later (an
    arrival, a barrier, an atomic) comes after it (PTX ISA 8.8).
    """

    sender: Warp
    cta: Cta
    barrier_offset: int
    count: int
    tx_bytes: int = 0
    where: Where | None = None
    released: Released | None = None
    drops: bool = False
    may_complete: bool = True

    def arrive(self) -> None:
        """Arrive; with `.noComplete` the phase must not end by it."""
        barrier = self.cta.barrier_at(self.barrier_offset)
        phase = barrier.phase
        if self.drops:
            barrier.drop(self.count)
        self.cta.arrive(self.barrier_offset, self.count, self.tx_bytes, self.released)
        if not self.may_complete and barrier.phase != phase:
            raise Fault("barrier", f"{barrier}: an arrival with .noComplete completed phase {phase}")

    def complete(self) -> None:
        """Arrive, after the earlier ones."""
        on_their_way = self.sender.remote_arrivals
        while self in on_their_way:
            first = on_their_way.pop(0)
            try:
                first.arrive()
            except Fault as fault:
                raise (fault.at(first.where) if first.where else fault) from None
