"""mbarriers, named barriers and the cluster barrier as plain state.

PTX ISA 9.7.13.15 (mbarrier), 9.7.13.1 (bar), 9.7.13.3 (barrier.cluster).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault
from cakegen.emulator.order.vector_clock import SyncPoint, VectorClock

MAX_COUNT = (1 << 20) - 1
# Where a state of an mbarrier holds its phase; the pending arrivals are below.
PHASE_SHIFT = 20


@dataclass(eq=False)
class BarrierOrder:
    """What the checker of happens-before keeps with an mbarrier.

    Parameters
    ----------
    slot
        Of the unit that counts the barrier's phases: a copy that lands in phase p is complete at its time p + 1.
    initialised
        (slot, time) of the initialisation, which every use must come after.
    lanes
        Which lanes of that thread did it.
    arrivals, passed
        What has been released up to now, and up to the last completed phase, which is what a wait acquires.
    """

    slot: int
    initialised: tuple[int, int]
    lanes: NDArray[np.bool_] | None = None
    arrivals: SyncPoint = field(default_factory=SyncPoint)
    passed: SyncPoint = field(default_factory=SyncPoint)


@dataclass(eq=False)
class MBarrier:
    """One mbarrier: a phase completes when no arrival is pending and the transaction count is zero.

    The count of transactions may be negative for a while: bytes of a peer's copy can land before they are expected.
    An `expect_tx` that raises it to zero behind the last arrival completes the phase: the ISA's text does not say so,
    but an H200 does it (docs/hopper-answers.md).
    """

    name: str
    expected: int
    phase: int = 0
    pending: int = field(init=False)
    tx_bytes: int = 0
    waiters: list[Any] = field(default_factory=list)
    order: BarrierOrder | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.expected <= MAX_COUNT:
            raise Fault(
                "barrier", f"{self.name}: mbarrier.init with {self.expected} arrivals; 1 … {MAX_COUNT} are legal"
            )
        self.pending = self.expected

    def expect_bytes(self, num_bytes: int) -> bool:
        """Expect bytes in this phase; whether that completed it."""
        self.tx_bytes += num_bytes
        self._check_tx()
        return self._advance()

    def complete_bytes(self, num_bytes: int) -> bool:
        """Bytes have landed; whether that completed the phase."""
        self.tx_bytes -= num_bytes
        self._check_tx()
        return self._advance()

    def arrive(self, count: int = 1, tx_bytes: int = 0) -> bool:
        """Expect bytes and arrive at once; whether that completed the phase."""
        if count > self.pending:
            raise Fault("barrier", f"{self}: {count} arrivals are more than are pending")
        self.tx_bytes += tx_bytes
        self._check_tx()
        self.pending -= count
        return self._advance()

    @property
    def state(self) -> int:
        """What `mbarrier.arrive` returns: the phase before the arrival, and its pending arrivals."""
        return self.phase << PHASE_SHIFT | self.pending

    def drop(self, count: int) -> None:
        """Later phases need so many arrivals less (`arrive_drop`)."""
        if count > self.expected:
            raise Fault("barrier", f"{self}: {count} participants drop out of {self.expected}")
        self.expected -= count

    def expect_arrivals(self, count: int) -> None:
        """This phase needs so many arrivals more (`cp.async.mbarrier.arrive` without `.noinc`)."""
        self.pending += count
        if self.pending > MAX_COUNT:
            raise Fault("barrier", f"{self}: {self.pending} pending arrivals; at most {MAX_COUNT} are legal")

    def has_completed(self, parity: int) -> bool:
        """What a wait for a parity sees: whether the phase of that parity is not the current one."""
        return self.phase & 1 != parity

    def _check_tx(self) -> None:
        if abs(self.tx_bytes) > MAX_COUNT:
            raise Fault("barrier", f"{self}: the transaction count left ±{MAX_COUNT}")

    def _advance(self) -> bool:
        if self.pending or self.tx_bytes:
            return False
        self.phase += 1
        if self.order is not None:
            self.order.passed = self.order.arrivals.copy()
        self.pending = self.expected
        return True

    def __str__(self) -> str:
        """Name and state, for reports."""
        return (
            f"{self.name} (phase {self.phase}, {self.pending} of {self.expected} arrivals pending, "
            f"tx {self.tx_bytes} bytes)"
        )


@dataclass(eq=False)
class CountedBarrier:
    """A barrier of a CTA (`bar.sync`) or of a cluster: so many threads, then all go on.

    Parameters
    ----------
    kind, votes
        Which instructions meet, and of `bar.red` what they bring.
    """

    name: str
    threads: int = 0
    arrived: int = 0
    generation: int = 0
    members: set[Any] = field(default_factory=set)
    waiters: list[Any] = field(default_factory=list)
    gathered: VectorClock | None = None
    passed: VectorClock | None = None
    kind: str = ""
    votes: list[Any] = field(default_factory=list)

    def arrive(self, who: Any, threads: int, total: int) -> bool:
        """`who` brings `threads` of `total` (0: of all that have not exited); whether a counted barrier is complete."""
        if self.members and self.threads != total:
            raise Fault("barrier", f"{self}: an arrival for {total} threads meets arrivals for {self.threads}")
        if who in self.members:
            raise Fault("barrier", f"{self}: the same warp arrives twice")
        self.threads = total
        self.arrived += threads
        self.members.add(who)
        if total and self.arrived > total:
            raise Fault("barrier", f"{self}: {self.arrived} threads arrived")
        return bool(total) and self.arrived == total and self._complete()

    def complete_if_all(self, live: list[Any]) -> bool:
        """Complete a barrier of all threads once every warp that has not exited is there."""
        if self.threads or not self.members or not self.members.issuperset(live):
            return False
        return self._complete()

    def _complete(self) -> bool:
        self.arrived = 0
        self.members.clear()
        self.generation += 1
        self.gathered, self.passed = None, self.gathered
        return True

    def __str__(self) -> str:
        """Name and state."""
        return f"{self.name} ({self.arrived} of {self.threads or 'all'} threads arrived)"
