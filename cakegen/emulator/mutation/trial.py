"""One program unmutated, and its mutants under the schedules until one of them shows that a mutant is broken."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cakegen.emulator.faults import Fault
from cakegen.emulator.launches.cases import emulate_case, emulate_chain
from cakegen.emulator.launches.launch import Options, load_program
from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.machine.warp import Strand, Warp
from cakegen.emulator.mutation.mutants import Mutant
from cakegen.emulator.mutation.targets import Mutated, Target
from cakegen.emulator.text.parse import parse_kernel
from cakegen.emulator.text.translate import Program
from cakegen.errors import EmulationError
from cakegen.registry import Registry

SURVIVED, REFUSED, CRASHED = "survived", "refused", "crashed"
WRONG, UNSTEADY = "wrong values", "bits depend on the schedule"
# Outcomes that say nothing against a mutant.
ALIVE = (SURVIVED, REFUSED, CRASHED)
# A mutant that still runs after so many times the instructions of the program hangs; a short one gets a floor.
_LIMIT_FACTOR, _LIMIT_FLOOR = 4, 200_000
# The last schedule: the request in a stream of launches that overlap, which is what `griddepcontrol.wait` is for. They
# do for certain where everything is late.
CHAIN = ("chain", 0)
# Values are compared with the reference's tolerances, which any arithmetic meets; this one is the fastest.
_ARITHMETIC = "wide"
Schedule = tuple[str, int]


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Parameters
    ----------
    outcome
        The kind of a fault, `wrong values`, `bits depend on the schedule`, `refused` (it holds a form that is not
        modelled, which says nothing about the checks), `crashed` (an error of the emulator itself), or `survived`.
    schedule
        The schedule that showed it; empty where none did.
    message
        The first line of the report.
    seconds
        Wall time of all its runs.
    """

    outcome: str
    schedule: str
    message: str
    seconds: float

    @property
    def killed(self) -> bool:
        """Whether a schedule showed that it is broken."""
        return self.outcome not in ALIVE


def schedules(seeds: int, *, chain: bool = True) -> Iterator[Schedule]:
    """Both extremes, then the seeds, then the chain."""
    yield from (("early", 0), ("late", 0))
    yield from (("random", seed) for seed in range(seeds))
    if chain:
        yield CHAIN


@dataclass(frozen=True)
class Outcome:
    """What a run came to: what is wrong in words, copies of its outputs, warp-instructions of its longest launch."""

    problems: tuple[str, ...]
    outputs: dict[str, Any]
    instructions: int


@dataclass
class Reach:
    """What runs of an unmutated program came to.

    Parameters
    ----------
    stops
        Indices of the stops that were executed.
    phases
        Phases that the mbarrier with the most of them completed: 2 and more, and a ring has wrapped around.
    instructions
        Warp-instructions of the longest launch.
    places
        In the text, of all instructions that were executed.
    """

    stops: set[int] = field(default_factory=set)
    phases: int = 0
    instructions: int = 0
    places: set[tuple[int, int]] = field(default_factory=set)


