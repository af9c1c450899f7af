"""What launches that run side by side read and wrote, byte by byte.

A launch that starts before the one in front of it in the stream has completed sees none of that one's writes for
certain, also those from before its trigger; only `griddepcontrol.wait` orders the two (PTX ISA 9.7.13.13; CUDA C++
Programming Guide, programmatic dependent launch). So what two incomplete launches touch must be apart, or only read;
whichever comes first in this schedule, the conflict is seen when the second access is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.memory import Buffer

Marks = NDArray[np.uint8]
Offsets = NDArray[Any]

# A byte's mark has one bit for each slot's reads in its low half, and one for its writes in its high half.
MOST_OVERLAPPING = 4
_READS, _WRITES = 0x0F, 0xF0


class Overlap:
    """The accounts of launches that have started and not completed."""

    def __init__(self) -> None:
        self._marks: dict[Buffer, Marks] = {}
        self._slots: list[LaunchAccesses | None] = [None] * MOST_OVERLAPPING

    def open(self, name: str) -> LaunchAccesses:
        """An account for a launch that starts; at most `MOST_OVERLAPPING` are open."""
        slot = self._slots.index(None)
        account = self._slots[slot] = LaunchAccesses(self, name, slot)
        return account

    def close(self, account: LaunchAccesses) -> None:
        """A launch has completed: whoever waited for it sees what it wrote, and may write what it read."""
        self._slots[account.slot] = None
        for marks in self._marks.values():
            marks &= np.uint8(0xFF ^ (0x11 << account.slot))

    def others(self, slot: int) -> int:
        """Bits of the reads of all other open accounts."""
        return sum(1 << number for number, account in enumerate(self._slots) if account and number != slot)

    def name(self, bits: int) -> str:
        """The launch that some read or write bits belong to; of several, the first."""
        return next(a.name for n, a in enumerate(self._slots) if a is not None and bits & 0x11 << n)

    def marks(self, buffer: Buffer) -> Marks:
        """One mark a byte of an allocation."""
        if buffer not in self._marks:
            self._marks[buffer] = np.zeros(buffer.num_bytes, np.uint8)
        return self._marks[buffer]


class LaunchAccesses:
    """One launch's account: every access to global memory is entered, and compared with the others'."""

    def __init__(self, overlap: Overlap, name: str, slot: int) -> None:
        self.name = name
        self.slot = slot
        self._overlap = overlap

    def read(self, buffer: Buffer, offsets: Offsets, width: int) -> None:
        """Reads of `width` bytes at offsets that are multiples of it."""
        self._enter_rows(buffer, offsets, width, False)

    def write(self, buffer: Buffer, offsets: Offsets, width: int) -> None:
        """Writes, likewise."""
        self._enter_rows(buffer, offsets, width, True)

    def read_at(self, buffer: Buffer, select: Callable[[Marks], Marks]) -> None:
        """Reads of what `select` takes, as a view, of an allocation's marks."""
        view = select(self._overlap.marks(buffer))
        self._check(buffer, view, False, None)
        view |= np.uint8(1 << self.slot)

    def _enter_rows(self, buffer: Buffer, offsets: Offsets, width: int, writes: bool) -> None:
        marks = self._overlap.marks(buffer)
        rows = marks[: marks.size // width * width].reshape(-1, width)
        index = (offsets // np.uint64(width)).astype(np.int64)
        found = rows[index]
        self._check(buffer, found, writes, offsets)
        rows[index] = found | np.uint8((0x10 if writes else 0x01) << self.slot)

    def _check(self, buffer: Buffer, marks: Marks, writes: bool, offsets: Offsets | None) -> None:
        others = self._overlap.others(self.slot)
        against = others << 4 | (others if writes else 0)
        if not against:
            return
        conflict = marks & np.uint8(against)
        if not conflict.any():
            return
        bits = int(conflict[conflict != 0][0])
        first = np.argwhere(conflict)[0]
        where = buffer.name if offsets is None else f"{buffer.name} + {int(offsets[first[0]]) + int(first[1])}"
        done = "has written" if bits & _WRITES else "has read"
        raise Fault(
            "programmatic",
            f"{self.name} {'writes' if writes else 'reads'} {where}, which {self._overlap.name(bits)} {done}, and "
            "neither has completed: nothing orders the two. In the later launch, griddepcontrol.wait must come before "
            "the first access to what an earlier one reads or writes",
        )
