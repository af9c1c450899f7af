"""Happens-before: threads with vector clocks, and the order that their accesses need.

How the rest of the emulator reports to it:

* a warp owns a `WarpOrder`; its weak and strong accesses go to `AccessOrder.read` and `AccessOrder.write`;
* what one thread leaves for another goes through a `SyncPoint`: `WarpOrder.release` there, `WarpOrder.acquire` here;
* an asynchronous operation is an `Access` of a *unit*'s slot (`AccessOrder.add_unit`). Issue it with
  `AccessOrder.begin`, report what it touches with `begin_read` and `begin_write` (checked against the issuing thread,
  at issue), and let its completion reach threads: a barrier's unit counts phases (`SyncPoint.land`), a pipe in
  order counts its groups (`WarpOrder.learn`). An operation whose time is not known at issue is
  `IN_FLIGHT` until `Access.time` is set.

Two conflicting accesses need an edge: the later thread must know the earlier access (`VISIBLE`), or, where a write
follows a read, that it was performed (`EXECUTED`). A generic write that an asynchronous operation reads or overwrites
needs a `fence.proxy.async` of the writing thread on that way too (PTX ISA 8.6, 9.7.13.4), and between lanes of one warp
a `bar.warp.sync`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault
from cakegen.emulator.order.shadow import IN_FLIGHT, UNWAITED, WIDEST, Access, ReaderSets, Shadow, distinct
from cakegen.emulator.order.vector_clock import EXECUTED, VISIBLE, Position, SyncPoint, VectorClock
from cakegen.emulator.text.ptx import Instruction

Array = NDArray[Any]
# A buffer of global memory, or the shared memory of a CTA.
Memory = object
# Which cells: a memory, rows of it, and the bytes of a row.
Cells = tuple[Shadow, Array, int]

# Units a CTA gets beside its warps, next to them: mbarriers and pipes. Later ones cost a wider clock.
_UNITS_A_CTA = 24
# A lane's code: its warp's slot, then so many bits for the lane.
LANE_BITS = 6


class Accessor(Protocol):
    """A warp that touches memory: `WarpOrder`, as far as its accesses go."""

    index: int
    strong: int
    lanes: NDArray[np.bool_] | None
    slot: int
    warp: int
    position: Position
    clock: VectorClock
    known: set[int]
    known_to_proxy: set[int]
    known_readers: set[int]
    recent: dict[tuple[int, bool], int]
    open: list[Access]
    unfenced: tuple[list[Access], ...]

    @property
    def several_lanes(self) -> int:
        """The code of more than one lane of this warp."""

    def lane_codes(self, count: int) -> Array:
        """`[count, 1]`: which lane of which warp makes each of the accesses."""

    def is_apart(self, access: Access) -> bool:
        """Whether it is the warp's own, and its lanes do not know of each other's part in it yet."""


class AccessOrder:
    """The order of all accesses of one launch.

    Parameters
    ----------
    strict_scopes
        Whether a write in front of which only narrow scopes stand races with the reads before it. PTX ISA 8.7 has it
        so; rings between CTAs are widely built without.
    """

    def __init__(self, instructions: Sequence[Instruction], strict_scopes: bool = False) -> None:
        self.strict_scopes = strict_scopes
        self._instructions = instructions
        self._accesses: list[Access] = [None]  # type: ignore[list-item]
        self._readers = ReaderSets(self._accesses)
        self._shadows: dict[int, Shadow] = {}
        self._words: dict[tuple[int, int], SyncPoint] = {}
        self._next_slot = 0
        self._spare: dict[int, list[int]] = {}

    # ---- slots ----

    def admit(self, positions: Sequence[Position], warps: int) -> tuple[int, int, list[int]]:
        """Slots for a cluster: the first, how many, and the first of each CTA's warps (`admit_warps`)."""
        per_cta = warps + _UNITS_A_CTA
        low, size = self._next_slot, per_cta * len(positions)
        self._next_slot += size
        firsts = []
        for number, position in enumerate(positions):
            first = low + number * per_cta
            firsts.append(first)
            self._spare[position.cta] = list(range(first + per_cta - 1, first + warps - 1, -1))
        return low, size, firsts

    def add_unit(self, cta: int) -> int:
        """A slot for an asynchronous unit of a CTA."""
        spare = self._spare[cta]
        if spare:
            return spare.pop()
        self._next_slot += 1
        return self._next_slot - 1

    # ---- memories ----

    def watch(self, memory: Memory, num_bytes: int, name: Callable[[int], str], cta: int = -1) -> None:
        """A memory whose accesses will be reported, of a CTA or global; `name` says what an offset is called."""
        self._shadows[id(memory)] = Shadow(num_bytes, name, cta)

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

    def read(self, thread: Accessor, shadow: Shadow, rows: Array, width: int) -> None:
        """A generic read of rows of `width` bytes by a thread, where it is `at`.

        Raises
        ------
        Fault
            Nothing orders it behind the last write.
        """
        writes, reads = shadow.views(width)
        number = self._number(thread, False, -1)
        self._require_writes(thread, number, writes[rows], (shadow, rows, width), VISIBLE)
        if thread.strong >= 0:
            self._observe(thread, number, writes[rows])
        lanes = shadow.lanes(width)
        if lanes is not None:
            self._note_reading_lanes(thread, lanes[1], reads[rows], rows)
        self._add_reader(thread, number, reads, rows)

    def write(self, thread: Accessor, shadow: Shadow, rows: Array, width: int) -> None:
        """A generic write.

        Raises
        ------
        Fault
            Nothing orders it behind the last write, or behind a read since.
        """
        writes, reads = shadow.views(width)
        number = self._number(thread, True, shadow.space(thread.position))
        cells = (shadow, rows, width)
        self._require_writes(thread, number, writes[rows], cells, EXECUTED)
        self._require_reads(thread, number, reads[rows], cells)
        writes[rows] = number
        reads[rows] = 0
        lanes = shadow.lanes(width)
        if lanes is not None:
            lanes[0][rows] = thread.lane_codes(rows.size)

    # ---- asynchronous operations ----

    def begin(
        self,
        thread: Accessor,
        what: str,
        slot: int,
        time: int = IN_FLIGHT,
        *,
        by_proxy: bool = True,
        strong: int = -1,
    ) -> int:
        """The number of an operation that a thread issues; it counts as done for whoever knows `slot` up to `time`.

        Parameters
        ----------
        by_proxy
            Its accesses go through the asynchronous proxy; those of `st.async` do not.
        strong
            Scope of its accesses where they are strong: those of a reduction are.
        """
        return self._access(thread, what, slot, time, asynchronous=True, by_proxy=by_proxy, strong=strong)

    def complete(self, number: int, time: int) -> None:
        """The time of an operation's slot at which it is complete."""
        self._accesses[number].time = time

    def begin_read(self, thread: Accessor, number: int, shadow: Shadow, rows: Array, width: int = WIDEST) -> None:
        """An operation reads rows of `width` bytes, by default 16-byte granules.

        Raises
        ------
        Fault
            Nothing orders the issue behind the last write, or that write was generic and no proxy fence follows it.
        """
        writes, reads = shadow.views(width)
        self._require_writes(thread, number, writes[rows], (shadow, rows, width), VISIBLE)
        self._add_reader(thread, number, reads, rows)

    def begin_write(self, thread: Accessor, number: int, shadow: Shadow, rows: Array, width: int = WIDEST) -> None:
        """An operation writes rows of `width` bytes, by default 16-byte granules.

        Raises
        ------
        Fault
            Nothing orders the issue behind what was read or written there, or a generic write lacks its proxy fence.
        """
        writes, reads = shadow.views(width)
        cells = (shadow, rows, width)
        self._require_writes(thread, number, writes[rows], cells, EXECUTED)
        self._require_reads(thread, number, reads[rows], cells)
        writes[rows] = number
        reads[rows] = 0
        lanes = shadow.lanes(width)
        if lanes is not None and not self._accesses[number].asynchronous:
            lanes[0][rows] = thread.lane_codes(rows.size)

    def begin_copy(self, thread: Accessor, what: str) -> int:
        """The number of a copy of lanes, a row each, that is nobody's until `take_copy` or `track_copy`."""
        return self._access(thread, what, UNWAITED, IN_FLIGHT)

    def take_copy(self, thread: Accessor, number: int, mine: Array, shadow: Shadow, rows: Array, width: int) -> None:
        """Lanes have waited for their part of a copy, the rows: it is as if they had stored them now."""
        access = self._accesses[number]
        if access.lanes is not None and (access.lanes & ~mine).any():
            # the others' part stays in flight
            access.lanes = access.lanes & ~mine
            access = dataclasses.replace(access, lanes=mine)
            self._accesses.append(access)
            writes, _ = shadow.views(width)
            writes[rows] = np.where(writes[rows] == number, len(self._accesses) - 1, writes[rows])
        access.slot = thread.slot
        thread.open.append(access)
        thread.unfenced[shadow.space(thread.position)].append(access)

    def track_copy(self, number: int, slot: int, time: int) -> None:
        """An mbarrier tracks a copy: who knows a unit up to a time comes after it. It stays a generic write."""
        access = self._accesses[number]
        access.slot, access.time = slot, time

    # ---- inside ----

    def _access(self, thread: Accessor, what: str, slot: int, time: int, **rest: Any) -> int:
        instruction = self._instructions[thread.index]
        access = Access(slot, time, thread.position, instruction, thread.warp, thread.lanes, what, **rest)
        self._accesses.append(access)
        return len(self._accesses) - 1

    def _number(self, thread: Accessor, writes: bool, space: int) -> int:
        """The number of a thread's access by its instruction, the same until the thread's clock ticks.

        Parameters
        ----------
        space
            Of a write, for proxy fences.
        """
        number = thread.recent.get((thread.index, writes))
        if number is None or self._accesses[number].observed:
            what = "write" if writes else "read"
            number = self._access(thread, what, thread.slot, IN_FLIGHT, strong=thread.strong)
            thread.recent[thread.index, writes] = number
            thread.open.append(self._accesses[number])
            if writes:
                thread.unfenced[space].append(self._accesses[number])
        else:
            access = self._accesses[number]
            if access.lanes is not None:
                access.lanes = None if thread.lanes is None else access.lanes | thread.lanes
        return number

    def _observe(self, thread: Accessor, number: int, before: Array) -> None:
        """A write is before whatever follows a morally strong read that found it (PTX ISA 8.9.5, observation order).

        That holds for the write itself; what its thread did before it needs the fences of a release and an acquire.
        """
        access = self._accesses[number]
        for each in distinct(before) - thread.known:
            earlier = self._accesses[each]
            if access.tolerates(earlier):
                earlier.observed = True
                thread.known.add(each)

    def _note_reading_lanes(self, thread: Accessor, codes: Array, before: Array, rows: Array) -> None:
        """Who reads now; several lanes where this thread has read the cell before and nothing covers that yet."""
        own = thread.lane_codes(rows.size)
        for each in distinct(before):
            if any(thread.is_apart(self._accesses[member]) for member in self._readers.members[each]):
                own = np.where(codes[rows] == own, own, thread.several_lanes)
                break
        codes[rows] = own

    def _crosses_lanes(
        self, thread: Accessor, access: Access, earlier: Access, marked: Array, cells: Cells, which: int
    ) -> bool:
        """Whether another lane of the thread made an access at the marked cells."""
        shadow, rows, width = cells
        if access.asynchronous:
            mine = thread.lanes
            return mine is not None and (earlier.lanes is None or bool((earlier.lanes & ~mine).any()))
        lanes = shadow.lanes(width)
        if lanes is None or access.tolerates(earlier):
            return False
        codes = lanes[which][rows]
        other = (codes != thread.lane_codes(rows.size)) & (codes >> LANE_BITS == thread.slot)
        return bool((other & marked).any())

    def _add_reader(self, thread: Accessor, number: int, reads: Array, rows: Array) -> None:
        before = reads[rows]
        sets = distinct(before)
        if len(sets) == 1:
            reads[rows] = self._readers.add(sets.pop(), number, thread.clock)
            return
        after = before.copy()
        for each in sets:
            after[before == each] = self._readers.add(each, number, thread.clock)
        reads[rows] = after

    def _require_writes(self, thread: Accessor, number: int, before: Array, cells: Cells, row: int) -> None:
        """Every last write comes before, and, if generic, is fenced for an operation of the asynchronous proxy.

        `row` says what must be known of a write by an asynchronous operation: to write over it, that it was performed.
        """
        access = self._accesses[number]
        known = thread.known_to_proxy if access.by_proxy else thread.known
        for each in distinct(before) - known:
            earlier = self._accesses[each]
            if thread.is_apart(earlier):
                if self._crosses_lanes(thread, access, earlier, before == each, cells, 0):
                    raise self._lanes_fault(access, earlier, _first(before, each, cells))
                if access.by_proxy and earlier.fence_time == IN_FLIGHT:
                    raise self._proxy_fault(access, earlier, cells[0], _first(before, each, cells))
            elif earlier.is_before(thread.clock, VISIBLE):
                fenced = earlier.asynchronous or earlier.is_fenced_before(thread.clock)
                if access.by_proxy and not fenced:
                    raise self._proxy_fault(access, earlier, cells[0], _first(before, each, cells))
                known.add(each)
            elif not (earlier.asynchronous and earlier.is_before(thread.clock, row)) and not access.tolerates(earlier):
                raise self._race(thread, access, earlier, _first(before, each, cells))

    def _require_reads(self, thread: Accessor, number: int, before: Array, cells: Cells) -> None:
        """Every read since the last write has been performed."""
        access = self._accesses[number]
        for each in distinct(before) - thread.known_readers:
            late = [
                earlier
                for earlier in (self._accesses[member] for member in self._readers.members[each])
                if thread.is_apart(earlier) or not earlier.is_before(thread.clock, EXECUTED)
            ]
            if not late:
                thread.known_readers.add(each)
            for earlier in late:
                if thread.is_apart(earlier):
                    if self._crosses_lanes(thread, access, earlier, before == each, cells, 1):
                        raise self._lanes_fault(access, earlier, _first(before, each, cells))
                elif not access.tolerates(earlier):
                    raise self._race(thread, access, earlier, _first(before, each, cells))

    def _race(self, thread: Accessor, access: Access, earlier: Access, place: str) -> Fault:
        why = "nothing orders the two"
        if (earlier.asynchronous or earlier.slot == UNWAITED) and earlier.time == IN_FLIGHT:
            why = "the other is still in flight"
        elif earlier.is_before(thread.clock, EXECUTED):
            why = "what was released between them is relaxed, or its scope does not hold both threads"
        return Fault("race", f"{access.what} of {place}, and {why}:\n  {earlier.what} by {earlier.where}")

    def _lanes_fault(self, access: Access, earlier: Access, place: str) -> Fault:
        return Fault(
            "race",
            f"{access.what} of {place}, which another lane of the warp touched, and no bar.warp.sync is between:\n"
            f"  {earlier.what} by {earlier.where}",
        )

    def _proxy_fault(self, access: Access, earlier: Access, shadow: Shadow, place: str) -> Fault:
        away = earlier.position.cta != shadow.cta
        space = "global" if shadow.cta < 0 else "shared::cluster" if away else "shared::cta"
        return Fault(
            "proxy",
            f"{access.what} touches {place} by the asynchronous proxy; the generic {earlier.what} there is ordered "
            f"before it, but the writing thread executed no fence.proxy.async.{space} between its write and its "
            f"release:\n  {earlier.what} by {earlier.where}",
        )


def _first(before: Array, number: int, cells: Cells) -> str:
    """What the first place is called whose cells hold a number."""
    shadow, rows, width = cells
    found = (before.reshape(rows.size, -1) == number).any(axis=1)
    return shadow.name(int(rows[int(np.flatnonzero(found)[0])]) * width)
