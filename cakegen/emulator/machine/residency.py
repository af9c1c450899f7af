"""The CTAs of one launch: which are resident, which have triggered, which have ended.

CUDA C++ Programming Guide (thread block clusters, cooperative launch); PTX ISA 9.7.13.13 (griddepcontrol).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine import reports
from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.cta_barriers import pass_barrier
from cakegen.emulator.machine.memory import MOST_CTAS, SharedMemory
from cakegen.emulator.machine.ports import Triple, WarpHost
from cakegen.emulator.machine.warp import Cluster, Cta, Strand, Warp
from cakegen.emulator.order.access_order import AccessOrder
from cakegen.emulator.order.vector_clock import Position
from cakegen.emulator.order.warp_order import admit_warps
from cakegen.emulator.units.barriers import CountedBarrier
from cakegen.emulator.units.pending import Pending
from cakegen.emulator.units.tcgen05.dispatch import check_tensor_exit
from cakegen.emulator.units.tcgen05.issue import TensorHost
from cakegen.emulator.units.tma.bulk_stores import check_bulk_exit
from cakegen.errors import EmulationError


@dataclass(frozen=True)
class LaunchShape:
    """Grid in CTAs, cluster, block, dynamic shared memory, and whether the whole grid is resident."""

    grid: Triple
    block: Triple
    cluster: Triple = (1, 1, 1)
    dynamic_smem_bytes: int = 0
    cooperative: bool = False

    def check(self, name: str, text_cluster: Triple | None) -> None:
        """Refuse a shape that no device takes.

        Raises
        ------
        EmulationError
            The grid is not whole clusters, or the text demands others; or it has more CTAs than can be told apart.
        """
        if text_cluster is not None and text_cluster != self.cluster:
            raise EmulationError(f"{name}: text demands clusters of {text_cluster}, the launch {self.cluster}")
        if any(extent % size for extent, size in zip(self.grid, self.cluster, strict=True)):
            raise EmulationError(f"{name}: grid {self.grid} is not divisible by clusters of {self.cluster}")
        if self.ctas >= MOST_CTAS:
            raise EmulationError(f"{name}: grid {self.grid} has {self.ctas} CTAs; the emulator tells {MOST_CTAS} apart")

    @property
    def ctas(self) -> int:
        """CTAs of the grid."""
        return int(np.prod(self.grid))

    @property
    def clusters(self) -> int:
        """Clusters of the grid."""
        return self.ctas // int(np.prod(self.cluster))


class ClusterHost(WarpHost, TensorHost, Protocol):
    """What the coming and going of clusters asks of a launch."""

    @property
    def adversary(self) -> Adversary:
        """Who chooses."""

    @property
    def shape(self) -> LaunchShape:
        """Of the launch."""

    @property
    def clocks(self) -> AccessOrder | None:
        """The order of accesses; None: nothing is checked."""

    @property
    def shared_end(self) -> int:
        """End of a CTA's shared memory."""

    @property
    def pending(self) -> Sequence[Pending]:
        """What was issued and has not happened."""

    @property
    def strict_tensor_order(self) -> bool:
        """Whether what the ISA does not order is not ordered."""

    def fresh_registers(self) -> list[Any]:
        """A warp's registers at its start."""

    def make_ready(self, warp: Warp) -> None:
        """Queue a warp."""

    def on_retire(self, done: int, total: int) -> None:
        """A cluster has gone."""


