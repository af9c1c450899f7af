"""Happens-before: threads with vector clocks, and the order that their accesses need. Imports shadow and vector_clock.

How the rest of the emulator reports to it:

* a warp owns a `Thread`; its weak and strong accesses go to `Clocks.read` and `Clocks.write`;
* what one thread leaves for another goes through a `SyncPoint`: `Thread.release` there, `Thread.acquire` here;
* an asynchronous operation is an `Access` of a *unit*'s slot (`Clocks.new_unit`). Issue it with `Clocks.begin`, report
  what it touches with `begin_read` and `begin_write` (checked against the issuing thread, at issue), and let its
  completion reach threads: a barrier's unit counts phases (`SyncPoint.land`), a pipe in order counts its groups
  (`Thread.learn`). An operation whose time is not known at issue is `IN_FLIGHT` until `Access.time` is set.

Two conflicting accesses need an edge: the later thread must know the earlier access (`VISIBLE`), or, where a write
follows a read, that it was performed (`EXECUTED`). A generic write that an asynchronous operation reads or overwrites
needs a `fence.proxy.async` of the writing thread on that way too (PTX ISA 8.6, 9.7.13.4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault
from cakegen.emulator.ptx import Instruction
from cakegen.emulator.shadow import IN_FLIGHT, WIDEST, Access, ReaderSets, Shadow
from cakegen.emulator.vector_clock import (
    EXECUTED,
    FENCED_GLOBAL,
    GPU,
    VISIBLE,
    Position,
    Released,
    SyncPoint,
    VectorClock,
)

Array = NDArray[Any]
Mask = NDArray[np.bool_] | None
# A buffer of global memory, or the shared memory of a CTA.
Memory = object

# Units a CTA gets beside its warps, next to them: mbarriers and pipes. Later ones cost a wider clock.
_UNITS_A_CTA = 24
# From so many cells on, equal ones are looked for first.
_MANY = 64


class Thread:
    """One warp, as the checker sees it: its lanes count as one thread."""

    def __init__(self, clocks: Clocks, slot: int, low: int, size: int, position: Position, warp: int) -> None:
        self.clocks = clocks
        self.slot = slot
        self.position = position
        self.warp = warp
        self.clock = VectorClock(low, size)
        self.now = 0
        self.index, self.strong, self._orders, self._chained = 0, -1, False, False
        self.lanes: Mask = None
        # accesses that are known to come before: a clock only grows
        self.known: set[int] = {0}
        self.known_to_proxy: set[int] = {0}
        self.known_readers: set[int] = {0}
        self.recent: dict[tuple[int, bool], int] = {}
        self._fenced: list[VectorClock | None] = [None] * (GPU + 1)
        self._observed: list[VectorClock | None] = [None] * (GPU + 1)
        self._initialised: VectorClock | None = None
        self.tick()

    def at(self, index: int, lanes: Mask, strong: int = -1, *, orders: bool = False, chained: bool = False) -> Thread:
        """Itself, about to touch memory by the instruction of that index.

        Parameters
        ----------
        strong
            Scope of a strong access; -1: weak.
        orders
            A strong read acquires, a strong write releases; else they are relaxed.
        chained
            The write belongs to an atomic: what others released through the word stays released.
        """
        self.index, self.lanes, self.strong, self._orders, self._chained = index, lanes, strong, orders, chained
        return self

    def read(self, memory: Memory, rows: Array, width: int) -> None:
        """It reads rows of `width` bytes of a memory.

        Raises
        ------
        Fault
            Nothing orders it behind the last write.
        """
        self.clocks.read(self, self.clocks.shadow(memory), rows, width)
        if self.strong >= 0:
            for point in self._points(memory, rows, width):
                self._strong_read(point)

    def write(self, memory: Memory, rows: Array, width: int) -> None:
        """It writes them.

        Raises
        ------
        Fault
            Nothing orders it behind the last write, or behind a read since.
        """
        self.clocks.write(self, self.clocks.shadow(memory), rows, width)
        if self.strong >= 0:
            for point in self._points(memory, rows, width):
                self._strong_write(point)

    def _points(self, memory: Memory, rows: Array, width: int) -> list[SyncPoint]:
        return [self.clocks.word(memory, row * width) for row in set(rows.tolist())]

    def _strong_read(self, point: SyncPoint) -> None:
        """An acquire, or a relaxed read that a later fence makes one."""
        if self._orders:
            self.acquire(point, self.strong)
            return
        for level, left in point.parts(self.position, self.strong):
            observed = self._observed[level]
            if observed is None:
                self._observed[level] = left.copy()
            else:
                observed.join(left)

    def _strong_write(self, point: SyncPoint) -> None:
        """A release, or a relaxed write behind a fence, which releases what the fence covered."""
        if not self._chained:
            point.clear()
        if self._orders:
            self.release(point, self.strong)
            return
        for level in range(self.strong + 1):
            fenced = self._fenced[level]
            if fenced is not None:
                point.leave(self.position.area(level), fenced)

    def tick(self) -> None:
        """What follows is later than what was released."""
        self.now += 1
        self.clock.learn(self.slot, self.now)
        self.recent.clear()

    def learn(self, slot: int, time: int) -> None:
        """A unit's operations up to a time are complete and visible here."""
        self.clock.learn(slot, time)

    def release(self, point: SyncPoint, scope: int, home: Position | None = None) -> None:
        """Leave everything known here for those who acquire inside of the scope."""
        point.release(self.clock, self.position, scope, home)
        self.tick()

    def released(self, scope: int) -> Released:
        """What an arrival publishes, wherever and whenever it arrives."""
        released = Released(self.clock.copy(), self.position, scope)
        self.tick()
        return released

    def acquire(self, point: SyncPoint, scope: int) -> None:
        """Take what was released at a point for this thread's place."""
        point.acquire(self.clock, self.position, scope)

    def join(self, clock: VectorClock) -> None:
        """Take all of a clock: a barrier of the CTA, or of the cluster."""
        self.clock.join(clock)

    def leave(self, clock: VectorClock | None) -> VectorClock:
        """A clock, from now on with all that is known here."""
        if clock is None:
            clock = self.clock.copy()
        else:
            clock.join(self.clock)
        self.tick()
        return clock

    # ---- fences ----

    def fence(self, scope: int, *, releases: bool = True, acquires: bool = True) -> None:
        """`fence.acq_rel`, `fence.sc`: later strong writes release, and earlier strong reads acquire."""
        if acquires:
            for level in range(scope + 1):
                observed = self._observed[level]
                if observed is not None:
                    self.clock.join(observed)
        if releases:
            snapshot = self.clock.copy()
            for level in range(scope + 1):
                self._fenced[level] = snapshot
            self.tick()

    def fence_proxy(self, rows: Iterable[int]) -> None:
        """`fence.proxy.async`: this thread's generic writes up to now."""
        for row in rows:
            self.clock.learn(self.slot, self.now, row)
        self.tick()

    def fence_initialised(self) -> None:
        """`fence.mbarrier_init`: a relaxed arrival at the cluster barrier may follow."""
        self._initialised = self.clock.copy()
        self.tick()

    def leave_initialised(self, clock: VectorClock | None) -> VectorClock | None:
        """`barrier.cluster.arrive.relaxed` publishes the initialisations before such a fence, and nothing else."""
        if self._initialised is None:
            return clock
        clock = clock or VectorClock(self.slot, 1)
        clock.join(self._initialised, EXECUTED)
        return clock


