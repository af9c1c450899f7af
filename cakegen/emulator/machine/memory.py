"""Global memory as one allocation a tensor, and the shared memory of one CTA.

A read of bytes that nothing wrote, an access outside an allocation or in the gap between two pitched rows, and an
access to a region that an asynchronous operation still writes or reads are faults.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.copied_bytes import CopiedBytes
from cakegen.emulator.machine.extents import Extents
from cakegen.emulator.order.warp_order import WarpOrder, refuse_conflict
from cakegen.emulator.units.barriers import MBarrier

Bytes = NDArray[np.uint8]
Lanes = NDArray[Any]

GRANULE = 16
# CTAs of one launch that an output's account of its writers tells apart (int32: up to 2047 launches).
MOST_CTAS = 1 << 20
# The first KiB of the shared window belongs to the system (observed in ptxas 13.0 output; an implementation fact that
# keeps programs from taking offset 0 for granted).
SHARED_START = 0x400
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
# Where the generic address space shows the shared and the parameter window; above any address of a process.
SHARED_WINDOW = 1 << 60
PARAM_WINDOW = 2 << 60
_POISON = 0xA5
# Told of accesses by threads: the allocation, offsets, their width in bytes, and whether they write.
Observer = Callable[["Buffer", Lanes, int, bool], None]
# Eight bytes of the shadow, all of them written.
_WRITTEN = np.uint64(0x0101010101010101)


@dataclass(eq=False)
class Buffer:
    """One allocation, and which of its bytes are a tensor's.

    Parameters
    ----------
    base
        Where programs see it.
    extents
        The tensor's bytes; None: all.
    host
        Where its bytes are in this process; 0: at `base`.
    output
        The program must write every element, each from one CTA of a launch, and before anything reads it.
    read_only
        An input: a write to it is a fault, so that nothing needs to be ordered with its reads.
    """

    name: str
    base: int
    num_bytes: int
    extents: Extents | None = None
    output: bool = False
    read_only: bool = False
    host: int = 0
    data: Bytes = field(init=False)
    writer: NDArray[np.int32] | None = field(init=False, default=None)
    _views: dict[int, Bytes] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        memory = (ctypes.c_uint8 * self.num_bytes).from_address(self.host or self.base)
        self.data = np.ctypeslib.as_array(memory)
        if self.output:
            self.writer = np.zeros(-(-self.num_bytes // 2), np.int32)

    def holds(self, address: int) -> bool:
        """Whether an address is the tensor's: the spans of two column ranges of one matrix interleave."""
        offset = address - self.base
        return 0 <= offset < self.num_bytes and (self.extents is None or self.extents.holds(offset))

    def place(self, offset: int) -> str:
        """What an offset is called."""
        return f"{self.name} + {offset}"

    def rows(self, width: int) -> Bytes:
        """The memory as `[n, width]` bytes; what does not fill a last row is left out."""
        if width not in self._views:
            self._views[width] = self.data[: self.num_bytes // width * width].reshape(-1, width)
        return self._views[width]

    def check(self, offsets: Lanes, width: int, what: str) -> None:
        """Refuse accesses outside of the tensor, or not aligned to their width."""
        if int(offsets.max()) + width > self.num_bytes:
            bad = int(offsets.max())
            self._refuse(bad, width, what, f"its {self.num_bytes} bytes end before")
        if np.count_nonzero(offsets & np.uint64(width - 1)) or self.base % width:
            raise Fault("out-of-bounds", f"{what} of {width} bytes at {self.name} + {int(offsets[0])} is not aligned")
        if self.extents is not None:
            beyond = self.extents.outside(offsets, width)
            if np.count_nonzero(beyond):
                self._refuse(int(offsets[beyond][0]), width, what, "it reaches between two rows")

    def _refuse(self, offset: int, width: int, what: str, why: str) -> None:
        raise Fault("out-of-bounds", f"{what} of {width} bytes at {self.name} + {offset}: {why}")

    def note_write(self, offsets: Lanes, width: int, cta: int) -> None:
        """Remember which CTA wrote an output: `launch * MOST_CTAS + index`. A later launch may write again."""
        if self.read_only:
            raise Fault("output", f"{self.name} + {int(offsets[0])} is written; it is an input")
        if self.writer is None:
            return
        cells = (offsets >> np.uint64(1)).astype(np.int64)[:, None] + np.arange(max(1, width // 2))
        before = self.writer[cells]
        other = (before > cta // MOST_CTAS * MOST_CTAS) & (before != cta + 1)
        if np.count_nonzero(other):
            first, index = int(before[other][0]) - 1, cta % MOST_CTAS
            raise Fault(
                "output",
                f"{self.name} + {int(cells[other][0]) * 2} is written by CTA {index} and was by CTA "
                f"{first % MOST_CTAS}",
            )
        self.writer[cells] = cta + 1

    def check_written(self, offsets: Lanes, width: int) -> None:
        """Refuse to read elements of an output that nothing has written."""
        if self.writer is None:
            return
        cells = (offsets >> np.uint64(1)).astype(np.int64)[:, None] + np.arange(max(1, width // 2))
        unwritten = self.writer[cells] == 0
        if np.count_nonzero(unwritten):
            raise Fault("unwritten-read", f"{self.name} + {int(cells[unwritten][0]) * 2} is read before it is written")

    def unwritten_bytes(self) -> int:
        """Bytes of an output that no CTA wrote."""
        assert self.writer is not None
        unwritten = self.writer == 0
        if self.extents is None:
            return int(np.count_nonzero(unwritten)) * 2
        missing = np.flatnonzero(unwritten) * 2
        return int(np.count_nonzero(~self.extents.outside(missing, 2))) * 2


class AccessAccount(Protocol):
    """What enters a launch's accesses where another may run beside it (`order.overlap`)."""

    def read(self, buffer: Buffer, offsets: Lanes, width: int) -> None:
        """Reads of `width` bytes at offsets that are multiples of it."""

    def write(self, buffer: Buffer, offsets: Lanes, width: int) -> None:
        """Writes, likewise."""

    def read_at(self, buffer: Buffer, select: Callable[[Bytes], Bytes]) -> None:
        """Reads of what `select` takes, as a view, of an allocation's bytes."""


class GlobalMemory:
    """The allocations that a launch may touch.

    Parameters
    ----------
    launch
        Its number in the stream.
    accesses
        Its account of what it read and wrote, where another launch may run beside it.
    """

    def __init__(self, buffers: list[Buffer], launch: int = 0, accesses: AccessAccount | None = None) -> None:
        self.buffers = buffers
        self.accesses = accesses
        self.observer: Observer | None = None
        self._first_writer = launch * MOST_CTAS
        self._last = buffers[0] if buffers else None

    def find(self, addresses: Lanes, width: int, what: str) -> tuple[Buffer, Lanes]:
        """The allocation of some addresses, and the offsets into it.

        Raises
        ------
        Fault
            They lie in none, in more than one, or outside its rows.
        """
        buffer = self._last
        if buffer is None or not buffer.holds(int(addresses[0])):
            buffer = self._search(int(addresses[0]), width, what)
            self._last = buffer
        offsets = addresses - np.uint64(buffer.base)
        buffer.check(offsets, width, what)
        return buffer, offsets

    def _search(self, address: int, width: int, what: str) -> Buffer:
        for buffer in self.buffers:
            if buffer.holds(address):
                return buffer
        below = [b for b in self.buffers if b.base <= address]
        near = max(below, key=lambda b: b.base) if below else None
        hint = f"; it is byte {address - near.base} of {near.name}, which has {near.num_bytes}" if near else ""
        raise Fault("out-of-bounds", f"{what} of {width} bytes at {address:#x}, which is in no tensor{hint}")

    def load(self, addresses: Lanes, width: int, thread: WarpOrder | None = None) -> Bytes:
        """`[lanes, width]` bytes; by a thread, if the order of accesses is checked."""
        buffer, offsets = self.find(addresses, width, "read")
        self.note_read(buffer, offsets, width)
        rows = (offsets // np.uint64(width)).astype(np.int64)
        if thread is not None and not buffer.read_only:
            thread.read(buffer, rows, width)
        return buffer.rows(width)[rows]

    def require_constant(self, addresses: Lanes, width: int, thread: WarpOrder | None) -> None:
        """Refuse a read through the non-coherent path of what this launch has written (PTX ISA 9.7.9.9)."""
        buffer, offsets = self.find(addresses, width, "read")
        if thread is None or buffer.read_only:
            return
        writes, _ = thread.clocks.shadow(buffer).views(width)
        if writes[(offsets // np.uint64(width)).astype(np.int64)].any():
            raise Fault("race", f"ld.global.nc of {buffer.name} + {int(offsets[0])}, which this launch has written")

    def store(self, addresses: Lanes, values: Bytes, cta: int, thread: WarpOrder | None = None) -> None:
        """Write `[lanes, width]` bytes."""
        width = values.shape[1]
        buffer, offsets = self.find(addresses, width, "write")
        self.note_write(buffer, offsets, width, cta)
        rows = (offsets // np.uint64(width)).astype(np.int64)
        if thread is not None:
            thread.write(buffer, rows, width)
        cells = buffer.rows(width)
        cells[rows] = values
        refuse_conflict(thread, cells[rows], values, offsets, f"{buffer.name} +")

    def note_read(self, buffer: Buffer, offsets: Lanes, width: int) -> None:
        """Refuse a read that no order puts behind the write that it wants."""
        if self.accesses is not None:
            self.accesses.read(buffer, offsets, width)
        if self.observer is not None:
            self.observer(buffer, offsets, width, False)
        buffer.check_written(offsets, width)

    def note_write(self, buffer: Buffer, offsets: Lanes, width: int, cta: int) -> None:
        """Refuse a write to an input, or one that no order puts behind another."""
        if self.accesses is not None:
            self.accesses.write(buffer, offsets, width)
        if self.observer is not None:
            self.observer(buffer, offsets, width, True)
        buffer.note_write(offsets, width, self._first_writer + cta)


class SharedMemory:
    """Shared memory of one CTA: bytes, which of them were written, and what asynchronous operations hold.

    Parameters
    ----------
    rank
        The CTA's rank in its cluster: bits 24 and up of every address.
    num_bytes
        End of the memory; the first `SHARED_START` bytes are not the program's.
    """

    def __init__(self, rank: int, num_bytes: int) -> None:
        self.rank = rank
        self.num_bytes = num_bytes
        size = -(-num_bytes // 1024) * 1024
        self.data = np.full(size, _POISON, np.uint8)
        self.elements = self.data.view(np.uint16)
        self.valid = np.zeros(size, np.uint8)
        self._valid_words = self.valid.view(_WRITTEN.dtype).reshape(-1, GRANULE // 8)
        self.pending_writes = np.zeros(size // GRANULE, np.int16)
        self.pending_reads = np.zeros(size // GRANULE, np.int16)
        self.copied = CopiedBytes(size, SHARED_START)
        self.barriers: dict[int, MBarrier] = {}
        self.exited = False
        self._views: dict[int, tuple[Bytes, Bytes]] = {}

    def views(self, width: int) -> tuple[Bytes, Bytes]:
        """Bytes and their shadow as `[n, width]`."""
        if width not in self._views:
            self._views[width] = self.data.reshape(-1, width), self.valid.reshape(-1, width)
        return self._views[width]

    def offsets(self, addresses: Lanes, width: int, what: str) -> Lanes:
        """CTA-relative offsets of addresses in this CTA's window, checked."""
        offsets = (addresses & np.uint32(OFFSET_MASK)).astype(np.int64)
        low, high = int(offsets.min()), int(offsets.max())
        if low < SHARED_START or high + width > self.num_bytes:
            bad = low if low < SHARED_START else high
            raise Fault(
                "out-of-bounds",
                f"{what} of {width} bytes at shared offset {bad - SHARED_START}; the CTA has "
                f"{self.num_bytes - SHARED_START} bytes",
            )
        if np.count_nonzero(offsets & (width - 1)):
            raise Fault("out-of-bounds", f"{what} of {width} bytes at shared offset {low - SHARED_START}: not aligned")
        if self.exited:
            raise Fault("exit", f"{what} to shared memory of cluster rank {self.rank}, which has exited")
        return offsets

    def load(self, addresses: Lanes, width: int, thread: WarpOrder | None = None) -> Bytes:
        """`[lanes, width]` bytes, by the generic proxy."""
        offsets = self.offsets(addresses, width, "read")
        data, valid = self.views(width)
        rows = offsets // width
        self._refuse_pending(offsets, self.pending_writes, "pending-write", "is read while a copy still writes to it")
        self.copied.refuse(rows, width, "is read")
        if valid[rows].tobytes() != b"\x01" * (width * rows.size):
            self._refuse_unwritten(offsets, width, "read")
        if thread is not None:
            thread.read(self, rows, width)
        found: Bytes = data[rows]
        return found

    def store(self, addresses: Lanes, values: Bytes, thread: WarpOrder | None = None) -> None:
        """Write `[lanes, width]` bytes, by the generic proxy."""
        width = values.shape[1]
        offsets = self.offsets(addresses, width, "write")
        data, valid = self.views(width)
        self._refuse_pending(offsets, self.pending_writes, "pending-write", "is written while a copy writes to it")
        self._refuse_pending(
            offsets, self.pending_reads, "pending-read", "is written while an asynchronous operation may still read it"
        )
        rows = offsets // width
        self.copied.refuse(rows, width, "is written")
        if thread is not None:
            thread.write(self, rows, width)
        data[rows] = values
        valid[rows] = 1
        refuse_conflict(thread, data[rows], values, offsets - SHARED_START, "shared offset")

    def _refuse_pending(self, offsets: Lanes, marks: NDArray[np.int16], kind: str, what: str) -> None:
        # on 32 elements count_nonzero takes a fifth of the time of any
        if np.count_nonzero(marks[offsets // GRANULE]):
            bad = int(offsets[marks[offsets // GRANULE] != 0][0]) - SHARED_START
            raise Fault(kind, f"shared offset {bad} {what}")

    def _refuse_unwritten(self, offsets: Lanes, width: int, what: str) -> None:
        bytes_of = offsets[:, None] + np.arange(width)
        bad = int(bytes_of[self.valid[bytes_of] == 0][0]) - SHARED_START
        raise Fault("unwritten-read", f"{what} of shared offset {bad}, which nothing has written")

    def begin_write(self, start: int, num_bytes: int, what: str) -> None:
        """An asynchronous write is issued: its destination is undefined until it completes."""
        if start < SHARED_START or start + num_bytes > self.num_bytes or num_bytes < 1 or self.exited:
            self.offsets(np.array([start], np.uint32), 1, what)
            self.offsets(np.array([start + num_bytes - 1], np.uint32), 1, what)
        span = slice(start // GRANULE, -(-(start + num_bytes) // GRANULE))
        where = f"shared offsets {start - SHARED_START} to {start - SHARED_START + num_bytes - 1}"
        if np.count_nonzero(self.pending_reads[span]):
            raise Fault("pending-read", f"{what} to {where}, which an asynchronous operation may still read")
        if np.count_nonzero(self.pending_writes[span]):
            raise Fault("pending-write", f"{what} to {where}, where another is still on its way")
        if any(start < at + 8 and at < start + num_bytes for at in self.barriers):
            raise Fault("barrier", f"{what} to {where}, where an mbarrier lives")
        self.copied.refuse(np.arange(span.start, span.stop), GRANULE, f"is written by {what}")
        self.pending_writes[span] += 1
        self.valid[start : start + num_bytes] = 0

    def begin_copy(self, starts: Lanes, width: int, what: str) -> None:
        """A `cp.async` of lanes is issued: `width` bytes at each start are undefined until they land."""
        self._refuse_pending(starts, self.pending_writes, "pending-write", f"is written by {what} while a copy does")
        self._refuse_pending(starts, self.pending_reads, "pending-read", f"is written by {what} while it is still read")
        if any(((starts < at + 8) & (at < starts + width)).any() for at in self.barriers):
            raise Fault("barrier", f"{what}, where an mbarrier lives")
        self.copied.begin(starts // width, width, what)
        self.views(width)[1][starts // width] = 0

    def end_copy(self, starts: Lanes, width: int) -> None:
        """It has landed; the caller has stored the bytes."""
        self.views(width)[1][starts // width] = 1
        self.copied.end(starts // width, width)

    def end_write(self, start: int, num_bytes: int) -> None:
        """The write has landed; the caller has stored the bytes."""
        self.pending_writes[start // GRANULE : -(-(start + num_bytes) // GRANULE)] -= 1
        self.valid[start : start + num_bytes] = 1

    def begin_read(self, granules: Lanes, what: str, *, whole: bool = True) -> None:
        """An asynchronous read is issued; its source must have been written, and stays unchanged until it ends.

        Parameters
        ----------
        whole
            It needs all of its granules; else the caller checks which bytes of them were written.
        """
        if np.count_nonzero(self.pending_writes[granules]):
            bad = int(granules[self.pending_writes[granules] != 0][0]) * GRANULE - SHARED_START
            raise Fault("pending-write", f"{what} reads shared offset {bad} while a copy still writes to it")
        self.copied.refuse(granules, GRANULE, f"is read by {what}")
        if whole and np.count_nonzero(self._valid_words[granules] != _WRITTEN):
            self._refuse_unwritten(granules * GRANULE, GRANULE, what)
        # a granule is in the list once
        self.pending_reads[granules] += 1

    def end_read(self, granules: Lanes) -> None:
        """The reading operation is complete."""
        self.pending_reads[granules] -= 1
