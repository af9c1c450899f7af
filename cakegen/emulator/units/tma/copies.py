"""Asynchronous copies as operations that are issued now and land later.

A destination is undefined from issue to landing; its barrier gets the bytes when they have landed. Sources are read
when the copy lands, which is the latest moment that the ISA allows (PTX ISA 9.7.9.25 to 9.7.9.27, 9.7.9.12).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault, Where
from cakegen.emulator.machine.memory import GRANULE, Buffer, GlobalMemory, SharedMemory
from cakegen.emulator.machine.warp import Cta
from cakegen.emulator.order.vector_clock import CLUSTER, CTA
from cakegen.emulator.order.warp_order import WarpOrder
from cakegen.emulator.units.barriers import BarrierOrder, MBarrier
from cakegen.emulator.units.pending import Pending
from cakegen.emulator.units.tma.tensor_view import TensorView
from cakegen.runtime.tensor_map import SWIZZLE_BYTES

Array = NDArray[Any]


@dataclass(eq=False)
class Landing(Pending):
    """Bytes on their way to one CTA's shared memory, and to the transaction count of a barrier there.

    Parameters
    ----------
    signals
        The CTA of the barrier where it is the other one of a pair.
    """

    cta: Cta
    spans: tuple[tuple[int, int], ...]
    barrier_offset: int
    fetch: Callable[[], Array]
    write: Callable[[Array, Array], None]
    what: str
    where: Where | None = None
    source: Source | None = None
    generic: bool = False
    signals: Cta | None = None
    _thread: WarpOrder | None = field(init=False, default=None)
    _number: int = field(init=False, default=0)

    @property
    def barrier_cta(self) -> Cta:
        """Where its barrier is."""
        return self.signals or self.cta

    def begin(self, thread: WarpOrder | None) -> None:
        """Mark the destination; the thread must come after who used it, and after who wrote the source."""
        self._mark()
        self.cta.landings += 1
        order = self.barrier_cta.barrier_at(self.barrier_offset).order
        if thread is not None and order is not None:
            self._check(thread, order)

    def _check(self, thread: WarpOrder, order: BarrierOrder) -> None:
        if not thread.knows_barrier(order):
            raise Fault("race", f"{self.what} counts on a barrier, and nothing orders that behind its mbarrier.init")
        clocks = thread.clocks
        self._thread, self._number = thread, clocks.begin(thread, self.what, order.slot, by_proxy=not self.generic)
        if self.source is not None and self.source.may_change:
            clocks.begin_read(thread, self._number, clocks.shadow(self.source.buffer), self.source.granules())
        for rows, width in self._cells():
            clocks.begin_write(thread, self._number, clocks.shadow(self.cta.shared), rows, width)

    def _mark(self) -> None:
        """The destination is undefined from now on."""
        for start, size in self.spans:
            self.cta.shared.begin_write(start, size, self.what)

    def _cells(self) -> Iterator[tuple[Array, int]]:
        """Rows of the destination, and their width."""
        for start, size in self.spans:
            yield np.arange(start // GRANULE, -(-(start + size) // GRANULE)), GRANULE

    def _store(self) -> None:
        """Bytes arrive."""
        shared = self.cta.shared
        self.write(shared.data, self.fetch())
        for start, size in self.spans:
            shared.end_write(start, size)

    def complete(self) -> None:
        """Store the bytes, then count them."""
        shared = self.cta.shared
        if shared.exited:
            raise Fault("exit", f"{self.what} lands in a CTA that has exited")
        self._store()
        if self.source is not None and isinstance(self.source.buffer, SharedMemory):
            self.source.buffer.end_read(self.source.granules())
        self.cta.landings -= 1
        self._publish()
        self.barrier_cta.complete_bytes(self.barrier_offset, sum(size for _, size in self.spans))

    def _publish(self) -> None:
        """Who waits for the phase sees the bytes; those of a peer's `st.async` only at the cluster's scope."""
        barrier = self.barrier_cta.barrier_at(self.barrier_offset)
        order = barrier.order
        if self._thread is None or order is None:
            return
        time = barrier.phase + 1
        self._thread.clocks.complete(self._number, time)
        away = self.generic and self._thread.position.cta != self.cta.index
        order.arrivals.land(order.slot, time, self.barrier_cta.position, CLUSTER if away else CTA)


@dataclass(eq=False)
class NarrowLanding(Landing):
    """Elements of less than 16 bytes, whose neighbours may be on their way too: `starts` are where they go."""

    starts: Array = field(default_factory=lambda: np.empty(0, np.int64))
    width: int = 4

    def _mark(self) -> None:
        self.cta.shared.begin_copy(self.starts, self.width, self.what)

    def _cells(self) -> Iterator[tuple[Array, int]]:
        yield self.starts // self.width, self.width

    def _store(self) -> None:
        self.write(self.cta.shared.data, self.fetch())
        self.cta.shared.end_copy(self.starts, self.width)


@dataclass(frozen=True, eq=False)
class Source:
    """What a copy reads: an allocation or a CTA's shared memory, and which of its 16-byte granules."""

    buffer: Buffer | SharedMemory
    granules: Callable[[], Array]

    @property
    def may_change(self) -> bool:
        """Whether it is more than an input."""
        return isinstance(self.buffer, SharedMemory) or not self.buffer.read_only


def linear_write(start: int) -> Callable[[Array, Array], None]:
    """Bytes go to consecutive addresses."""

    def write(shared: Array, data: Array) -> None:
        shared[start : start + data.size] = data

    return write