class Residency:
    """Clusters come, run and go; the adversary says how many are there at once.

    Parameters
    ----------
    machine
        The launch.
    limit
        Clusters that are resident at once.
    """

    def __init__(self, machine: ClusterHost, limit: int) -> None:
        self.machine = machine
        self.shape = machine.shape
        self.resident: list[Cluster] = []
        self._limit = limit
        self._unstarted = deque(range(self.shape.clusters))
        self._retired = 0
        self._cancelled = 0
        self._ended: list[Cluster] = []
        self._triggered: set[int] = set()

    @property
    def waiting(self) -> int:
        """Clusters that have not started."""
        return len(self._unstarted)

    @property
    def ended(self) -> bool:
        """Every CTA has exited, or will not start."""
        return not self._unstarted and not self.resident

    @property
    def lets_dependents_start(self) -> bool:
        """Every CTA that starts has triggered or exited."""
        cancelled = self._cancelled * self.shape.ctas // self.shape.clusters
        return len(self._triggered) + cancelled == self.shape.ctas

    def trigger(self, cta: Cta) -> None:
        """`griddepcontrol.launch_dependents` by any thread of a CTA, or its exit; again is nothing."""
        self._triggered.add(cta.index)

    def cancel_cluster(self) -> Triple | None:
        """The first CTA of a cluster that will not start, since somebody else does its work; None: refused.

        A cooperative grid starts as a whole, so that nothing is left to cancel.
        """
        if not self._unstarted or self.machine.adversary.refuses_cancel():
            return None
        self._cancelled += 1
        return self._corner(self._unstarted.popleft())

    def fill(self) -> None:
        """Let clusters in up to the limit."""
        while self._unstarted and len(self.resident) < self._limit:
            self._admit(self._unstarted.popleft())

    def retire(self) -> None:
        """Let clusters go that have ended."""
        while self._ended:
            self.resident.remove(self._ended.pop())
            self._retired += 1
            self.machine.on_retire(self._retired, self.shape.clusters)

    def _corner(self, number: int) -> Triple:
        """Coordinates of a cluster's first CTA."""
        cx, cy, cz = self.shape.cluster
        nx, ny = self.shape.grid[0] // cx, self.shape.grid[1] // cy
        return number % nx * cx, number // nx % ny * cy, number // (nx * ny) * cz

    def _admit(self, number: int) -> None:
        cluster, machine = Cluster(), self.machine
        grid = self.shape.grid
        cx, cy, cz = self.shape.cluster
        corner = self._corner(number)
        threads = int(np.prod(self.shape.block))
        for rank in range(cx * cy * cz):
            inside = (rank % cx, rank // cx % cy, rank // (cx * cy))
            x, y, z = (c + i for c, i in zip(corner, inside, strict=True))
            index = x + grid[0] * (y + grid[1] * z)
            shared = SharedMemory(rank, machine.shared_end)
            cta = Cta(index, (x, y, z), inside, cluster, shared, machine, Position(index, number))
            cluster.ctas.append(cta)
            for warp in range(-(-threads // 32)):
                mask = np.arange(32) < threads - 32 * warp
                cta.warps.append(Warp(machine, cta, warp, machine.fresh_registers(), mask))
        self.resident.append(cluster)
        if machine.clocks is not None:
            _admit_threads(machine.clocks, cluster)
        for cta in cluster.ctas:
            for each in cta.warps:
                machine.make_ready(each)

    def finish_warp(self, warp: Warp) -> None:
        """All lanes of a warp have exited.

        Raises
        ------
        Fault
            It, or its CTA if it was the last, leaves something behind.
        """
        if warp.wgmma.in_flight:
            raise Fault("exit", f"CTA {warp.cta.index} warp {warp.index} exits with wgmmas that nothing waited for")
        if warp.tensor.loads or warp.tensor.stores:
            raise Fault("exit", f"CTA {warp.cta.index} warp {warp.index} exits with tcgen05.ld or st not waited for")
        check_bulk_exit(warp, self.machine.strict_tensor_order)
        cta = warp.cta
        for barrier in cta.named.values():
            self._recount(barrier, cta.live_warps())
        self._recount(cta.cluster.barrier, cta.cluster.live_warps())
        if not cta.live_warps():
            reports.check_exit(self.machine.pending, cta)
            check_tensor_exit(self.machine, cta)
            cta.shared.exited = True
            self.trigger(cta)
        if not cta.cluster.live_warps():
            self._ended.append(cta.cluster)

    def _recount(self, barrier: CountedBarrier, live: list[Warp]) -> None:
        """A barrier of all threads waits for those that have not exited."""
        if barrier.complete_if_all(live):
            pass_barrier(self.machine, barrier)


def _admit_threads(clocks: AccessOrder, cluster: Cluster) -> None:
    positions = [cta.position for cta in cluster.ctas]
    for cta, threads in zip(cluster.ctas, admit_warps(clocks, positions, len(cluster.ctas[0].warps)), strict=True):
        clocks.watch(cta.shared, cta.shared.num_bytes, cta.place, cta.index)
        for warp, thread in zip(cta.warps, threads, strict=True):
            warp.thread = thread


class Prerequisite:
    """What `griddepcontrol.wait` waits for: the launch before this one, if it was started before that one completed."""

    def __init__(self) -> None:
        self.complete = True
        self.waiters: list[Strand] = []

    def __str__(self) -> str:
        """For reports."""
        return "the completion of the launch before it in the stream"
