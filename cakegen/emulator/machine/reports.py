"""What a person reads when a launch can't go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cakegen.emulator.faults import Fault, Where
from cakegen.emulator.machine.warp import Cluster, Cta, Strand, Warp
from cakegen.emulator.text.ptx import Kernel
from cakegen.emulator.units.pending import Pending

_MOST_LINES = 40


class Resident(Protocol):
    """The clusters of a launch."""

    @property
    def resident(self) -> Sequence[Cluster]:
        """Those that run."""

    @property
    def waiting(self) -> int:
        """How many have not started."""


class RunningLaunch(Protocol):
    """A launch, as a report describes it."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def kernel(self) -> Kernel:
        """Its text."""

    @property
    def residency(self) -> Resident:
        """Its clusters."""


def line_in_block(error: BaseException) -> int:
    """The line of a block's function that an exception came through."""
    trace, line = error.__traceback__, 0
    while trace is not None:
        if " block " in trace.tb_frame.f_code.co_filename:
            line = trace.tb_lineno
        trace = trace.tb_next
    assert line, "the exception came through no block"
    return line


def deadlock(machines: Sequence[RunningLaunch]) -> Fault:
    """Nobody can go on and nothing is on its way: where every warp of some launches stands, equal ones together."""
    several = len(machines) > 1
    groups: dict[str, list[str]] = {}
    for machine in machines:
        launch = f"{machine.name} " if several else ""
        for cluster in machine.residency.resident:
            for warp in cluster.live_warps():
                for strand in warp.strands:
                    who = f"{launch}CTA {warp.cta.index} warp {warp.index} lanes {strand.lanes()}"
                    groups.setdefault(_standing(strand, machine.kernel), []).append(who)
    lines = [f"  {_names(who)}: {what}" for what, who in groups.items()]
    shown = lines[:_MOST_LINES] + ([f"  and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else [])
    waiting = sum(machine.residency.waiting for machine in machines)
    rest = f", and {waiting} clusters are not resident" if waiting else ""
    return Fault("deadlock", f"no warp can go on and nothing is on its way{rest}\n" + "\n".join(shown))


def _names(who: list[str]) -> str:
    return "; ".join(who[:4]) + (f"; and {len(who) - 4} more" if len(who) > 4 else "")


def _standing(strand: Strand, kernel: Kernel) -> str:
    index = strand.pc
    if strand.waits_for is not None:
        what = f"waits for {strand.waits_for}"
        # a barrier is waited for after it was arrived at
        index -= int(kernel.instructions[max(index - 1, 0)].root in ("bar", "barrier"))
    else:
        what = "waits for the other lanes of its warp"
    instruction = kernel.instructions[index]
    return f"{what} in `{instruction.text[:100]}` at {instruction.place}"


def divergence(warp: Warp, kernel: Kernel) -> Fault:
    """Strands of a warp that all want the whole warp, at different instructions."""
    lines = [f"  lanes {strand.lanes()}: {_standing(strand, kernel)}" for strand in warp.strands]
    what = f"CTA {warp.cta.index} warp {warp.index}: its lanes wait for each other at different instructions"
    return Fault("divergence", what + "\n" + "\n".join(lines))


def check_exit(pending: Sequence[Pending], cta: Cta) -> None:
    """Refuse a CTA's exit while something is on its way to it, or with bytes that a barrier still counts.

    Raises
    ------
    Fault
        As said.
    """
    if cta.landings:
        late = next(each for each in pending if getattr(each, "cta", None) is cta)
        raise _placed(
            Fault("exit", f"CTA {cta.index} exits while {getattr(late, 'what', 'an arrival')} is on its way to it"),
            late.where,
        )
    if cta.partial_warpgroups:
        group, number = cta.partial_warpgroups[0]
        what = f"not all warps of warpgroup {group} issued its wgmma number {number}"
        raise Fault("divergence", f"CTA {cta.index} exits, and {what}")
    for barrier in cta.shared.barriers.values():
        if barrier.tx_bytes:
            raise Fault("barrier", f"CTA {cta.index} exits with bytes left over: {barrier}")


def _placed(fault: Fault, where: Where | None) -> Fault:
    return fault if where is None else fault.at(where)
