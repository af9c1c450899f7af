"""A machine that records who runs, waits and copies, on a time axis that is modelled.

The emulator runs one warp at a time, in the adversary's order; a person wants to see warps side by side. So each warp
has a clock of its own: an instruction takes one step, and a wait ends when what it waits for has happened on the clock
of whoever did it. What asynchronous units take is a round number (`COPY_STEPS` and the next ones), so that pictures
have the shape of a pipeline. No axis here is a time of any device.

Nothing here runs unless it is asked for: `Options(machine=Trace().machine)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.machine.memory import OFFSET_MASK
from cakegen.emulator.machine.operands import active_lanes, read_address, read_lanes
from cakegen.emulator.machine.warp import Cta, Strand, Warp
from cakegen.emulator.text.ptx import Instruction
from cakegen.emulator.units.barriers import CountedBarrier, MBarrier
from cakegen.emulator.units.pending import Pending
from cakegen.emulator.units.tcgen05.issue import CommitArrival
from cakegen.emulator.units.tma.bulk_groups import BulkQueue, BulkStore
from cakegen.emulator.units.tma.copies import Landing

# Steps of a copy before its first byte, bytes that land in one step, steps of an arrival at another CTA, and of each 8
# columns of a matrix product.
COPY_STEPS, BYTES_A_STEP, ARRIVAL_STEPS, PRODUCT_STEPS = 200, 64, 40, 1
Barrier = MBarrier | CountedBarrier
RUN, WAIT, COPY, PRODUCT = "run", "wait", "copy", "product"


@dataclass(frozen=True, order=True)
class Track:
    """One line of a picture: a warp, or an asynchronous unit, of a CTA. `order` sorts the tracks of a CTA."""

    cta: int
    order: int
    name: str


@dataclass(frozen=True)
class Cause:
    """What completed a barrier's phase: when, on which track, in words."""

    time: float
    track: Track
    what: str


@dataclass
class Span:
    """Something that took time on a track; `kind` is one of `run`, `wait`, `copy`, `product`; a wait has a cause."""

    track: Track
    kind: str
    name: str
    begin: float
    end: float
    cause: Cause | None = None


@dataclass(frozen=True)
class Phase:
    """A barrier of a CTA has completed a phase."""

    cta: int
    barrier: str
    number: int
    time: float


@dataclass
class LaunchTrace:
    """What one launch did.

    Parameters
    ----------
    lines
        Of each warp: outermost source line -> stops below it.
    clusters
        CTA -> the CTAs of its cluster.
    """

    name: str
    spans: list[Span] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    lines: dict[Track, dict[tuple[tuple[str, int], ...], int]] = field(default_factory=dict)
    clusters: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def occupancy(self, cta: int) -> dict[str, list[tuple[float, int]]]:
        """Ring -> (time, stages filled and not yet released): phases of `x_full[i]` less those of `x_empty[i]`.

        Events of one time count together.
        """
        rings: dict[str, dict[float, int]] = {}
        for phase in self.phases:
            family, _, index = phase.barrier.partition("[")
            ring, _, what = family.rpartition("_")
            if phase.cta == cta and index and what in ("full", "empty"):
                changes = rings.setdefault(ring, {})
                changes[phase.time] = changes.get(phase.time, 0) + (1 if what == "full" else -1)
        found = {}
        for ring, changes in rings.items():
            level, levels = 0, []
            for time in sorted(changes):
                level += changes[time]
                levels.append((time, level))
            found[ring] = levels
        return found


@dataclass
class Trace:
    """The launches of a run, in their order."""

    launches: list[LaunchTrace] = field(default_factory=list)

    def machine(self, *arguments: Any, **options: Any) -> Machine:
        """A machine that records into this trace; for `Options.machine`."""
        machine = TracedMachine(*arguments, **options)
        self.launches.append(machine.trace)
        return machine


