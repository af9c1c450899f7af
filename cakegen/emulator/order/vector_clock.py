"""Leaf module: vector clocks, and the points through which they travel from one thread to another.

A *slot* is one thread of control: a warp, or an asynchronous unit (the copies that count on one mbarrier, the wgmmas of
one warp). A vector clock says of every slot up to which time of that slot something is known. It has two rows:

| row | what is known up to that time |
| --- | --- |
| `VISIBLE` | accesses that happen before, so that their writes are seen (PTX ISA 8.9.5, causality order) |
| `EXECUTED` | accesses that have been performed: enough to overwrite what they read |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

VISIBLE, EXECUTED = range(2)
ROWS = 2
# Scopes, each inside of the next; `sys` reaches what `gpu` does, since there is one GPU.
CTA, CLUSTER, GPU = range(3)
SCOPES = {"cta": CTA, "cluster": CLUSTER, "gpu": GPU, "sys": GPU}


class VectorClock:
    """Times of the slots `low` and on; of all others nothing is known."""

    __slots__ = ("low", "rows")

    def __init__(self, low: int, size: int) -> None:
        self.low = low
        self.rows: NDArray[np.int32] = np.zeros((ROWS, size), np.int32)

    def copy(self) -> VectorClock:
        """The same knowledge, on its own."""
        other = VectorClock.__new__(VectorClock)
        other.low, other.rows = self.low, self.rows.copy()
        return other

    def knows(self, row: int, slot: int, time: int) -> bool:
        """Whether a slot is known up to a time."""
        column = slot - self.low
        return 0 <= column < self.rows.shape[1] and self.rows.item(row, column) >= time

    def time_of(self, slot: int, row: int) -> int:
        """The time up to which a slot is known; 0: nothing is known of it."""
        column = slot - self.low
        return int(self.rows[row, column]) if 0 <= column < self.rows.shape[1] else 0

    def learn(self, slot: int, time: int, row: int | None = None) -> None:
        """One slot is known up to a time: in one row, or in both."""
        self._cover(slot, slot + 1)
        column = slot - self.low
        for each in range(ROWS) if row is None else (row,):
            if self.rows.item(each, column) < time:
                self.rows[each, column] = time

    def advance(self, slot: int, time: int) -> None:
        """The time of the thread whose clock it is."""
        self.rows[VISIBLE : EXECUTED + 1, slot - self.low] = time

    def join(self, other: VectorClock, row: int | None = None) -> None:
        """Know what the other knows: all of it, or one row."""
        mine, theirs = self.rows, other.rows
        if self.low != other.low or mine.shape != theirs.shape:
            self._cover(other.low, other.low + theirs.shape[1])
            first = other.low - self.low
            mine = self.rows[:, first : first + theirs.shape[1]]
        if row is None:
            np.maximum(mine, theirs, out=mine)
        else:
            np.maximum(mine[row], theirs[row], out=mine[row])

    def _cover(self, low: int, high: int) -> None:
        end = self.low + self.rows.shape[1]
        if self.low <= low and high <= end:
            return
        first, last = min(low, self.low), max(high, end)
        rows = np.zeros((ROWS, last - first), np.int32)
        rows[:, self.low - first : end - first] = self.rows
        self.low, self.rows = first, rows


@dataclass(frozen=True)
class Position:
    """Where a thread runs: linear index of its CTA in the grid, and of its cluster."""

    cta: int
    cluster: int

    def within(self, scope: int, other: Position) -> bool:
        """Whether a scope around this position holds the other."""
        if scope == CTA:
            return self.cta == other.cta
        return scope == GPU or self.cluster == other.cluster

    def area(self, scope: int) -> tuple[int, int]:
        """The part of the machine that a scope around this position holds."""
        return scope, (self.cta, self.cluster, 0)[scope]


@dataclass(frozen=True)
class Released:
    """What an arrival on its way publishes: a clock, who sends it from where, and its scope."""

    clock: VectorClock
    position: Position
    scope: int


class SyncPoint:
    """What was released at one place: a barrier, or one word of memory.

    A release at a scope leaves its knowledge with everyone inside of the scope; an acquire takes what was left with
    areas inside of its own scope. So an edge needs both scopes to hold both threads. Whatever the scopes, that
    earlier accesses were performed is known (`EXECUTED`), unless scopes are taken as strictly as the ISA has them.
    """

    __slots__ = ("_areas", "_performed")

    def __init__(self) -> None:
        self._areas: dict[tuple[int, int], VectorClock] = {}
        self._performed: VectorClock | None = None

    def release(self, clock: VectorClock, position: Position, scope: int, home: Position | None = None) -> None:
        """Leave a clock here.

        Parameters
        ----------
        home
            Where everyone who will acquire runs, if that is known: other areas get nothing.
        """
        if home is not None and position.cta == home.cta:
            self.leave((CTA, home.cta), clock)
            return
        for level in range(scope + 1):
            area = position.area(level)
            if home is None or area == home.area(level):
                self.leave(area, clock)
        if self._performed is None:
            self._performed = clock.copy()
        else:
            self._performed.join(clock, EXECUTED)

    def land(self, slot: int, time: int, position: Position, scope: int) -> None:
        """An asynchronous unit has got to a time; who acquires at the scope's area, or inside of it, sees it."""
        for level in range(scope, GPU):
            area = position.area(level)
            if area not in self._areas:
                self._areas[area] = VectorClock(slot, 1)
            self._areas[area].learn(slot, time)
        if self._performed is None:
            self._performed = VectorClock(slot, 1)
        self._performed.learn(slot, time, EXECUTED)

    def parts(self, position: Position, scope: int) -> Iterator[tuple[int, VectorClock]]:
        """(scope, clock) of what was left for this position, up to a scope."""
        for level in range(scope + 1):
            left = self._areas.get(position.area(level))
            if left is not None:
                yield level, left

    def acquire(self, clock: VectorClock, position: Position, scope: int, *, strict: bool = False) -> None:
        """Take what was left for this position; unless `strict`, of everybody that accesses were performed."""
        for _, left in self.parts(position, scope):
            clock.join(left)
        if not strict:
            self.observe(clock)

    def observe(self, clock: VectorClock) -> None:
        """Take only that accesses were performed."""
        if self._performed is not None:
            clock.join(self._performed, EXECUTED)

    def returned(self, slot: int, position: Position, scope: int, *, strict: bool) -> int:
        """Up to which time of its own slot an acquire brings back what the thread itself released."""
        times = [left.time_of(slot, VISIBLE) for _, left in self.parts(position, scope)]
        if self._performed is not None and not strict:
            times.append(self._performed.time_of(slot, EXECUTED))
        return max(times, default=0)

    def leave(self, area: tuple[int, int], clock: VectorClock) -> None:
        """Leave a clock for one area."""
        if area in self._areas:
            self._areas[area].join(clock)
        else:
            self._areas[area] = clock.copy()

    def clear(self) -> None:
        """Somebody overwrote the word: who reads it now acquires nothing older."""
        self._areas.clear()
        self._performed = None

    def copy(self) -> SyncPoint:
        """What has been left up to now."""
        other = SyncPoint()
        other._areas = {area: clock.copy() for area, clock in self._areas.items()}
        other._performed = self._performed.copy() if self._performed is not None else None
        return other
