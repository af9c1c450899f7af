"""Stores and reductions on their way to global memory, and the bulk groups of the thread that issued them.

PTX ISA 9.7.9.25 (bulk copies and their groups).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Where
from cakegen.emulator.machine.memory import Buffer, GlobalMemory, SharedMemory
from cakegen.emulator.order.vector_clock import GPU
from cakegen.emulator.order.warp_order import WarpOrder
from cakegen.emulator.units.pending import Pending
from cakegen.emulator.units.tma.reductions import Reduction

Array = NDArray[Any]

_WORD_BYTES = 8


class StoreIssuer(Protocol):
    """The CTA of the thread that stores."""

    @property
    def index(self) -> int:
        """Linear index in the grid."""

    @property
    def shared(self) -> SharedMemory:
        """Where sources are."""


class StoreTarget(Protocol):
    """What a store asks of its launch when it lands."""

    @property
    def memory(self) -> GlobalMemory:
        """Where it lands."""

    @property
    def watched(self) -> Mapping[int, list[Any]]:
        """Address of a word -> strands that poll it."""

    def touch(self, addresses: Array) -> None:
        """Global words were written."""

    def wake(self, waiters: list[Any]) -> None:
        """Let parked strands try again."""


@dataclass(frozen=True, eq=False)
class Target:
    """Where a store goes: rows of `width` bytes of an allocation."""

    buffer: Buffer
    offsets: Array
    width: int

    @property
    def rows(self) -> Array:
        """Their numbers."""
        return self.offsets // self.width


@dataclass(eq=False)
class BulkStore(Pending):
    """One store or reduction. `cta` issued it; `values` are the bytes that go to the target, `[rows, width]`."""

    machine: StoreTarget
    queue: BulkQueue
    issuer: StoreIssuer
    granules: Array
    target: Target
    values: Array
    reduction: Reduction | None
    what: str
    where: Where | None = None
    held: bool = True
    landed: bool = False

    def complete(self) -> None:
        """Write, and let go on who waits for it."""
        target, memory = self.target, self.machine.memory
        offsets = target.offsets.astype(np.uint64)
        if offsets.size:
            if self.reduction is not None:
                memory.note_read(target.buffer, offsets, target.width)
            memory.note_write(target.buffer, offsets, target.width, self.issuer.index)
            rows, index = target.buffer.rows(target.width), target.rows
            rows[index] = self.values if self.reduction is None else self.reduction(rows[index], self.values)
        self.landed = True
        self.machine.wake(self.queue.waiters)
        if self.machine.watched:
            words = offsets[:, None] + np.arange(0, target.width, _WORD_BYTES, dtype=np.uint64)
            self.machine.touch(np.uint64(target.buffer.base) + words.ravel())

    def release(self) -> None:
        """Its source may change."""
        if self.held:
            self.held = False
            self.issuer.shared.end_read(self.granules)


@dataclass(eq=False)
class BulkQueue:
    """What one thread has stored and not waited for, in its groups.

    For the checker of happens-before these are two units: reads of sources, and writes; a group's number is their time.

    Parameters
    ----------
    open
        Stores that no commit has put into a group yet.
    groups
        Committed ones, the oldest first; those that a wait has covered are gone.
    """

    open: list[BulkStore] = field(default_factory=list)
    groups: list[list[BulkStore]] = field(default_factory=list)
    waiters: list[Any] = field(default_factory=list)
    committed: int = 0
    units: tuple[int, int] | None = None

    def begin(self, thread: WarpOrder, store: BulkStore) -> None:
        """The issuing thread must come after who wrote the source, and who used the target."""
        clocks = thread.clocks
        if self.units is None:
            cta = store.issuer.index
            self.units = clocks.add_unit(cta), clocks.add_unit(cta)
        time = self.committed + 1
        number = clocks.begin(thread, store.what, self.units[0], time)
        clocks.begin_read(thread, number, clocks.shadow(store.issuer.shared), store.granules)
        target = store.target
        if not target.offsets.size:
            return
        shadow = clocks.shadow(target.buffer)
        if store.reduction is None:
            number = clocks.begin(thread, store.what, self.units[1], time)
        else:
            # each element by an atomic of its own, relaxed at the scope of the GPU
            number = clocks.begin(thread, store.what, self.units[1], time, strong=GPU)
            clocks.begin_read(thread, number, shadow, target.rows, target.width)
        clocks.begin_write(thread, number, shadow, target.rows, target.width)

    def commit(self) -> None:
        """`commit_group`: an empty one is a group too."""
        self.groups.append(self.open)
        self.committed += 1
        self.open = []

    def wait(self, most: int, read_only: bool, thread: WarpOrder | None) -> BulkStore | None:
        """Wait for all groups but the newest `most`; returns what is not done yet."""
        covered = self.groups[: max(len(self.groups) - most, 0)]
        late = next((store for group in covered for store in group if not store.landed), None)
        if late is not None and not read_only:
            return late
        for store in (store for group in covered for store in group):
            store.release()
        if thread is not None and self.units is not None:
            for unit in self.units[: 1 if read_only else 2]:
                thread.learn(unit, self.committed - most)
        if not read_only:
            del self.groups[: len(covered)]
        return None

    def holding(self) -> BulkStore | None:
        """A store whose source may still be read."""
        return next((store for group in (*self.groups, self.open) for store in group if store.held), None)