class TracedMachine(Machine):
    """A machine that keeps clocks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.trace = LaunchTrace(getattr(self, "name", "") or self.kernel.name)
        self._clocks: dict[int, float] = {}
        self._running: dict[int, Span] = {}
        self._mark = 0
        self._acting: Warp | None = None
        self._issued: dict[Pending, tuple[float, Track]] = {}
        self._unit_free: dict[Track, float] = {}
        self._products: dict[int, list[float]] = {}
        # of a barrier, which is kept, so that no later one passes for it: its state when last seen, the last to touch
        # its phase, what completed the last one, who has come
        self._states: dict[Barrier, tuple[int, ...]] = {}
        self._latest: dict[Barrier, Cause] = {}
        self._completed: dict[Barrier, Cause] = {}
        self._arrived: dict[Barrier, list[Warp]] = {}
        self._words: dict[int, Cause] = {}
        self._stores: dict[BulkQueue, Cause] = {}

    # ---- clocks ----

    def _track(self, warp: Warp) -> Track:
        return Track(warp.cta.index, warp.index, f"warp {warp.index}")

    def _advance(self, warp: Warp) -> float:
        """Count the instructions that the warp has run since the last call; its time."""
        now = self._clocks.get(warp.number, 0.0) + self.instructions_run - self._mark
        self._mark = self.instructions_run
        self._clocks[warp.number] = now
        if warp.number not in self._running:
            self._running[warp.number] = Span(self._track(warp), RUN, "runs", now, now)
            self.trace.spans.append(self._running[warp.number])
        self._running[warp.number].end = now
        return now

    def _wait_until(self, warp: Warp, cause: Cause, name: str) -> None:
        """The warp goes on at a cause's time, if that is later than its own."""
        now = self._clocks[warp.number]
        if cause.time <= now:
            return
        track = self._track(warp)
        self.trace.spans.append(Span(track, WAIT, name, now, cause.time, cause))
        self._clocks[warp.number] = cause.time
        self._running[warp.number] = Span(track, RUN, "runs", cause.time, cause.time)
        self.trace.spans.append(self._running[warp.number])

    # ---- what the machine does ----

    def _turn(self, warp: Warp) -> None:
        self._acting, self._mark = warp, self.instructions_run
        super()._turn(warp)
        self._advance(warp)

    def _stop(self, warp: Warp, strand: Strand, pc: int) -> None:
        instruction = self.kernel.instructions[pc]
        self._advance(warp)
        self._retire_products(warp)
        self._count_line(warp, instruction)
        active = active_lanes(strand, instruction)
        awaited = self._awaited(strand, instruction, active) if active.any() else None
        super()._stop(warp, strand, pc)
        now = self._advance(warp)
        self._note_changes(warp.cta.cluster.ctas, Cause(now, self._track(warp), f"warp {warp.index}"))
        if awaited is not None and strand.waits_for is None:
            self._wait_until(warp, *awaited)
        if instruction.root in ("bar", "barrier") and {"sync", "red"} & set(instruction.parts) and active.any():
            self._note_barrier(warp, strand, instruction)

    def _count_line(self, warp: Warp, instruction: Instruction) -> None:
        """The two outermost source lines of a stop: the kernel's call of a role, or of a body that calls roles."""
        cta = warp.cta
        if cta.index not in self.trace.clusters:
            self.trace.clusters[cta.index] = tuple(each.index for each in cta.cluster.ctas)
        if instruction.place.source:
            lines = self.trace.lines.setdefault(self._track(warp), {})
            calls = tuple(instruction.place.source[-2:])
            lines[calls] = lines.get(calls, 0) + 1

    def _awaited(self, strand: Strand, instruction: Instruction, active: Any) -> tuple[Cause, str] | None:
        """Of a wait that will pass now: what let it pass, and its name."""
        root, parts = instruction.root, instruction.parts
        cta = strand.warp.cta
        if root == "mbarrier" and parts[1] in ("try_wait", "test_wait"):
            offset = int(read_address(strand, instruction.operands[1], "u4")[active][0]) & OFFSET_MASK
            parity = int(read_lanes(strand, instruction.operands[2], "u4")[active][0])
            barrier = cta.shared.barriers.get(offset)
            if barrier is None or not barrier.has_completed(parity) or barrier not in self._completed:
                return None
            return self._completed[barrier], f"waits for {barrier.name}"
        if parts[:3] == ("barrier", "cluster", "wait") and cta.cluster.barrier in self._completed:
            return self._completed[cta.cluster.barrier], "waits for the cluster"
        if "wait_group" in parts and "read" not in parts:
            queues = (strand.warp.bulk.get(int(lane)) for lane in np.flatnonzero(active))
            causes = [self._stores[queue] for queue in queues if queue is not None and queue in self._stores]
            return (max(causes, key=lambda cause: cause.time), "waits for its stores") if causes else None
        if root == "ld" and "global" in parts:
            word = int(read_address(strand, instruction.operands[1], "u8")[active][0]) & ~7
            cause = self._words.get(word)
            return (cause, "waits for a counter") if cause else None
        return None

    def _note_changes(self, ctas: Iterable[Cta], cause: Cause) -> None:
        """Barriers that have changed since they were last looked at: somebody touched their phase, or completed it."""
        for cta in ctas:
            for barrier in cta.shared.barriers.values():
                self._note(cta, barrier, (barrier.phase, barrier.pending, barrier.tx_bytes), cause)
            counted = cta.cluster.barrier
            self._note(cta, counted, (counted.generation, counted.arrived), cause)

    def _note(self, cta: Cta, barrier: Barrier, state: tuple[int, ...], cause: Cause) -> None:
        before = self._states.get(barrier)
        if before == state:
            return
        self._states[barrier] = state
        latest = self._latest.get(barrier)
        if latest is None or cause.time >= latest.time:
            self._latest[barrier] = latest = cause
        if before is not None and state[0] != before[0]:
            self._completed[barrier] = latest
            del self._latest[barrier]
            self.trace.phases.append(Phase(cta.index, barrier.name, state[0], latest.time))

    def _note_barrier(self, warp: Warp, strand: Strand, instruction: Instruction) -> None:
        """`bar.sync`: the last one to come lets all go on."""
        operand = instruction.operands[1 if "red" in instruction.parts else 0]
        number = int(read_lanes(strand, operand, "u4")[strand.mask][0])
        barrier = warp.cta.named[number]
        members = self._arrived.setdefault(barrier, [])
        members.append(warp)
        if barrier.arrived:
            return
        last = max(members, key=lambda each: self._clocks[each.number])
        cause = Cause(self._clocks[last.number], self._track(last), f"warp {last.index}")
        for each in members:
            self._wait_until(each, cause, f"waits at bar {number}")
        members.clear()

    def touch(self, addresses: Any) -> None:
        """Global words were written: who reads them goes on no earlier."""
        if self._acting is not None:
            warp = self._acting
            cause = Cause(
                self._clocks.get(warp.number, 0.0), self._track(warp), f"warp {warp.index} of CTA {warp.cta.index}"
            )
            for address in np.unique(addresses):
                self._words[int(address) & ~7] = cause
        super().touch(addresses)

    # ---- asynchronous units ----

    def issue(self, operation: Pending) -> None:
        """Note when, and by whom."""
        warp = self._acting
        assert warp is not None
        begin, track = self._clocks.get(warp.number, 0.0), self._track(warp)
        if isinstance(operation, CommitArrival):
            track = self._tensor_track(warp.cta)
            begin = max(begin, self._unit_free.get(track, 0.0))
        self._issued[operation] = begin, track
        super().issue(operation)

    def _tensor_track(self, cta: Cta) -> Track:
        return Track(cta.index, 2000, "tensor core")

    def note_tensor_work(self, name: str, columns: int) -> None:
        """A tcgen05.mma takes its place behind the earlier ones of its CTA."""
        warp = self._acting
        assert warp is not None
        track = self._tensor_track(warp.cta)
        begin = max(self._clocks.get(warp.number, 0.0), self._unit_free.get(track, 0.0))
        self._unit_free[track] = end = begin + PRODUCT_STEPS * columns / 8
        self._extend(track, name, begin, end)

    def land(self, operation: Pending) -> None:
        """Give it its time, and its span where it is a copy."""
        begin, issuer = self._issued.pop(operation, (0.0, Track(0, 0, "")))
        cta: Cta | None = getattr(operation, "cta", None)
        what = getattr(operation, "what", "an arrival")
        track, end = issuer, begin + ARRIVAL_STEPS
        if isinstance(operation, Landing):
            size = sum(num_bytes for _, num_bytes in operation.spans)
            track, end = self._copy(operation.cta.index, what, size, begin)
        elif isinstance(operation, BulkStore):
            track, end = self._copy(operation.issuer.index, what, operation.values.size, begin)
            self._stores[operation.queue] = Cause(end, track, what)
        super().land(operation)
        if cta is not None:
            self._note_changes(cta.cluster.ctas, Cause(end, track, what))

    def _copy(self, cta: int, what: str, size: int, begin: float) -> tuple[Track, float]:
        """A copy's track and end: latencies overlap, bytes do not."""
        track = Track(cta, 1000, "copies")
        end = max(begin + COPY_STEPS, self._unit_free.get(track, 0.0)) + size / BYTES_A_STEP
        self._unit_free[track] = end
        self.trace.spans.append(Span(track, COPY, what.removeprefix("the "), begin, end))
        return track, end

    def schedule_products(self, warp_index: int, widths: Sequence[int]) -> list[bool]:
        """Products take their places behind the earlier ones of their warpgroup."""
        warp = self._acting
        assert warp is not None
        track = Track(warp.cta.index, 2000 + warp.index // 4, f"tensor core, warps {warp.index // 4 * 4} …")
        for n in widths:
            begin = max(self._clocks.get(warp.number, 0.0), *self._products.get(warp.number, [0.0])[-1:])
            end = begin + PRODUCT_STEPS * n / 8
            self._products.setdefault(warp.number, []).append(end)
            if warp.index % 4 == 0:
                self._extend(track, f"m64n{n}k16", begin, end)
        return super().schedule_products(warp_index, widths)

    def _extend(self, track: Track, name: str, begin: float, end: float) -> None:
        """A product that follows the last one without a gap makes its span longer."""
        last = next((span for span in reversed(self.trace.spans) if span.track == track), None)
        if last is not None and last.name == name and last.end >= begin:
            last.end = end
        else:
            self.trace.spans.append(Span(track, PRODUCT, name, begin, end))

    def _retire_products(self, warp: Warp) -> None:
        """The warp has waited for all products but those that are in flight."""
        ends = self._products.get(warp.number)
        if not ends:
            return
        retired = ends[: len(ends) - warp.wgmma.unfinished]
        if retired:
            track = Track(warp.cta.index, 2000 + warp.index // 4, f"tensor core, warps {warp.index // 4 * 4} …")
            self._wait_until(warp, Cause(retired[-1], track, "wgmma"), "waits for wgmma")
            del ends[: len(retired)]
