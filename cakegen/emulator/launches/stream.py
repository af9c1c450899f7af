"""Launches of one stream: one after another, or programmatically side by side.

PTX ISA 9.7.13.13 (griddepcontrol); CUDA C++ Programming Guide, programmatic dependent launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine import reports
from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.machine.memory import Buffer, GlobalMemory
from cakegen.emulator.order.overlap import MOST_OVERLAPPING, LaunchAccesses, Overlap
from cakegen.errors import EmulationError, LimitError


@dataclass(frozen=True)
class LaunchReport:
    """One emulated launch.

    Parameters
    ----------
    key
        Logical key of its program, or what else it is called.
    instructions
        Warp-instructions that ran.
    seconds
        Wall time.
    schedule_hash
        Names the schedule that the adversary took, also among launches that ran side by side.
    """

    key: str
    instructions: int
    seconds: float
    schedule_hash: str


@dataclass(frozen=True)
class QueuedLaunch:
    """A launch that waits in the stream: its name, whether it is programmatic, and how to make it of its memory."""

    name: str
    programmatic: bool
    make: Callable[[GlobalMemory], Machine]


@dataclass(eq=False)
class _Started:
    """A launch that has started and not completed."""

    position: int
    machine: Machine
    accesses: LaunchAccesses | None


@dataclass(eq=False)
class Stream:
    """Runs launches in their order.

    A launch starts when all before it have completed. A programmatic one may start once every CTA of the one before
    it has triggered or exited; the adversary then lets it run as far as it can before the earlier one goes on or
    completes, or both in turn, or keeps them apart. A launch completes some time after its last CTA has exited.

    Parameters
    ----------
    buffers
        The allocations that all launches share.
    adversary
        Chooses among launches; each launch has one of its own for all else.
    seconds_limit
        Wall time after which the run is given up; None: never.
    """

    queue: Sequence[QueuedLaunch]
    buffers: list[Buffer]
    adversary: Adversary
    seconds_limit: float | None = None
    machines: list[Machine] = field(init=False, default_factory=list)
    seconds: list[float] = field(init=False)
    _running: list[_Started] = field(init=False, default_factory=list)
    _overlap: Overlap = field(init=False, default_factory=Overlap)
    _style: str = field(init=False)
    _deadline: float | None = field(init=False)

    def __post_init__(self) -> None:
        self.seconds = [0.0] * len(self.queue)
        self._style = self.adversary.overlap_style()
        self._deadline = None if self.seconds_limit is None else time.perf_counter() + self.seconds_limit

    def run(self) -> None:
        """Run all launches to their completion.

        Raises
        ------
        Fault
            A program did something undefined or can't go on, or two launches touch one byte and nothing orders them.
        EmulationError
            A program uses something that is not modelled.
        LimitError
            It took longer than `seconds_limit`.
        """
        with np.errstate(all="ignore"):
            while self._running or len(self.machines) < len(self.queue):
                self._start()
                self._advance()

    def reports(self) -> tuple[LaunchReport, ...]:
        """One report a launch, after the run."""
        return tuple(
            LaunchReport(machine.name, machine.instructions_run, seconds, machine.adversary.schedule_hash)
            for machine, seconds in zip(self.machines, self.seconds, strict=True)
        )

    def _start(self) -> None:
        while len(self.machines) < len(self.queue) and self._may_start(len(self.machines)):
            position = len(self.machines)
            queued = self.queue[position]
            accesses = self._overlap.open(queued.name) if self._may_overlap(position) else None
            machine = queued.make(GlobalMemory(self.buffers, position, accesses))
            machine.prerequisite.complete = not any(each.position == position - 1 for each in self._running)
            self.machines.append(machine)
            self._running.append(_Started(position, machine, accesses))

    def _may_start(self, position: int) -> bool:
        if not self._running:
            return True
        if self._style == "apart" or not self.queue[position].programmatic or len(self._running) >= MOST_OVERLAPPING:
            return False
        before = self._running[-1]
        # else the one before has completed, without waiting for an earlier one
        return before.position != position - 1 or before.machine.residency.lets_dependents_start

    def _may_overlap(self, position: int) -> bool:
        """Whether a launch may run beside the one before it or the one behind it."""
        return self._style != "apart" and any(each.programmatic for each in self.queue[max(position, 1) : position + 2])

    def _advance(self) -> None:
        if len(self._running) == 1 and self._running[0].machine.can_step():
            self._step(self._running[0])
            return
        ready = [each for each in self._running if each.machine.can_step()]
        ended = [each for each in self._running if each.machine.ended]
        events = [*ended, *ready] if self._style == "even" else ready or ended
        if not events:
            polls = [each.machine.poll_again() for each in self._running]
            if any(polls):
                return
            raise reports.deadlock([each.machine for each in self._running])
        chosen = events[0]
        if len(self._running) > 1:
            chosen = events[self.adversary.choose_launch(len(events), self._style)]
            for each in self._running:
                each.machine.adversary.note(chosen.position)
        if chosen.machine.ended:
            self._complete(chosen)
        else:
            self._step(chosen)

    def _step(self, chosen: _Started) -> None:
        start = time.perf_counter()
        if self._deadline is not None and start > self._deadline:
            raise LimitError(
                f"given up after {self.seconds_limit:g} s (--limit-seconds), neither clean nor at fault; "
                f"{sum(each.instructions_run for each in self.machines)} warp-instructions ran{self._place(chosen)}"
            )
        try:
            chosen.machine.step()
        except Fault as fault:
            raise self._explain(fault, chosen) from None
        except EmulationError as error:
            raise type(error)(f"{error}{self._place(chosen)}") from None
        self.seconds[chosen.position] += time.perf_counter() - start

    def _complete(self, chosen: _Started) -> None:
        self._running.remove(chosen)
        if chosen.accesses is not None:
            self._overlap.close(chosen.accesses)
        for each in self._running:
            if each.position == chosen.position + 1:
                each.machine.prerequisite.complete = True
                each.machine.wake(each.machine.prerequisite.waiters)

    def _place(self, chosen: _Started) -> str:
        several = len(self.queue) > 1
        return f"\n  in launch {chosen.position + 1} of {len(self.queue)}, {chosen.machine.name}" if several else ""

    def _explain(self, fault: Fault, chosen: _Started) -> Fault:
        """Where a fault is, and whether an earlier launch that is not complete may be why."""
        fault.launch = self._place(chosen).removeprefix("\n  in ")
        earlier = next((each for each in self._running if each.position < chosen.position), None)
        if earlier is not None and fault.kind == "unwritten-read":
            fault.message += (
                f"; {earlier.machine.name}, earlier in the stream, has not completed, and no griddepcontrol.wait that "
                "waits for it comes before this read"
            )
        return fault
