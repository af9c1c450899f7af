"""A machine that runs its launch in the order of modelled time: the warp that is earliest goes on.

What a launch computes is left out where control does not ask for it: copies bring nothing, products add nothing.
Barriers, counters and addresses are the emulator's own.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.machine.memory import GRANULE, Buffer
from cakegen.emulator.machine.warp import Cta, RemoteArrival, Strand, Warp
from cakegen.emulator.text.ptx import Instruction
from cakegen.emulator.units.pending import Pending
from cakegen.emulator.units.tma.bulk_groups import BulkStore
from cakegen.emulator.units.tma.copies import Landing
from cakegen.timing.blocks import BlockCost, cost_of
from cakegen.timing.figures import DeviceFigures
from cakegen.timing.pipes import MemorySystem, pipes_of, sectors_of

Array = NDArray[Any]
_SCHEDULERS = 4
# How far a warp may run ahead of all others.
_AHEAD_NS = 20.0
_K = 16
_EMPTY = np.empty(0, np.uint8)


@dataclass
class InOrder(Adversary):
    """The schedule of a device: as many clusters as fit, nothing fails that could succeed."""

    kind: str = "early"
    clusters_at_once: int = 1

    def residency(self, clusters: int, cooperative: bool) -> int:
        """All that fit."""
        return min(clusters, self.clusters_at_once)


@dataclass
class LaunchTime:
    """What one launch took.

    Parameters
    ----------
    end
        ns from its first instruction to its last, with the last store.
    busy
        Part -> ns in which it worked; of parts that every SM has, of the busiest.
    waits
        (warp's index in its CTA, what it waited for) -> ns, of all CTAs together.
    read_bytes, memory_bytes
        Of global memory, that the SMs asked for, and that HBM served.
    """

    end: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    waits: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    read_bytes: int = 0
    memory_bytes: int = 0
    ctas: int = 0
    instructions: int = 0


class TimedMachine(Machine):
    """A machine with a clock for each warp and for each part of the device, in ns.

    Parameters
    ----------
    figures
        Of the device.
    system
        HBM and the L2, which launches of one stream share.
    """

    def __init__(self, *arguments: Any, figures: DeviceFigures, system: MemorySystem, **options: Any) -> None:
        self.figures = figures
        self.system = system
        self.now = 0.0
        self.time = LaunchTime()
        self._events: list[tuple[float, int, Warp | Pending]] = []
        self._serial = 0
        self._clocks: dict[int, float] = {}
        self._parked: dict[int, tuple[float, str]] = {}
        self._costs: dict[tuple[int, bool], BlockCost] = {}
        self._outstanding: dict[int, dict[int, float]] = defaultdict(dict)
        self._products: dict[int, list[float]] = defaultdict(list)
        # by SM and scheduler, in ns of work; by SM, in bytes
        self._tensor = pipes_of(1.0)
        self._schedulers = pipes_of(1.0)
        self._peers = pipes_of(figures.peer_rate.value)
        self._sms: dict[int, int] = {}
        self._free_sms: list[int] = []
        self._acting: Warp | None = None
        self._touched: list[tuple[Buffer, Array, bool]] = []
        self._shared_source: tuple[Warp, int, str, float, bool] | None = None
        self._stops_run = 0
        super().__init__(*arguments, **options)
        self.memory.observer = self._note_access

    def _schedule(self, at: float, what: Warp | Pending) -> None:
        self._serial += 1
        heapq.heappush(self._events, (at, self._serial, what))

    def can_step(self) -> bool:
        """Whether something will happen."""
        self.residency.fill()
        return bool(self._events)

    def make_ready(self, warp: Warp) -> None:
        """A warp goes on, now or at its own time."""
        if warp.queued or warp.done:
            return
        warp.queued = True
        begin = self._clocks.setdefault(warp.number, self.now)
        at = max(self.now, begin)
        parked = self._parked.pop(warp.number, None)
        if parked is not None:
            since, what = parked
            at = max(at + self._wake_ns(what), since)
            self.time.waits[warp.index, what] += at - since
            self._clocks[warp.number] = at
        self._schedule(at, warp)

    def _wake_ns(self, what: str) -> float:
        figures = self.figures
        if what.startswith("bar "):
            return figures.barrier_wake.value
        if what.startswith("barrier.cluster"):
            return figures.cluster_wake.value
        if what == "a word of memory":
            return figures.load_l2_latency.value
        return figures.wait_wake.value

    def _step(self) -> None:
        self.now, _, event = heapq.heappop(self._events)
        if isinstance(event, Pending):
            self.pending.remove(event)
            self._land_in_place(event)
            return
        self._acting = event
        self._clocks[event.number] = max(self._clocks.get(event.number, 0.0), self.now)
        if self._go_on(event):
            self._schedule(self._clocks[event.number], event)
        else:
            self._leave(event)

    def _leave(self, warp: Warp) -> None:
        now = self._clocks[warp.number]
        self.time.end = max(self.time.end, now)
        if not warp.done:
            held = next((each.waits_for for each in warp.strands if each.waits_for is not None), None)
            self._parked[warp.number] = now, _what(held)
        self._set_aside(warp)
        if warp.done and warp.cta.shared.exited and warp.cta.index in self._sms:
            self._free_sms.append(self._sms.pop(warp.cta.index))

    def sm_of(self, cta: Cta) -> int:
        """The SM of a CTA: the one that was free first."""
        sm = self._sms.get(cta.index)
        if sm is None:
            sm = self._free_sms.pop(0) if self._free_sms else len(self._sms) % self.figures.sm_count
            self._sms[cta.index] = sm
            self.time.ctas += 1
        return sm

    def _turn(self, warp: Warp) -> None:
        """One stop at the warp's time, then blocks up to the next stop."""
        strand = self._runnable(warp)
        stops = self.program.stops
        if strand is not None and strand.pc in stops:
            self._stop(warp, strand, strand.pc)
            strand = self._runnable(warp)
        # others act between blocks, so that all parts are asked in the order of time
        until = self.now + _AHEAD_NS
        while strand is not None and strand.pc not in stops and self._clocks[warp.number] <= until:
            strand = self._run_block(warp, strand)

    def _run_block(self, warp: Warp, strand: Strand) -> Strand | None:
        key = (strand.pc, not strand.whole)
        cost = self._costs.get(key)
        if cost is None:
            cost = self._costs[key] = cost_of(self.program.block(*key), self.kernel.instructions, self.figures)
        self._touched.clear()
        following = super()._run_block(warp, strand)
        self._charge(warp, cost)
        return following

    def _charge(self, warp: Warp, cost: BlockCost) -> None:
        figures = self.figures
        begin = self._clocks[warp.number]
        cycle = 1 / figures.clock.value
        begin += self._stall(warp, cost, begin, cycle)
        served, missed = self._serve(begin) if self._touched else (begin, False)
        length = (cost.miss if missed else cost.hit) * cycle
        end = begin + length
        if missed:
            end = max(end, served + cost.behind_wait * cycle)
        if cost.waits:
            end = max(end, self._retire(warp) + cost.behind_wait * cycle)
        end = max(end, self._schedulers[self._quarter(warp)].take(begin, cost.issues * cycle))
        end += cost.gpu_fences * figures.fence_gpu.value
        outstanding = self._outstanding[warp.number]
        for index, load in cost.open_loads.items():
            ready = begin + load.at * cycle
            outstanding[index] = max(ready, served + figures.load_latency.value) if load.is_global and missed else ready
        self._clocks[warp.number] = end

    def _stall(self, warp: Warp, cost: BlockCost, begin: float, cycle: float) -> float:
        """How much later the block runs, since it uses what earlier blocks loaded."""
        outstanding = self._outstanding[warp.number]
        if not outstanding:
            return 0.0
        stall = 0.0
        for index in [index for index in outstanding if index in cost.uses]:
            stall = max(stall, outstanding.pop(index) - begin - cost.uses[index] * cycle)
        return stall

    def _serve(self, at: float) -> tuple[float, bool]:
        """The block's accesses to global memory: when the last is served, and whether HBM served one."""
        end, missed = at, False
        for buffer, sectors, writes in self._touched:
            if writes:
                self.time.end = max(self.time.end, self.system.write(at, buffer, sectors))
                continue
            served, miss = self.system.fetch(at, buffer, sectors)
            end, missed = max(end, served), missed or miss
        self._touched.clear()
        return end, missed

    def _note_access(self, buffer: Buffer, offsets: Array, width: int, writes: bool) -> None:
        if self._acting is not None:
            self._touched.append((buffer, sectors_of(offsets, width), writes))

    def _quarter(self, warp: Warp) -> tuple[int, int]:
        """A warp's SM, and its scheduler there, which has a tensor core of its own."""
        return self.sm_of(warp.cta), warp.index % _SCHEDULERS

    def _stop(self, warp: Warp, strand: Strand, pc: int) -> None:
        self._stops_run += 1
        self._touched.clear()
        super()._stop(warp, strand, pc)
        took = self._stop_ns(self.kernel.instructions[pc])
        if self._touched:
            self._serve(self._clocks[warp.number])
        self._clocks[warp.number] += took

    def _stop_ns(self, instruction: Instruction) -> float:
        figures, root, parts = self.figures, instruction.root, instruction.parts
        cycles = figures.alu_latency.value
        if root == "cp":
            return figures.copy_issue.value if "wait_group" not in parts else figures.cycles(cycles)
        if root == "atom" and "global" in parts:
            return figures.atomic.value
        if root == "ld":
            return figures.load_l2_latency.value
        if root == "st" and "release" in parts:
            return figures.fence_gpu.value
        if root == "mbarrier":
            return figures.cycles(figures.shared_latency.value if "try_wait" in parts else cycles)
        return figures.cycles(cycles)

    def schedule_products(self, warp: int, widths: Sequence[int]) -> list[bool]:
        """Products of one warp: its quarter of 64 rows, on the tensor core of its scheduler."""
        acting = self._acting
        assert acting is not None
        figures = self.figures
        pipe = self._tensor[self._quarter(acting)]
        begin = self._clocks[acting.number]
        for columns in widths:
            multiplies = 64 * _K * columns / figures.product_rate.value
            operands = 2 * _K * (64 + columns) / figures.shared_rate.value
            self._products[acting.number].append(pipe.take(begin, figures.cycles(max(multiplies, operands))))
        return super().schedule_products(warp, widths)

    def _retire(self, warp: Warp) -> float:
        """When the products are done that the warp has waited for."""
        ends = self._products[warp.number]
        retired = ends[: len(ends) - warp.wgmma.unfinished]
        if not retired:
            return 0.0
        del ends[: len(retired)]
        return retired[-1] + self.figures.product_latency.value

    def issue(self, operation: Pending) -> None:
        """Say when it happens."""
        warp = self._acting
        assert warp is not None
        begin = self._clocks[warp.number]
        self.pending.append(operation)
        self._schedule(self._arrival(operation, warp, begin), operation)

    def _arrival(self, operation: Pending, warp: Warp, begin: float) -> float:
        figures = self.figures
        if isinstance(operation, Landing):
            operation.fetch, operation.write = _nothing, _ignore
            size = sum(num_bytes for _, num_bytes in operation.spans)
            if operation.source is None or not isinstance(operation.source.buffer, Buffer):
                return self._peers[self.sm_of(operation.cta)].take(begin, size) + figures.peer_latency.value
            begin += figures.copy_issue.value
            sent, missed = self._source(operation, warp, begin)
            latency = figures.memory_latency.value if missed else figures.l2_latency.value
            into = self.system.ingress[self.sm_of(operation.cta)]
            return max(sent + latency, into.take(begin + latency, size))
        if isinstance(operation, BulkStore):
            target = operation.target
            sectors = sectors_of(target.offsets, target.width)
            end = self.system.write(begin, target.buffer, sectors) + figures.load_l2_latency.value
            self.time.end = max(self.time.end, end)
            return end
        if isinstance(operation, RemoteArrival):
            return begin + figures.peer_latency.value
        return begin + figures.product_latency.value

    def _source(self, landing: Landing, warp: Warp, begin: float) -> tuple[float, bool]:
        """A copy's reading of global memory; a multicast reads once."""
        before = self._shared_source
        if before is not None and before[:3] == (warp, self._stops_run, landing.what):
            return before[3:]
        assert landing.source is not None
        assert isinstance(landing.source.buffer, Buffer)
        sectors = sectors_of(landing.source.granules() * GRANULE, GRANULE)
        sent, missed = self.system.fetch(begin, landing.source.buffer, sectors)
        self._shared_source = (warp, self._stops_run, landing.what, sent, missed)
        return sent, missed

    def read_clock(self) -> int:
        """`%globaltimer`."""
        return int(self.now) + 1

    def finish(self) -> LaunchTime:
        """The account of a launch that has ended."""
        time = self.time
        time.end += self.figures.store_drain.value
        time.instructions = self.instructions_run
        time.read_bytes, time.memory_bytes = self.system.read_bytes, self.system.missed_bytes
        time.busy = {
            "memory": self.system.memory.busy,
            "L2": self.system.l2.busy,
            "SM ingress": max((pipe.busy for pipe in self.system.ingress.values()), default=0.0),
            "tensor": max((pipe.busy for pipe in self._tensor.values()), default=0.0),
            "issue": max((pipe.busy for pipe in self._schedulers.values()), default=0.0),
        }
        return time


def _what(held: object) -> str:
    """What a warp waits for, without the number of a stage."""
    text = str(held)
    if text.startswith("a change of"):
        return "a word of memory"
    name = text.removeprefix("parity 0 of ").removeprefix("parity 1 of ").partition(" (")[0]
    return name.partition("[")[0]


def _nothing() -> Array:
    return _EMPTY


def _ignore(shared: Array, data: Array) -> None:
    """A copy that brings nothing."""
