"""What is timed: an arm is a call with its outputs, made for one case. Imports torch, runtime and this package.

A rival is a function from a case to an arm, registered in `rivals.py`; one that can't run here raises, and the row
records why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cakegen.bench.operands import Case, find_faults, poison
from cakegen.bench.timing import Call, Clock
from cakegen.errors import BenchError
from cakegen.runtime import LatentMoe
from cakegen.runtime.prepared import Runner


@dataclass(eq=False)
class Arm:
    """One way to compute a row.

    Parameters
    ----------
    call
        Enqueues it on the current stream; allocates nothing that it does not own.
    outputs
        Its results by the reference's names; none for an arm that only sets a limit.
    keys
        Logical keys of the programs that it launches; none for a stock chain.
    """

    call: Call
    outputs: Mapping[str, torch.Tensor]
    keys: tuple[str, ...] = ()


class WrongResult(BenchError):
    """An arm does not compute the function; it is not timed."""


def capture_checked(arm: Arm, case: Case, clock: Clock, tolerances: Mapping[str, float]) -> Call:
    """Capture an arm and replay it over poisoned outputs; what is timed later is what was checked here.

    Raises
    ------
    WrongResult
        An output is not what the reference gives.
    """
    captured = clock.capture(arm.call)
    poison(arm.outputs)
    captured()
    faults = find_faults(arm.outputs, case.expected, tolerances)
    if faults:
        raise WrongResult("; ".join(faults))
    return captured


def prepare_ours(
    moe: LatentMoe, case: Case, backend: str = "auto", overlap: bool = False
) -> tuple[Runner, dict[str, torch.Tensor]]:
    """A runner of the generated programs for a case, and its outputs by name.

    Raises
    ------
    CakeError
        The request is not served, or a program does not load.
    """
    rooms = case.rooms()
    runner = moe.prepare(
        case.row.stage, case.operands() | rooms, tp=case.row.tp, rank=case.rank, backend=backend, overlap=overlap
    )
    return runner, {spec.short: rooms[spec.name] for spec in case.dims.stages[case.row.stage].outputs}


def build_ours(moe: LatentMoe, case: Case, backend: str = "auto", overlap: bool = False) -> Arm:
    """The generated programs as an arm; `overlap` as `LatentMoe.prepare_front` has it.

    Raises
    ------
    CakeError
        As `prepare_ours`.
    """
    runner, outputs = prepare_ours(moe, case, backend, overlap)
    keys = tuple(launch.key for launch in runner.plan.launches) if runner.plan is not None else ()
    return Arm(runner, outputs, keys)
