"""Instructions through which warps meet, and accesses that others watch.

`execute` runs one for a strand: the strand goes on behind it, or parks until somebody wakes it. A parked wait tries
again from the instruction; a barrier that was arrived at is passed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault, Where
from cakegen.emulator.machine.atomics import run_atomic
from cakegen.emulator.machine.cta_barriers import run_barrier
from cakegen.emulator.machine.operands import active_lanes, park, refused
from cakegen.emulator.machine.strong_access import run_strong_access
from cakegen.emulator.machine.warp import Cta, Strand
from cakegen.emulator.text.ptx import Instruction
from cakegen.emulator.units.copy_async import run_copy_async
from cakegen.emulator.units.launch_control import run_launch_control
from cakegen.emulator.units.tcgen05.dispatch import run_tcgen05
from cakegen.emulator.units.tma.asynchronous import run_copy, run_mbarrier, run_store_async
from cakegen.emulator.units.tma.bulk_stores import run_bulk_group

Array = NDArray[Any]

_RELEASING = {"bar", "barrier", "atom", "red", "st"}
# After these, tcgen05 needs its fence::after_thread_sync.
_WAITING = {"bar", "barrier", "mbarrier", "ld"}
_SENDING = {"arrive", "init", "inval", "expect_tx", "complete_tx"}
_BULK_GROUPS = {"bulk_group", "commit_group", "wait_group"}


class Triggers(Protocol):
    """Knows which CTAs let dependent launches start."""

    def trigger(self, cta: Cta) -> None:
        """A CTA does."""


class Awaited(Protocol):
    """The launch before this one."""

    complete: bool
    waiters: list[Strand]


class GridHost(Protocol):
    """What `griddepcontrol` asks of its launch."""

    @property
    def prerequisite(self) -> Awaited:
        """The launch before this one."""

    @property
    def residency(self) -> Triggers:
        """Who has triggered."""


class HasTime(Protocol):
    """Has a modelled clock."""

    @property
    def time_ns(self) -> int:
        """What it shows."""


# A handler takes the launch as what it asks of it (its own protocol), the strand, the instruction, the lanes that
# pass its guard, and its place for what it issues.
Handler = Callable[[Any, Strand, Instruction, Array, Where], None]


@dataclass(frozen=True)
class Stop:
    """An instruction that is executed here, decoded once.

    Parameters
    ----------
    releases
        What the warp sent to other CTAs arrives before it.
    waits
        tcgen05 needs its fence::after_thread_sync behind it.
    """

    instruction: Instruction
    run: Handler
    releases: bool
    waits: bool


def decode_stop(instruction: Instruction) -> Stop:
    """Who executes an instruction, and what else it does."""
    root, parts = instruction.root, instruction.parts
    name = root
    if parts[:2] == ("cp", "async") and parts[2:3] != ("bulk",):
        name = "cp.async"
    elif root == "cp" and _BULK_GROUPS & set(parts):
        name = "cp.bulk_group"
    elif parts[:2] == ("st", "async"):
        name = "st.async"
    handler = HANDLERS.get(name, _refuse)
    releases = root in _RELEASING and "relaxed" not in parts
    return Stop(instruction, handler, releases, root in _WAITING and not _SENDING & set(parts))


def execute(machine: Any, strand: Strand, stop: Stop, where: Where) -> None:
    """Run one such instruction for the strand's lanes.

    Raises
    ------
    Fault
        It does something undefined.
    EmulationError
        Its form is not modelled.
    """
    active = active_lanes(strand, stop.instruction)
    strand.pc += 1
    if not np.count_nonzero(active):
        return
    if stop.releases:
        strand.warp.release()
    if stop.waits:
        strand.warp.tensor.unfenced = True
    stop.run(machine, strand, stop.instruction, active, where)


def _refuse(machine: object, strand: Strand, instruction: Instruction, active: Array, where: Where) -> None:
    raise refused(instruction)


def _trap(machine: HasTime, strand: Strand, instruction: Instruction, active: Array, where: Where) -> None:
    raise Fault("trap", f"the program gave up after {machine.time_ns} ns of modelled time")


def _grid_dependency(machine: GridHost, strand: Strand, instruction: Instruction, active: Array, where: Where) -> None:
    """PTX ISA 9.7.13.13. The trigger makes nothing visible; behind the wait, all of the launch before is."""
    what = instruction.parts[1]
    prerequisite = machine.prerequisite
    if what == "launch_dependents":
        machine.residency.trigger(strand.warp.cta)
    elif what != "wait":
        raise refused(instruction)
    elif not prerequisite.complete:
        strand.pc -= 1
        park(strand, prerequisite.waiters, prerequisite)


HANDLERS: dict[str, Handler] = {
    "bar": run_barrier,
    "barrier": run_barrier,
    "mbarrier": run_mbarrier,
    "cp": run_copy,
    "cp.async": run_copy_async,
    "cp.bulk_group": run_bulk_group,
    "st.async": run_store_async,
    "atom": run_atomic,
    "red": run_atomic,
    "ld": run_strong_access,
    "st": run_strong_access,
    "clusterlaunchcontrol": run_launch_control,
    "tcgen05": run_tcgen05,
    "griddepcontrol": _grid_dependency,
    "trap": _trap,
}