class Clocks:
    """The order of all accesses of one launch."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self._instructions = instructions
        self._accesses: list[Access] = [None]  # type: ignore[list-item]
        self._readers = ReaderSets(self._accesses)
        self._shadows: dict[int, Shadow] = {}
        self._words: dict[tuple[int, int], SyncPoint] = {}
        self._next_slot = 0
        self._spare: dict[int, list[int]] = {}

    # ---- slots ----

    def admit(self, positions: Sequence[Position], warps: int) -> list[list[Thread]]:
        """Threads of a cluster's CTAs; nothing is known to them."""
        per_cta = warps + _UNITS_A_CTA
        low, size = self._next_slot, per_cta * len(positions)
        self._next_slot += size
        threads = []
        for number, position in enumerate(positions):
            first = low + number * per_cta
            threads.append([Thread(self, first + warp, low, size, position, warp) for warp in range(warps)])
            self._spare[position.cta] = list(range(first + per_cta - 1, first + warps - 1, -1))
        return threads

    def new_unit(self, cta: int) -> int:
        """A slot for an asynchronous unit of a CTA."""
        spare = self._spare[cta]
        if spare:
            return spare.pop()
        self._next_slot += 1
        return self._next_slot - 1

    # ---- memories ----

    def watch(self, memory: Memory, num_bytes: int, name: Callable[[int], str], *, is_global: bool) -> None:
        """A memory whose accesses will be reported; `name` says what an offset is called."""
        self._shadows[id(memory)] = Shadow(num_bytes, name, is_global)

    def shadow(self, memory: Memory) -> Shadow:
        """The last accesses of a memory."""
        return self._shadows[id(memory)]

    def word(self, memory: Memory, offset: int) -> SyncPoint:
        """Where strong accesses of a word meet."""
        key = (id(memory), offset)
        if key not in self._words:
            self._words[key] = SyncPoint()
        return self._words[key]

    # ---- accesses of a thread ----

    def read(self, thread: Thread, shadow: Shadow, rows: Array, width: int) -> None:
        """A generic read of rows of `width` bytes by a thread, where it is `at`.

        Raises
        ------
        Fault
            Nothing orders it behind the last write.
        """
        writes, reads = shadow.views(width)
        number = self._number(thread, False)
        self._require_writes(thread, number, writes[rows], shadow, rows, width)
        self._add_reader(thread, number, reads, rows)

    def write(self, thread: Thread, shadow: Shadow, rows: Array, width: int) -> None:
        """A generic write.

        Raises
        ------
        Fault
            Nothing orders it behind the last write, or behind a read since.
        """
        writes, reads = shadow.views(width)
        number = self._number(thread, True)
        self._require_writes(thread, number, writes[rows], shadow, rows, width)
        self._require_reads(thread, number, reads[rows], shadow, rows, width)
        writes[rows] = number
        reads[rows] = 0

    # ---- asynchronous operations ----

    def begin(self, thread: Thread, what: str, slot: int, time: int = IN_FLIGHT) -> int:
        """The number of an operation that a thread issues; it counts as done for whoever knows `slot` up to `time`."""
        return self._access(thread, what, slot, time, asynchronous=True)

    def complete(self, number: int, time: int) -> None:
        """The time of an operation's slot at which it is complete."""
        self._accesses[number].time = time

    def begin_read(self, thread: Thread, number: int, shadow: Shadow, granules: Array) -> None:
        """An operation reads 16-byte granules by the asynchronous proxy.

        Raises
        ------
        Fault
            Nothing orders the issue behind the last write, or that write was generic and no proxy fence follows it.
        """
        writes, reads = shadow.views(WIDEST)
        self._require_writes(thread, number, writes[granules], shadow, granules, WIDEST)
        self._add_reader(thread, number, reads, granules)

    def begin_write(self, thread: Thread, number: int, shadow: Shadow, granules: slice, *, by_proxy: bool) -> None:
        """An operation writes a span of granules; `by_proxy`: through the asynchronous proxy (`st.async` is generic).

        Raises
        ------
        Fault
            Nothing orders the issue behind what was read or written there, or a generic write lacks its proxy fence.
        """
        writes, reads = shadow.views(WIDEST)
        rows = np.arange(granules.start, granules.stop)
        self._require_writes(thread, number, writes[granules], shadow, rows, WIDEST, by_proxy)
        self._require_reads(thread, number, reads[granules], shadow, rows, WIDEST)
        writes[granules] = number
        reads[granules] = 0

    # ---- inside ----

    def _access(self, thread: Thread, what: str, slot: int, time: int, **rest: Any) -> int:
        instruction = self._instructions[thread.index]
        access = Access(slot, time, thread.position, instruction, thread.warp, thread.lanes, what, **rest)
        self._accesses.append(access)
        return len(self._accesses) - 1

    def _number(self, thread: Thread, writes: bool) -> int:
        """The number of a thread's access by its instruction, the same until the thread's clock ticks."""
        number = thread.recent.get((thread.index, writes))
        if number is None:
            what = "write" if writes else "read"
            number = self._access(thread, what, thread.slot, thread.now, strong=thread.strong)
            thread.recent[thread.index, writes] = number
        return number

    def _add_reader(self, thread: Thread, number: int, reads: Array, rows: Array) -> None:
        before = reads[rows]
        sets = set(before.ravel().tolist())
        if len(sets) == 1:
            reads[rows] = self._readers.add(sets.pop(), number, thread.clock)
            return
        after = before.copy()
        for each in sets:
            after[before == each] = self._readers.add(each, number, thread.clock)
        reads[rows] = after

    def _require_writes(
        self,
        thread: Thread,
        number: int,
        before: Array,
        shadow: Shadow,
        rows: Array,
        width: int,
        by_proxy: bool | None = None,
    ) -> None:
        """Every last write comes before, and, if generic, is fenced for an operation of the asynchronous proxy."""
        access = self._accesses[number]
        by_proxy = access.asynchronous if by_proxy is None else by_proxy
        known = thread.known_to_proxy if by_proxy else thread.known
        for each in _distinct(before) - known:
            earlier = self._accesses[each]
            if earlier.is_before(thread.clock, VISIBLE):
                if by_proxy and not earlier.asynchronous and not earlier.is_before(thread.clock, shadow.fenced_row):
                    raise self._proxy_fault(access, earlier, shadow, _first(rows, before, each) * width)
                known.add(each)
            elif not access.tolerates(earlier):
                raise self._race(thread, access, earlier, shadow, _first(rows, before, each) * width)

    def _require_reads(
        self, thread: Thread, number: int, before: Array, shadow: Shadow, rows: Array, width: int
    ) -> None:
        """Every read since the last write has been performed."""
        for each in _distinct(before) - thread.known_readers:
            tolerated = False
            for member in self._readers.members[each]:
                earlier = self._accesses[member]
                if earlier.is_before(thread.clock, EXECUTED):
                    continue
                if not self._accesses[number].tolerates(earlier):
                    raise self._race(
                        thread, self._accesses[number], earlier, shadow, _first(rows, before, each) * width
                    )
                tolerated = True
            if not tolerated:
                thread.known_readers.add(each)

    def _race(self, thread: Thread, access: Access, earlier: Access, shadow: Shadow, offset: int) -> Fault:
        why = "nothing orders the two"
        if earlier.time == IN_FLIGHT:
            why = "which is still in flight"
        elif earlier.is_before(thread.clock, EXECUTED):
            why = "what was released between them is relaxed, or its scope does not hold both threads"
        return Fault("race", f"{access.what} of {shadow.name(offset)}, and {why}:\n  {earlier.what} by {earlier.where}")

    def _proxy_fault(self, access: Access, earlier: Access, shadow: Shadow, offset: int) -> Fault:
        space = "global" if shadow.fenced_row == FENCED_GLOBAL else "shared::cta"
        return Fault(
            "proxy",
            f"{access.what} touches {shadow.name(offset)} by the asynchronous proxy; the generic {earlier.what} there "
            f"is ordered before it, but the writing thread executed no fence.proxy.async.{space} between its write "
            f"and its release:\n  {earlier.what} by {earlier.where}",
        )


def _distinct(numbers: Array) -> set[int]:
    if numbers.size > _MANY:
        first = numbers.flat[0]
        if (numbers == first).all():
            return {int(first)}
        return set(np.unique(numbers).tolist())
    return set(numbers.ravel().tolist())


def _first(rows: Array, before: Array, number: int) -> int:
    """The first row whose cells hold a number."""
    found = (before.reshape(rows.size, -1) == number).any(axis=1)
    return int(rows[int(np.flatnonzero(found)[0])])
