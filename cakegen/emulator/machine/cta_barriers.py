"""Barriers at which whole warps meet: `bar` and `barrier` of a CTA, and `barrier.cluster`.

PTX ISA 9.7.13.1 and 9.7.13.3. A warp that arrives counts as 32 threads, also where some of its lanes have exited.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault, Where
from cakegen.emulator.machine.operands import park, read_lanes, refused, write_lanes
from cakegen.emulator.machine.ports import Wakes
from cakegen.emulator.machine.warp import Strand, Warp
from cakegen.emulator.text.ptx import Instruction, Negated, Operand
from cakegen.emulator.units.barriers import CountedBarrier

Array = NDArray[Any]

_MOST = 15
# Of `barrier.red`: the type of its result.
_REDUCTIONS = {"popc": "u32", "and": "pred", "or": "pred"}

_CLUSTER_SEMANTICS = {"arrive": ([], ["release"], ["relaxed"]), "wait": ([], ["acquire"])}


def run_barrier(machine: Wakes, strand: Strand, instruction: Instruction, active: Array, where: Where) -> None:
    """`bar`, `barrier` and `barrier.cluster`; a predicate in front must say the same in all lanes."""
    if not np.array_equal(active, strand.mask):
        raise Fault("divergence", f"{instruction.opcode} by a part of the warp: its predicate differs between lanes")
    parts = [part for part in instruction.parts[1:] if part != "aligned"]
    if instruction.root == "barrier" and parts[:1] == ["cluster"]:
        _cluster_barrier(machine, strand, instruction, parts[1:])
        return
    parts = parts[1:] if parts[:1] == ["cta"] else parts
    operands = list(instruction.operands)
    reduction = None
    if parts[:1] == ["red"]:
        reduction = _reduction(strand, instruction, parts[1:], operands)
    elif parts not in (["sync"], ["arrive"]):
        raise refused(instruction)
    number = _same_of(strand, operands[0], "the number of a barrier")
    total = _threads(strand, number, operands[1:])
    if parts[0] == "arrive" and not total:
        raise Fault("barrier", f"bar.arrive {number} without a count of threads")
    barrier = strand.warp.cta.named.setdefault(number, CountedBarrier(f"bar {number}"))
    _check_kind(barrier, reduction)
    _gather(barrier, strand.warp)
    complete = barrier.arrive(strand.warp, 32, total) or barrier.complete_if_all(strand.warp.cta.live_warps())
    if complete:
        if parts[0] != "arrive":
            _join(strand.warp, barrier)
        pass_barrier(machine, barrier)
    elif parts[0] != "arrive":
        park(strand, barrier.waiters, barrier)


def _threads(strand: Strand, number: int, operands: list[Operand]) -> int:
    """How many threads a barrier is for; 0: all of the CTA."""
    if number > _MOST:
        raise Fault("barrier", f"bar {number}; a CTA has barriers 0 to {_MOST}")
    if not operands:
        return 0
    total = _same_of(strand, operands[0], "the threads of a barrier")
    if total == 0 or total % 32:
        raise Fault("barrier", f"bar {number} for {total} threads; a multiple of 32 is needed")
    return total


@dataclass(eq=False)
class _Vote:
    """What a warp brings to a `barrier.red`, and where its result goes."""

    strand: Strand
    what: str
    target: Operand
    true: int
    lanes: Array

    def deliver(self, true: int, threads: int) -> None:
        """The result of all of them."""
        value = {"popc": true, "or": true > 0, "and": true == threads}[self.what]
        write_lanes(self.strand, self.target, self.lanes, np.full(32, value))


def _reduction(strand: Strand, instruction: Instruction, parts: list[str], operands: list[Operand]) -> _Vote:
    """Take the target and the predicate from the operands."""
    if len(parts) != 2 or _REDUCTIONS.get(parts[0]) != parts[1] or len(operands) not in (3, 4):
        raise refused(instruction)
    target, predicate = operands.pop(0), operands.pop()
    if isinstance(predicate, Negated):
        given = ~read_lanes(strand, predicate.register, "?")
    else:
        given = read_lanes(strand, predicate, "?")
    true = given & strand.mask
    return _Vote(strand, parts[0], target, int(np.count_nonzero(true)), strand.mask.copy())


def _check_kind(barrier: CountedBarrier, vote: _Vote | None) -> None:
    """PTX ISA 9.7.13.1: `red` is not mixed with the others, nor with another `red`, at one barrier at a time."""
    kind = "sync or arrive" if vote is None else f"red.{vote.what}"
    if barrier.members and barrier.kind != kind:
        raise Fault("barrier", f"{barrier}: {kind} meets {barrier.kind}")
    barrier.kind = kind
    if vote is not None:
        barrier.votes.append(vote)


def _same_of(strand: Strand, operand: Operand, what: str) -> int:
    """What all lanes of a strand must agree on."""
    lanes = read_lanes(strand, operand, "u4")[strand.mask]
    if (lanes != lanes[0]).any():
        raise Fault("divergence", f"the lanes of a warp disagree on {what}: {lanes.tolist()}")
    return int(lanes[0])


def _gather(barrier: CountedBarrier, warp: Warp) -> None:
    """What the arriving warp knows goes into the barrier."""
    if warp.thread is not None:
        barrier.gathered = warp.thread.leave(barrier.gathered)


def _join(warp: Warp, barrier: CountedBarrier) -> None:
    """What all that arrived knew is known to a warp that passes."""
    if warp.thread is not None and barrier.passed is not None:
        warp.thread.join(barrier.passed)


def pass_barrier(machine: Wakes, barrier: CountedBarrier) -> None:
    """A barrier is complete: who is parked at it goes on."""
    votes, barrier.votes = barrier.votes, []
    true, threads = sum(vote.true for vote in votes), sum(int(np.count_nonzero(vote.lanes)) for vote in votes)
    for vote in votes:
        vote.deliver(true, threads)
    for strand in barrier.waiters:
        _join(strand.warp, barrier)
    machine.wake(barrier.waiters)


def _cluster_barrier(machine: Wakes, strand: Strand, instruction: Instruction, parts: list[str]) -> None:
    what, *semantics = parts
    if semantics not in _CLUSTER_SEMANTICS.get(what, ()):
        raise refused(instruction)
    warp = strand.warp
    cluster = warp.cta.cluster
    barrier = cluster.barrier
    if what == "arrive":
        if warp.cluster_ticket >= 0:
            raise Fault("barrier", "barrier.cluster.arrive twice without a wait between")
        warp.cluster_ticket = barrier.generation
        if semantics != ["relaxed"]:
            _gather(barrier, warp)
        elif warp.thread is not None:
            barrier.gathered = warp.thread.leave_initialised(barrier.gathered)
        barrier.arrive(warp, 32, 0)
        if barrier.complete_if_all(cluster.live_warps()):
            machine.wake(barrier.waiters)
        return
    if warp.cluster_ticket < 0:
        raise Fault("barrier", "barrier.cluster.wait without an arrive")
    if barrier.generation == warp.cluster_ticket:
        strand.pc -= 1
        park(strand, barrier.waiters, barrier)
    else:
        warp.cluster_ticket = -1
        _join(warp, barrier)