def rows_write(starts: Array, width: int) -> Callable[[Array, Array], None]:
    """Rows of `width` bytes go to their starts."""

    def write(shared: Array, data: Array) -> None:
        shared.reshape(-1, width)[starts // width] = data

    return write


def swizzled_write(start: int, width: int) -> Callable[[Array, Array], None]:
    """1, 2 or 3 bits (32, 64, 128 bytes) of an address from 4 on are xored with those from 7 on (PTX ISA 5.5.7)."""
    bits = width // GRANULE - 1

    def write(shared: Array, data: Array) -> None:
        granules = start // GRANULE + np.arange(data.size // GRANULE)
        shared.reshape(-1, GRANULE)[granules ^ (granules >> 3 & bits)] = data.reshape(-1, GRANULE)

    return write


def tensor_landing(
    view: TensorView, corner: Sequence[int], cta: Cta, start: int, barrier_offset: int, where: Where
) -> Landing:
    """One box on its way to one CTA."""
    if start % 128:
        raise Fault("out-of-bounds", f"a box of {view.record.name} goes to {start:#x}; needs a multiple of 128")
    width = SWIZZLE_BYTES[view.record.swizzle]
    write = swizzled_write(start, width) if width else linear_write(start)
    what = f"the copy of box {tuple(corner)} of {view.record.name}"
    spans = ((start, view.box_bytes),)
    source = Source(view.buffer, lambda: view.granules(corner))
    return Landing(cta, spans, barrier_offset, lambda: view.fetch(corner), write, what, where, source)


def bulk_landing(
    memory: GlobalMemory, source: int, num_bytes: int, cta: Cta, start: int, barrier_offset: int, where: Where
) -> Landing:
    """`cp.async.bulk` from global memory to one CTA."""
    if num_bytes % 16 or source % 16 or start % 16 or num_bytes == 0:
        raise Fault("out-of-bounds", f"cp.async.bulk of {num_bytes} bytes, {source:#x} -> {start:#x}: multiples of 16")
    buffer, offsets = memory.find(np.array([source], np.uint64), 16, "bulk copy")
    first = int(offsets[0])
    if first + num_bytes > buffer.num_bytes:
        raise Fault("out-of-bounds", f"a bulk copy reads {buffer.name} up to {first + num_bytes} of {buffer.num_bytes}")

    def fetch() -> Array:
        rows = first + 16 * np.arange(num_bytes // 16, dtype=np.uint64)
        buffer.check(rows, 16, "bulk copy")
        memory.note_read(buffer, rows, 16)
        return buffer.data[first : first + num_bytes]

    what = f"the bulk copy of {num_bytes} bytes of {buffer.name}"
    read = Source(buffer, lambda: np.arange(first // GRANULE, (first + num_bytes) // GRANULE))
    return Landing(cta, ((start, num_bytes),), barrier_offset, fetch, linear_write(start), what, where, read)


def shared_landing(
    sender: Cta, source: int, num_bytes: int, cta: Cta, start: int, barrier_offset: int, where: Where
) -> Landing:
    """`cp.async.bulk` from the shared memory of a CTA to that of another of its cluster."""
    if num_bytes % 16 or source % 16 or start % 16 or num_bytes == 0:
        raise Fault("out-of-bounds", f"cp.async.bulk of {num_bytes} bytes, {source:#x} -> {start:#x}: multiples of 16")
    if sender is cta:
        raise Fault("out-of-bounds", "cp.async.bulk from shared memory of a CTA to its own (PTX ISA 9.7.9.25.4)")
    what = f"the bulk copy of {num_bytes} bytes from CTA {sender.index}"
    shared = sender.shared
    for at in (source, source + num_bytes - 1):
        shared.offsets(np.array([at], np.uint32), 1, "a bulk copy's source")
    granules = np.arange(source // GRANULE, (source + num_bytes) // GRANULE)
    shared.begin_read(granules, what)

    def fetch() -> Array:
        return shared.data[source : source + num_bytes]

    read = Source(shared, lambda: granules)
    return Landing(cta, ((start, num_bytes),), barrier_offset, fetch, linear_write(start), what, where, read)


def store_landing(cta: Cta, starts: Array, rows: Array, barrier_offset: int, where: Where) -> Landing:
    """`st.async`: up to 16 bytes a lane to another CTA; neighbours of 16 bytes become one span."""
    width = rows.shape[1]
    if width < GRANULE:
        return NarrowLanding(
            cta,
            ((int(starts.min()), rows.size),),
            barrier_offset,
            lambda: rows,
            rows_write(starts, width),
            "the st.async",
            where,
            generic=True,
            starts=starts,
            width=width,
        )
    order = np.argsort(starts)
    starts, rows = starts[order], rows[order]
    cuts = np.flatnonzero(np.diff(starts) != GRANULE) + 1
    spans = tuple((int(part[0]), int(part.size) * GRANULE) for part in np.split(starts, cuts))

    write = rows_write(starts, GRANULE)
    return Landing(cta, spans, barrier_offset, lambda: rows, write, "the st.async", where, generic=True)


def require_initialised(thread: WarpOrder | None, barrier: MBarrier) -> None:
    """Refuse the use of a barrier that nothing orders behind its initialisation."""
    if thread is not None and barrier.order is not None and not thread.knows_barrier(barrier.order):
        raise Fault("race", f"{barrier} is used, and nothing orders that behind its mbarrier.init")
