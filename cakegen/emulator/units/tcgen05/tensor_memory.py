"""Tensor memory of one CTA: cells, allocation, and what is in flight.

128 lanes x 512 columns of 32-bit cells (PTX ISA 9.7.16.1). Nothing is initialised: a fresh allocation holds NaNs that
no value of a program has. What asynchronous instructions still read or write is marked in groups of 16 lanes, the
finest unit in which they touch a column.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault
from cakegen.emulator.order.vector_clock import EXECUTED, VectorClock
from cakegen.emulator.order.warp_order import WarpOrder
from cakegen.emulator.text.ptx import Instruction

Array = NDArray[Any]

LANES = 128
COLUMNS = 512
GROUP_LANES = 16
ALLOCATION_UNIT = 32
_POISON = 0x7FA5A5A5
_LANE_SHIFT = 16


@dataclass(frozen=True)
class Region:
    """Whole groups of 16 lanes x consecutive columns."""

    groups: slice
    columns: slice

    @property
    def marks(self) -> tuple[slice, slice]:
        """Index into the marks, `[8, 512]`."""
        return self.groups, self.columns

    @property
    def cells(self) -> tuple[slice, slice, slice]:
        """Index into the cells as `[8, 16, 512]`."""
        return self.groups, slice(None), self.columns

    def __str__(self) -> str:
        """Lanes and columns in words."""
        lanes = [GROUP_LANES * group for group in range(8)[self.groups]]
        step = "" if self.groups.step in (None, 1) else " in every other half of a quadrant"
        first, last = self.columns.start, self.columns.stop - 1
        return f"lanes {lanes[0]} to {lanes[-1] + GROUP_LANES - 1}{step}, columns {first} to {last}"


@dataclass(eq=False)
class Owner:
    """Whoever writes cells in flight: its place for reports, and the thread (warp's number, lane) it belongs to."""

    instruction: Instruction
    thread: tuple[int, int]
    number: int
    in_flight: int = 0

    @property
    def is_copy(self) -> bool:
        """Whether it is a tcgen05.cp, behind which the ISA orders mmas of its thread."""
        return self.instruction.parts[1] == "cp"

    def __str__(self) -> str:
        """The instruction and where it stands."""
        warp, lane = self.thread
        who = f"CTA {warp // 64} warp {warp % 64}" + (f" lane {lane}" if lane >= 0 else "")
        return f"`{self.instruction.opcode}` of {who} at {self.instruction.place}"


@dataclass(eq=False)
class TensorTraffic:
    """What one warp has going on with tensor memory.

    Parameters
    ----------
    loads, stores
        Issued, and not yet waited for.
    unfenced
        The warp passed a wait or a barrier after its last `tcgen05.fence::after_thread_sync`.
    ordered
        What the warp knew at that fence.
    fenced
        Number of the warp's last access that a `tcgen05.fence::before_thread_sync` covers.
    """

    loads: list[Any] = field(default_factory=list)
    stores: list[Any] = field(default_factory=list)
    unfenced: bool = False
    ordered: VectorClock | None = None
    fenced: int = 0
    accesses: int = 0


class TensorCta(Protocol):
    """A CTA, as reports name it."""

    @property
    def index(self) -> int:
        """Linear index in the grid."""


class TensorWarp(Protocol):
    """A warp, as far as tensor memory goes."""

    @property
    def number(self) -> int:
        """The same for the same warp in every run."""

    @property
    def index(self) -> int:
        """In its CTA."""

    @property
    def cta(self) -> TensorCta:
        """Its CTA."""

    @property
    def tensor(self) -> TensorTraffic:
        """What it has going on."""

    @property
    def thread(self) -> WarpOrder | None:
        """How the checker of happens-before sees it; None: nothing is checked."""


@dataclass(frozen=True)
class Allocation:
    """Columns that `tcgen05.alloc` gave out."""

    start: int
    columns: int
    cta_group: int


def split_address(address: int) -> tuple[int, int]:
    """(lane, column) of a tensor memory address."""
    return address >> _LANE_SHIFT, address & 0xFFFF


@dataclass(eq=False)
class TensorMemory:
    """The tensor memory that one CTA may use."""

    cells: Array = field(default_factory=lambda: np.full((8, GROUP_LANES, COLUMNS), _POISON, np.uint32))
    written: Array = field(default_factory=lambda: np.zeros((8, GROUP_LANES, COLUMNS), np.bool_))
    allocated: Array = field(default_factory=lambda: np.zeros(COLUMNS, np.bool_))
    allocations: list[Allocation] = field(default_factory=list)
    relinquished: bool = False
    # cta_group::2: what this CTA of a pair waits to do with the other, and what came of it
    offered: tuple[str, int, int] | None = None
    answer: int | None = None
    waiters: list[Any] = field(default_factory=list)
    smallest: int = COLUMNS
    # marks in groups of 16 lanes
    reads: Array = field(default_factory=lambda: np.zeros((8, COLUMNS), np.int16))
    writers: Array = field(default_factory=lambda: np.zeros((8, COLUMNS), np.int64))
    owners: dict[int, Owner] = field(default_factory=dict)
    last_warp: Array = field(default_factory=lambda: np.full((8, COLUMNS), -1, np.int64))
    last_access: Array = field(default_factory=lambda: np.zeros((8, COLUMNS), np.int64))
    # slot << 32 | time of the last access, for the checker of happens-before
    last_stamp: Array = field(default_factory=lambda: np.zeros((8, COLUMNS), np.int64))
    # the last access is a load of which its wait is taken for enough
    loaded: Array = field(default_factory=lambda: np.zeros((8, COLUMNS), bool))
    touched_by: dict[int, TensorWarp] = field(default_factory=dict)

    # ---- allocation ----

    def allocate(self, columns: int, cta_group: int, salt: int) -> int | None:
        """The first column of a new allocation, or None while no room is free.

        Sizes of one CTA must not grow (PTX ISA 9.7.16.7.1), so blocks at multiples of their size never leave gaps that
        are too small. Which of the free ones it is, is up to the device.
        """
        if columns < ALLOCATION_UNIT or columns > COLUMNS or columns & (columns - 1):
            raise Fault("tensor-memory", f"tcgen05.alloc of {columns} columns; needs 32, 64, 128, 256 or 512")
        if self.relinquished:
            raise Fault("tensor-memory", f"tcgen05.alloc of {columns} columns after the CTA gave its permit back")
        if columns > self.smallest:
            raise Fault(
                "tensor-memory",
                f"tcgen05.alloc of {columns} columns after one of {self.smallest}: sizes of a CTA must not grow",
            )
        free = [at for at in range(0, COLUMNS, columns) if not self.allocated[at : at + columns].any()]
        if not free:
            return None
        start = free[salt % len(free)]
        self.smallest = columns
        self.allocations.append(Allocation(start, columns, cta_group))
        self.allocated[start : start + columns] = True
        self.cells[:, :, start : start + columns] = _POISON
        self.written[:, :, start : start + columns] = False
        self.last_warp[:, start : start + columns] = -1
        return start

    def free(self, address: int, columns: int, cta_group: int) -> None:
        """`tcgen05.dealloc`: the same address and size as an allocation, and nothing in flight there."""
        lane, start = split_address(address)
        found = next((a for a in self.allocations if a.start == start and a.columns == columns and lane == 0), None)
        if found is None or found.cta_group != cta_group:
            known = ", ".join(f"{a.columns} columns at {a.start:#x}" for a in self.allocations) or "nothing"
            raise Fault(
                "tensor-memory",
                f"tcgen05.dealloc.cta_group::{cta_group} of {columns} columns at {address:#x}; allocated: {known}",
            )
        region = Region(slice(0, 8), slice(start, start + columns))
        owner = self.writer_in(region)
        if owner is not None:
            raise Fault("pending-write", f"tcgen05.dealloc of columns that {owner} still writes")
        if self.reads[region.marks].any():
            raise Fault("pending-read", "tcgen05.dealloc of columns that a tcgen05.ld or an mma may still read")
        self.allocations.remove(found)
        self.allocated[region.columns] = False

    def check_allocated(self, region: Region, what: str) -> None:
        """Refuse columns outside of every allocation."""
        columns = region.columns
        if columns.stop > COLUMNS or not self.allocated[columns].all():
            known = ", ".join(f"{a.start} to {a.start + a.columns - 1}" for a in self.allocations) or "none"
            raise Fault(
                "out-of-bounds",
                f"{what} touches tensor memory columns {columns.start} to {columns.stop - 1}; allocated: {known}",
            )

    # ---- in flight ----

    def writer_in(self, region: Region, but: Owner | None = None, same_thread: bool = False) -> Owner | None:
        """Somebody else (or, if wanted, another thread) who writes cells of a region in flight."""
        marks = self.writers[region.marks]
        if not marks.any():
            return None
        others = marks[(marks != 0) & (marks != (but.number if but else 0))]
        if not others.size:
            return None
        owners = [self.owners[int(number)] for number in np.unique(others)]
        if same_thread and but is not None:
            owners = [owner for owner in owners if owner.thread != but.thread]
        return owners[0] if owners else None

    def refuse_writers(self, region: Region, what: str, but: Owner | None = None, same_thread: bool = False) -> None:
        """Refuse to touch cells that somebody else writes in flight."""
        owner = self.writer_in(region, but, same_thread)
        if owner is not None:
            raise Fault("pending-write", f"{what} touches {region}, which {owner} still writes: {_remedy(owner)}")

    def refuse_readers(self, region: Region, what: str) -> None:
        """Refuse to write cells that a load has not finished with."""
        marks = self.reads[region.marks]
        if marks.any():
            raise Fault(
                "pending-read",
                f"{what} writes {region}, which a tcgen05.ld without its wait::ld, or an mma, may still read",
            )

    def hand_over(
        self, region: Region, warp: TensorWarp, what: str, unit: tuple[int, int] | None = None, needs_fence: bool = True
    ) -> None:
        """A warp touches cells: another that touched them last must come before, and both must have fenced.

        Parameters
        ----------
        unit
            Of an access that a `tcgen05.commit` will cover, which is a fence before its arrival: the unit's slot and
            the time that the commit brings it to.
        needs_fence
            Whether this access wants a `fence::before_thread_sync` before the next warp's; earlier ones of this warp
            want theirs in any case.
        """
        last = self.last_warp[region.marks]
        others = (last >= 0) & (last != warp.number)
        if others.any():
            self._require_order(region, warp, what, last, others)
        if unit is None:
            self._require_complete(region, warp, what, last)
        warp.tensor.accesses += 1
        self.touched_by[warp.number] = warp
        self.last_warp[region.marks] = warp.number
        self.loaded[region.marks] = not needs_fence
        if not needs_fence:
            self.last_access[region.marks] *= last == warp.number
        else:
            self.last_access[region.marks] = warp.tensor.accesses if unit is None else 0
        if warp.thread is not None:
            slot, time = unit or (warp.thread.slot, warp.thread.now)
            self.last_stamp[region.marks] = slot << 32 | time

    def _require_order(self, region: Region, warp: TensorWarp, what: str, last: Array, others: Array) -> None:
        numbers, stamps = self.last_access[region.marks], self.last_stamp[region.marks]
        for number in np.unique(last[others]):
            other = self.touched_by[int(number)]
            who = f"{what} touches {region}, which CTA {other.cta.index} warp {other.index} touched last"
            thread, ordered = warp.thread, warp.tensor.ordered
            for stamp in map(int, np.unique(stamps[last == number])):
                access = EXECUTED, stamp >> 32, stamp & 0xFFFFFFFF
                if thread is not None and not thread.clock.knows(*access):
                    raise Fault("race", f"{who}, and nothing orders the two")
                if thread is not None and (ordered is None or not ordered.knows(*access)):
                    raise Fault(
                        "fence",
                        f"{who}: no tcgen05.fence::after_thread_sync stands behind the wait that orders the two",
                    )
            if int(numbers[last == number].max()) > other.tensor.fenced:
                raise Fault("fence", f"{who}: it has executed no tcgen05.fence::before_thread_sync since")

    def _require_complete(self, region: Region, warp: TensorWarp, what: str, last: Array) -> None:
        """What the warp itself issued asynchronously must be known to be complete: a commit was waited for."""
        for stamp in map(int, np.unique(self.last_stamp[region.marks][last == warp.number])):
            if warp.thread is not None and not warp.thread.clock.knows(EXECUTED, stamp >> 32, stamp & 0xFFFFFFFF):
                raise Fault(
                    "race",
                    f"{what} touches {region}, which a tcgen05.mma or cp of its own warp touched last, and no wait for "
                    "a commit that covers it stands between",
                )

    def check_order_of_free(self, columns: slice, warp: TensorWarp) -> None:
        """`dealloc` comes behind whoever touched the columns last; it is synchronous, so no tcgen05 fence is needed.

        A load that needs no fence is over with its wait: it must come first, but need not be visible to this warp.

        Raises
        ------
        Fault
            Nothing orders it behind an access of another warp, or behind what its own issued.
        """
        region = Region(slice(0, 8), columns)
        last, stamps = self.last_warp[region.marks], self.last_stamp[region.marks]
        touched = (last >= 0) & ~self.loaded[region.marks]
        for stamp in map(int, np.unique(stamps[touched])):
            if warp.thread is not None and not warp.thread.clock.knows(EXECUTED, stamp >> 32, stamp & 0xFFFFFFFF):
                other = self.touched_by[int(last[touched & (stamps == stamp)][0])]
                raise Fault(
                    "race",
                    f"tcgen05.dealloc frees columns {columns.start} to {columns.stop - 1}, which CTA {other.cta.index} "
                    f"warp {other.index} touched last, and nothing orders the two",
                )

    def begin_write(self, region: Region, owner: Owner) -> None:
        """Cells are in flight until `end_write`."""
        self.writers[region.marks] = owner.number
        self.owners[owner.number] = owner

    def end_write(self, region: Region, owner: Owner) -> None:
        """What this owner wrote is there."""
        marks = self.writers[region.marks]
        marks[marks == owner.number] = 0

    def require_written(self, region: Region, what: str) -> None:
        """Refuse to read cells that nothing wrote."""
        if not self.written[region.cells].all():
            raise Fault(
                "unwritten-read", f"{what} reads {region} of tensor memory, where nothing has written all cells"
            )

    def store(self, region: Region, values: Array) -> None:
        """Write `[groups, 16, columns]` cells (any 32-bit type)."""
        self.cells[region.cells] = values.view(np.uint32)
        self.written[region.cells] = True

    def load(self, region: Region) -> Array:
        """`[groups, 16, columns]` cells."""
        found: Array = self.cells[region.cells]
        return found


def _remedy(owner: Owner) -> str:
    if owner.instruction.parts[1] == "st":
        return "its tcgen05.wait::st has not been executed"
    return "no tcgen05.commit of the thread that issued it has arrived at its mbarrier"