class _ReachingMachine(Machine):
    """A machine that notes the stops of one program."""

    def __init__(self, reach: Reach, program: Program, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._reach = reach if self.program is program else None

    def _stop(self, warp: Warp, strand: Strand, pc: int) -> None:
        super()._stop(warp, strand, pc)
        if self._reach is not None:
            self._reach.stops.add(pc)
            if self.kernel.instructions[pc].root == "mbarrier":
                phases = [barrier.phase for barrier in warp.cta.shared.barriers.values()]
                self._reach.phases = max(self._reach.phases, *phases, 0)


class Trial:
    """The runs of one program's mutants: what it takes and reaches unmutated, and what a schedule shows of each.

    Scopes are taken as strictly as the program itself bears.

    Raises
    ------
    EmulationError
        The program itself fails.
    """

    def __init__(self, target: Mutated, chosen: Sequence[Schedule]) -> None:
        self.target = target
        self._schedules = tuple(chosen)
        try:
            self.scopes, reach = "strict", self._run_unmutated("strict")
        except Fault as fault:
            if fault.kind != "race":
                raise
            # rings between CTAs are built on any scope, here and elsewhere
            self.scopes, reach = "practice", self._run_unmutated("practice")
        self.wraps = reach.phases >= 2
        self.instructions = reach.instructions
        self._limit = max(_LIMIT_FACTOR * reach.instructions, _LIMIT_FLOOR)
        self._reached = reach.places

    def _run_unmutated(self, scopes: str) -> Reach:
        # blocks are translated as they are reached
        program = Program(parse_kernel(self.target.ptx, self.target.symbol))
        reach = Reach()
        for schedule in (("early", 0), ("random", 0), *self._schedules[-1:]):
            machine = Machine if schedule == CHAIN else functools.partial(_ReachingMachine, reach, program)
            outcome = self.emulate(program, schedule, machine=machine, scopes=scopes)
            if outcome.problems:
                raise EmulationError(f"{self.target.name}: the program itself is wrong: {'; '.join(outcome.problems)}")
            reach.instructions = max(reach.instructions, outcome.instructions)
        reached = reach.stops.union(*((index for index, _ in block.written) for block in program.blocks.values()))
        reach.places = {program.kernel.instructions[index].place.span for index in reached}
        return reach

    def emulate(self, program: Program, schedule: Schedule, **facts: Any) -> Outcome:
        """Run a program in the place of the unmutated one."""
        raise NotImplementedError

    def reached(self, mutants: Sequence[Mutant]) -> tuple[Mutant, ...]:
        """Those of some mutants whose instruction a run of the program executes."""
        return tuple(mutant for mutant in mutants if mutant.instruction.place.span in self._reached)

    def run(self, mutant: Mutant, first_only: bool = False) -> Verdict:
        """Run a mutant until a schedule shows it.

        Parameters
        ----------
        first_only
            Under the first schedule alone: it shows nearly all that any does.
        """
        start = time.perf_counter()
        try:
            text = mutant.apply(self.target.ptx)
            program = Program(parse_kernel(text, self.target.symbol))
            sign = self._first_sign(program, self._schedules[:1] if first_only else self._schedules)
        except EmulationError as error:
            sign = (REFUSED, "", str(error).splitlines()[0])
        return Verdict(*sign, time.perf_counter() - start)

    def _first_sign(self, program: Program, chosen: Sequence[Schedule]) -> tuple[str, str, str]:
        before: dict[str, Any] = {}
        for schedule in chosen:
            name = schedule[0] if schedule[0] != "random" else f"seed {schedule[1]}"
            try:
                report = self.emulate(program, schedule, instruction_limit=self._limit, scopes=self.scopes)
            except Fault as fault:
                return fault.kind, name, fault.message.splitlines()[0]
            except EmulationError:
                raise
            except Exception as error:  # whatever a broken program does, the campaign goes on
                return CRASHED, name, f"{type(error).__name__}: {error}"
            if report.problems:
                return WRONG, name, report.problems[0]
            if schedule == CHAIN:  # it has other inputs
                continue
            changed = [key for key, value in before.items() if not torch.equal(value, report.outputs[key])]
            if changed:
                return UNSTEADY, name, f"{', '.join(changed)} differ between two schedules"
            before = report.outputs
        return SURVIVED, "", ""


class RequestTrial(Trial):
    """The mutants of a program of an export, in the request that launches it.

    Parameters
    ----------
    seeds
        Random schedules, after the extremes; behind them comes the chain.
    """

    def __init__(self, registry: Registry, target: Target, seeds: int) -> None:
        self._registry = registry
        self._target = target
        super().__init__(target, tuple(schedules(seeds)))

    def emulate(self, program: Program, schedule: Schedule, **facts: Any) -> Outcome:
        """As `Trial` has it."""

        def load(registry: Registry, key: str, arch: str) -> Program:
            return program if key == self._target.key else load_program(registry, key, arch)

        kind, seed = ("late", 0) if schedule == CHAIN else schedule
        options = Options(kind, seed, _ARITHMETIC, **facts)
        run = emulate_chain if schedule == CHAIN else emulate_case
        report = run(self._registry, self._target.case, options, load=load)
        longest = max(launch.instructions for launch in report.launches)
        return Outcome(report.problems, report.outputs, longest)
