"""What a warp's `cp.async` have copied and nobody waits for yet, lane by lane (PTX ISA 9.7.9.25.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Where
from cakegen.emulator.machine.memory import SHARED_START, Buffer, GlobalMemory, SharedMemory
from cakegen.emulator.order.vector_clock import CTA, Position, Released
from cakegen.emulator.order.warp_order import WarpOrder
from cakegen.emulator.units.barriers import MBarrier
from cakegen.emulator.units.pending import Pending

Array = NDArray[Any]


class CopyHost(Protocol):
    """What a copy asks of its launch when it lands."""

    @property
    def memory(self) -> GlobalMemory:
        """Where its source is."""

    def wake(self, waiters: list[Any]) -> None:
        """Let parked strands try again."""


class CopyCta(Protocol):
    """The CTA of the threads that copy."""

    @property
    def index(self) -> int:
        """Linear index in the grid."""

    @property
    def position(self) -> Position:
        """For scopes."""

    @property
    def shared(self) -> SharedMemory:
        """Where copies go."""

    def barrier_at(self, offset: int) -> MBarrier:
        """The mbarrier at an offset."""

    def arrive(self, offset: int, count: int, tx_bytes: int = 0, released: Released | None = None) -> None:
        """An arrival at it."""


@dataclass(frozen=True, eq=False)
class SourcePart:
    """Elements of one width that a copy reads: their addresses, and which cells of that width they become."""

    buffer: Buffer
    addresses: Array
    offsets: Array
    width: int
    cells: Array


@dataclass(eq=False)
class LaneCopy(Pending):
    """One `cp.async` of some lanes of a warp: `size` bytes for each.

    Parameters
    ----------
    starts
        Where in shared memory, a lane each.
    groups
        The number of each lane's group, in the order of lanes.
    unwaited
        Lanes that have not waited for it.
    untracked
        Lanes for which no mbarrier tracks it.
    number, tracked
        Its number for the checker of happens-before, and its time on the warp's unit once a barrier tracks it.
    """

    machine: CopyHost
    queue: CopyQueue
    lanes: Array
    starts: Array
    size: int
    sources: Sequence[SourcePart]
    where: Where | None = None
    groups: Array = field(init=False)
    unwaited: Array = field(init=False)
    untracked: Array = field(init=False)
    number: int = 0
    tracked: int = 0
    landed: bool = False

    def __post_init__(self) -> None:
        self.unwaited, self.untracked = self.lanes.copy(), self.lanes.copy()
        self.groups = self.queue.committed[self.lanes]

    @property
    def what(self) -> str:
        """For reports."""
        first, last = int(self.starts.min()) - SHARED_START, int(self.starts.max()) - SHARED_START + self.size - 1
        return f"the cp.async to shared offsets {first} to {last}"

    def begin(self, thread: WarpOrder | None) -> None:
        """Mark the destination; the threads must come after who used it, and after who wrote the source."""
        shared = self.queue.cta.shared
        shared.begin_copy(self.starts, self.size, self.what)
        self.queue.copies.append(self)
        if thread is None:
            return
        clocks = thread.clocks
        self.number = clocks.begin_copy(thread, self.what)
        for part in self.sources:
            if not part.buffer.read_only:
                rows = (part.offsets // np.uint64(part.width)).astype(np.int64)
                clocks.begin_read(thread, self.number, clocks.shadow(part.buffer), rows, part.width)
        rows = self.starts // self.size
        clocks.begin_write(thread, self.number, clocks.shadow(shared), rows, self.size)

    def complete(self) -> None:
        """Store the bytes; what the source lacks arrives as zeros."""
        if self.landed:
            return
        self.landed = True
        rows = np.zeros((self.starts.size, self.size), np.uint8)
        for part in self.sources:
            rows.reshape(-1, part.width)[part.cells] = self.machine.memory.load(part.addresses, part.width)
        shared = self.queue.cta.shared
        shared.views(self.size)[0][self.starts // self.size] = rows
        shared.end_copy(self.starts, self.size)
        self.machine.wake(self.queue.waiters)


@dataclass(eq=False)
class CopyQueue:
    """A warp's copies that some lane has not waited for; `committed` says how many groups each lane has committed."""

    cta: CopyCta
    committed: Array = field(default_factory=lambda: np.zeros(32, np.int64))
    copies: list[LaneCopy] = field(default_factory=list)
    waiters: list[Any] = field(default_factory=list)
    unit: int = -1
    _time: int = 0

    def commit(self, lanes: Array) -> None:
        """`cp.async.commit_group`; an empty one is a group too."""
        self.committed[lanes] += 1

    def wait(self, most: int, lanes: Array, thread: WarpOrder | None) -> LaneCopy | None:
        """Wait for all groups of some lanes but the newest `most`; returns what has not landed yet."""
        covered = [(copy, self._covered(copy, most, lanes)) for copy in self.copies]
        covered = [(copy, theirs) for copy, theirs in covered if theirs.any()]
        late = next((copy for copy, _ in covered if not copy.landed), None)
        if late is not None:
            return late
        for copy, theirs in covered:
            copy.unwaited &= ~theirs
            if thread is not None:
                self._take(copy, theirs, thread)
        self.copies = [copy for copy in self.copies if copy.unwaited.any()]
        return None

    def _covered(self, copy: LaneCopy, most: int, lanes: Array) -> Array:
        """The lanes, of some, for which a copy is in a group that such a wait covers."""
        covered = lanes & copy.unwaited
        old = copy.groups < self.committed[copy.lanes] - most
        covered[copy.lanes] &= old
        return covered

    def _take(self, copy: LaneCopy, lanes: Array, thread: WarpOrder) -> None:
        if copy.tracked:
            thread.learn(self.unit, copy.tracked)
        else:
            cells = copy.starts[lanes[copy.lanes]] // copy.size
            thread.clocks.take_copy(thread, copy.number, lanes, thread.clocks.shadow(self.cta.shared), cells, copy.size)

    def track(self, lanes: Array, thread: WarpOrder | None) -> tuple[list[LaneCopy], int, Released | None]:
        """(what some lanes have copied, its time on the unit, what the arrival releases) for an arrival behind it."""
        mine = [copy for copy in self.copies if (copy.lanes & lanes).any()]
        if thread is None:
            return mine, 0, None
        if not mine:
            # all was waited for: these are the threads' own stores by now
            return mine, 0, thread.released(CTA)
        if self.unit < 0:
            self.unit = thread.clocks.add_unit(self.cta.index)
        self._time += 1
        for copy in mine:
            copy.untracked &= ~lanes
            if not copy.tracked and not copy.untracked.any():
                copy.tracked = self._time
                thread.clocks.track_copy(copy.number, self.unit, self._time)
        return mine, self._time, None


@dataclass(eq=False)
class CopyArrival(Pending):
    """`cp.async.mbarrier.arrive` on its way: copies land before it."""

    queue: CopyQueue
    barrier_offset: int
    count: int
    copies: Sequence[LaneCopy]
    time: int
    released: Released | None
    where: Where | None = None

    def complete(self) -> None:
        """Let what it tracks land, show that to who waits for the phase, and arrive."""
        for copy in self.copies:
            copy.complete()
        cta = self.queue.cta
        order = cta.barrier_at(self.barrier_offset).order
        if self.time and order is not None:
            order.arrivals.land(self.queue.unit, self.time, cta.position, CTA)
        cta.arrive(self.barrier_offset, self.count, released=self.released)
