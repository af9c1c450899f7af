"""A warp as the checker of happens-before sees it: its clock, and how the clock grows.

A warp has one clock, but its lanes are told apart: an access is *open* until a release by its own lanes, a barrier
or a `bar.warp.sync` covers it. Open accesses are known to nobody else. To another lane of the warp an access is known
once a barrier or a `bar.warp.sync` has come, or what was released behind it has been acquired here again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault
from cakegen.emulator.order.access_order import LANE_BITS, AccessOrder, Memory
from cakegen.emulator.order.shadow import PEER_SHARED, Access
from cakegen.emulator.order.vector_clock import EXECUTED, GPU, VISIBLE, Position, Released, SyncPoint, VectorClock
from cakegen.emulator.units.barriers import BarrierOrder

Array = NDArray[Any]
Mask = NDArray[np.bool_] | None


class WarpOrder:
    """One warp, as the checker sees it."""

    def __init__(self, clocks: AccessOrder, slot: int, low: int, size: int, position: Position, warp: int) -> None:
        self.clocks = clocks
        self.slot = slot
        self.position = position
        self.warp = warp
        self.clock = VectorClock(low, size)
        self.now = 0
        self.index, self.strong, self._orders, self._chained, self._collective = 0, -1, False, False, False
        self.lanes: Mask = None
        # accesses that are known to come before: a clock only grows
        self.known: set[int] = {0}
        self.known_to_proxy: set[int] = {0}
        self.known_readers: set[int] = {0}
        self.recent: dict[tuple[int, bool], int] = {}
        self.open: list[Access] = []
        # generic writes that no proxy fence covers, by their space
        self.unfenced: tuple[list[Access], ...] = tuple([] for _ in range(PEER_SHARED + 1))
        # up to this time, each lane's accesses are known to every other
        self.met = 0
        # the same, of what a relaxed barrier of the cluster shows: initialisations
        self._shown = 0
        self._codes = ((slot << LANE_BITS) + np.arange(32, dtype=np.int32)).reshape(32, 1)
        self._fenced: list[VectorClock | None] = [None] * (GPU + 1)
        self._observed: list[VectorClock | None] = [None] * (GPU + 1)
        self._initialised: VectorClock | None = None
        self.tick()

    def at(
        self,
        index: int,
        lanes: Mask,
        strong: int = -1,
        *,
        orders: bool = False,
        chained: bool = False,
        collective: bool = False,
    ) -> WarpOrder:
        """Itself, about to touch memory by the instruction of that index.

        Parameters
        ----------
        strong
            Scope of a strong access; -1: weak.
        orders
            A strong read acquires, a strong write releases; else they are relaxed.
        chained
            The write belongs to an atomic: what others released through the word stays released.
        collective
            Each row that is touched comes from several lanes.
        """
        self.index, self.lanes, self.strong, self._orders, self._chained = index, lanes, strong, orders, chained
        self._collective = collective
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
        else:
            self.observe(point, self.strong)

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
        self.clock.advance(self.slot, self.now)
        self.recent.clear()

    @property
    def several_lanes(self) -> int:
        """The code of more than one lane of this warp."""
        return (self.slot << LANE_BITS) + 32

    def lane_codes(self, count: int) -> Array:
        """`[count, 1]`: which lane of which warp makes each of the accesses that it is `at`."""
        if count == 32 and not self._collective and (self.lanes is None or self.lanes.all()):
            return self._codes
        active = None if self.lanes is None else np.flatnonzero(self.lanes)
        if active is None or active.size != count:
            # rows of a matrix: each comes from several lanes
            return np.full((count, 1), self.several_lanes, np.int32)
        return self._codes[active]

    def close(self, lanes: Mask) -> None:
        """What these lanes accessed (None: all lanes) is covered by what they do now."""
        if lanes is None or lanes.all():
            for access in self.open:
                access.time = self.now
            self.open.clear()
            return
        kept = []
        for access in self.open:
            if access.lanes is None or (access.lanes & ~lanes).any():
                kept.append(access)
            else:
                access.time = self.now
        self.open = kept

    def sync_lanes(self, lanes: Mask) -> None:
        """`bar.warp.sync`: what the lanes accessed before comes before what they do next (PTX ISA 9.7.13.2)."""
        self.close(lanes)
        self.met = self.now
        self.tick()

    def is_apart(self, access: Access) -> bool:
        """Whether it is the warp's own, and its lanes do not know of each other's part in it yet."""
        return access.slot == self.slot and access.time > self.met

    def knows_barrier(self, order: BarrierOrder) -> bool:
        """Whether the lanes that it is `at` come after an mbarrier's initialisation."""
        slot, time = order.initialised
        if slot == self.slot and time > max(self.met, self._shown) and order.lanes is not None:
            return self.lanes is not None and not (self.lanes & ~order.lanes).any()
        return self.clock.knows(EXECUTED, slot, time)

    def _meet(self, clock: VectorClock) -> None:
        """What comes back from elsewhere is known to all lanes."""
        self.met = max(self.met, clock.time_of(self.slot, VISIBLE))
        self._shown = max(self._shown, clock.time_of(self.slot, EXECUTED))

    def learn(self, slot: int, time: int) -> None:
        """A unit's operations up to a time are complete and visible here."""
        self.clock.learn(slot, time)

    def release(self, point: SyncPoint, scope: int, home: Position | None = None) -> None:
        """Leave what the lanes it is `at` know for those who acquire inside of the scope."""
        self.close(self.lanes)
        point.release(self.clock, self.position, scope, home)
        self.tick()

    def releasing(self, scope: int) -> Released:
        """What an arrival that happens now publishes, by the lanes it is `at`; then it must `tick`."""
        self.close(self.lanes)
        return Released(self.clock, self.position, scope)

    def released(self, scope: int) -> Released:
        """The same of an arrival on its way, whenever it arrives."""
        self.close(self.lanes)
        released = Released(self.clock.copy(), self.position, scope)
        self.tick()
        return released

    def acquire(self, point: SyncPoint, scope: int) -> None:
        """Take what was released at a point for this thread's place."""
        strict = self.clocks.strict_scopes
        self.met = max(self.met, point.returned(self.slot, self.position, scope, strict=strict))
        point.acquire(self.clock, self.position, scope, strict=strict)

    def observe(self, point: SyncPoint, scope: int) -> None:
        """Read without an order of its own: a later fence acquires what was released there."""
        for level, left in point.parts(self.position, scope):
            observed = self._observed[level]
            if observed is None:
                self._observed[level] = observed = left.copy()
            else:
                observed.join(left)
            if not self.clocks.strict_scopes:
                point.observe(observed)

    def join(self, clock: VectorClock) -> None:
        """Take all of a clock: a barrier of the CTA, or of the cluster."""
        self._meet(clock)
        self.clock.join(clock)

    def leave(self, clock: VectorClock | None) -> VectorClock:
        """A clock, from now on with all that is known here: a barrier of whole warps."""
        self.close(None)
        if clock is None:
            clock = self.clock.copy()
        else:
            clock.join(self.clock)
        self.tick()
        return clock

    # ---- fences ----

    def fence(self, lanes: Mask, scope: int, *, releases: bool = True, acquires: bool = True) -> None:
        """`fence.acq_rel`, `fence.sc`: later strong writes release, and earlier strong reads acquire."""
        if acquires:
            for level in range(scope + 1):
                observed = self._observed[level]
                if observed is not None:
                    self._meet(observed)
                    self.clock.join(observed)
        if releases:
            self.close(lanes)
            snapshot = self.clock.copy()
            for level in range(scope + 1):
                self._fenced[level] = snapshot
            self.tick()

    def fence_proxy(self, lanes: Mask, spaces: Iterable[int]) -> None:
        """`fence.proxy.async`: the lanes' own generic writes up to now. It is no fence of memory: nothing is closed."""
        for space in spaces:
            unfenced = self.unfenced[space]
            unfenced[:] = [access for access in unfenced if not access.fence(lanes, self.now)]
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


def admit_warps(clocks: AccessOrder, positions: Sequence[Position], warps: int) -> list[list[WarpOrder]]:
    """The warps of a cluster's CTAs; nothing is known to them."""
    low, size, firsts = clocks.admit(positions, warps)
    return [
        [WarpOrder(clocks, first + warp, low, size, position, warp) for warp in range(warps)]
        for first, position in zip(firsts, positions, strict=True)
    ]


def refuse_conflict(thread: WarpOrder | None, found: Array, values: Array, offsets: Array, place: str) -> None:
    """Two lanes of one weak store wrote different values to one place: which of them stays is open (PTX ISA 8.7)."""
    if thread is None or thread.strong >= 0 or found.tobytes() == values.tobytes():
        return
    lost = int(offsets[(found != values).any(axis=1)][0])
    raise Fault("race", f"two lanes of one store write different values to {place} {lost}")
