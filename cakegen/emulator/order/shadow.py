"""Who wrote and who read each cell of a memory last.

A cell is 16 bytes until a narrower access comes; then all cells of that memory become as narrow. So two threads that
write neighbouring elements do not race, and most memories stay coarse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Where, lanes_text
from cakegen.emulator.order.vector_clock import EXECUTED, VISIBLE, Position, VectorClock
from cakegen.emulator.text.ptx import Instruction

Ids = NDArray[np.int32]
Indices = NDArray[np.int64]

WIDEST = 16
# From so many cells on, one or two numbers are looked for first.
_MANY = 64
# Later than any time that a thread can know: an operation that is still in flight.
IN_FLIGHT = (1 << 31) - 1
# The slot of a `cp.async` that nobody waits for yet.
UNWAITED = -1
# What a proxy fence may cover, as its thread sees it: global memory, its CTA's shared memory, that of other CTAs.
GLOBAL_SPACE, OWN_SHARED, PEER_SHARED = range(3)


@dataclass(eq=False, slots=True)
class Access:
    """One instruction's accesses at one time of its slot.

    Parameters
    ----------
    slot, time
        Who made them: a thread that knows this slot up to this time comes after them.
    asynchronous
        By an operation whose completion makes it visible to all proxies.
    by_proxy
        Through the asynchronous proxy.
    strong
        Scope of a strong access (`.relaxed`, `.acquire`, `.volatile`, an atomic); -1 of a weak one.
    fence_time
        Of a generic write: when all lanes that made it had executed a `fence.proxy.async` for its memory.
    fence_lanes
        Those that have, while others have not.
    observed
        Another thread knows it, since a strong read found what it wrote; later writes of its thread are other accesses.
    """

    slot: int
    time: int
    position: Position
    instruction: Instruction
    warp: int
    lanes: NDArray[np.bool_] | None
    what: str
    asynchronous: bool = False
    by_proxy: bool = False
    strong: int = -1
    fence_time: int = IN_FLIGHT
    fence_lanes: NDArray[np.bool_] | None = None
    observed: bool = False

    @property
    def where(self) -> Where:
        """Its place."""
        active = list(range(32)) if self.lanes is None else [int(lane) for lane in np.flatnonzero(self.lanes)]
        return Where(self.instruction, self.position.cta, self.warp, lanes_text(active))

    def is_before(self, clock: VectorClock, row: int) -> bool:
        """Whether a clock knows it."""
        return clock.knows(row, self.slot, self.time)

    def is_fenced_before(self, clock: VectorClock) -> bool:
        """Whether a clock knows the proxy fence behind this write."""
        return clock.knows(VISIBLE, self.slot, self.fence_time)

    def fence(self, lanes: NDArray[np.bool_] | None, time: int) -> bool:
        """Some lanes (None: all) execute a proxy fence; whether all that made this write have now."""
        if lanes is not None and not lanes.all():
            done = lanes if self.fence_lanes is None else self.fence_lanes | lanes
            if self.lanes is None or (self.lanes & ~done).any():
                self.fence_lanes = done
                return False
        self.fence_time = time
        return True

    def tolerates(self, other: Access) -> bool:
        """Both are strong, of one proxy, and their scopes hold each other: no race (PTX ISA 8.7, morally strong)."""
        return (
            min(self.strong, other.strong) >= 0
            and self.by_proxy == other.by_proxy
            and self.position.within(self.strong, other.position)
            and other.position.within(other.strong, self.position)
        )


class ReaderSets:
    """Sets of reads, each kept once: a cell holds a number."""

    def __init__(self, accesses: list[Access]) -> None:
        self._accesses = accesses
        self.members: list[tuple[int, ...]] = [()]
        self._numbers: dict[tuple[int, ...], int] = {(): 0}
        self._after: dict[tuple[int, int], int] = {}

    def add(self, number: int, access: int, clock: VectorClock) -> int:
        """A set and one more read; reads that come before the new one are covered by it."""
        key = (number, access)
        found = self._after.get(key)
        if found is None:
            kept = [each for each in self.members[number] if not self._accesses[each].is_before(clock, EXECUTED)]
            members = tuple(sorted({*kept, access}))
            found = self._numbers.get(members)
            if found is None:
                found = self._numbers[members] = len(self.members)
                self.members.append(members)
            self._after[key] = found
        return found


class Shadow:
    """The last accesses of one memory.

    Parameters
    ----------
    name
        What an offset is called in a report.
    cta
        Whose shared memory it is; -1: global memory.
    """

    def __init__(self, num_bytes: int, name: Callable[[int], str], cta: int = -1) -> None:
        self.name = name
        self.cta = cta
        self.cell = WIDEST
        cells = -(-num_bytes // 64) * 64 // WIDEST
        self._writes: Ids = np.zeros(cells, np.int32)
        self._reads: Ids = np.zeros(cells, np.int32)
        self._lanes: tuple[Ids, Ids] | None = None if cta < 0 else (self._reads.copy(), self._reads.copy())
        self._lane_views: dict[int, tuple[Ids, Ids]] = {}
        self._views: dict[int, tuple[Ids, Ids]] = {}

    def space(self, position: Position) -> int:
        """What this memory is to a thread at a position, for its proxy fences."""
        return GLOBAL_SPACE if self.cta < 0 else OWN_SHARED if self.cta == position.cta else PEER_SHARED

    def views(self, width: int) -> tuple[Ids, Ids]:
        """Last writes and reads as `[n, cells]`: a row is `width` bytes."""
        if width not in self._views:
            if width < self.cell:
                self._refine(width)
            per_row = width // self.cell
            self._views[width] = self._writes.reshape(-1, per_row), self._reads.reshape(-1, per_row)
        return self._views[width]

    def lanes(self, width: int) -> tuple[Ids, Ids] | None:
        """Which lane wrote and read last, as `views`; lanes are told apart in shared memory only.

        A number is `lane_codes`' of the lane that made the last access.
        """
        if self._lanes is None:
            return None
        if width not in self._lane_views:
            self.views(width)
            per_row = width // self.cell
            self._lane_views[width] = self._lanes[0].reshape(-1, per_row), self._lanes[1].reshape(-1, per_row)
        return self._lane_views[width]

    def _refine(self, width: int) -> None:
        self._writes = np.repeat(self._writes, self.cell // width)
        self._reads = np.repeat(self._reads, self.cell // width)
        if self._lanes is not None:
            writes, reads = self._lanes
            self._lanes = np.repeat(writes, self.cell // width), np.repeat(reads, self.cell // width)
        self.cell = width
        self._views.clear()
        self._lane_views.clear()


def distinct(numbers: Ids) -> set[int]:
    """The numbers that occur."""
    if numbers.size > _MANY:
        first = numbers.item(0)
        differ = numbers != first
        if not np.count_nonzero(differ):
            return {first}
        others = numbers[differ]
        second = others.item(0)
        if (others == second).all():
            return {first, second}
        return set(np.unique(others).tolist()) | {first}
    return set(numbers.ravel().tolist())
