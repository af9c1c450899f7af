"""Mutants of anybody's kernel: a launch file's launches, with the unmutated kernel's bits as what is right."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.launches.arrays import HostBuffer
from cakegen.emulator.launches.launch import Options, program_of
from cakegen.emulator.launches.sequence import KernelLaunch, run_sequence
from cakegen.emulator.mutation.mutants import Mutant
from cakegen.emulator.mutation.targets import Mutated
from cakegen.emulator.mutation.trial import Outcome, Schedule, Trial, schedules
from cakegen.emulator.text.translate import Program


@dataclass(frozen=True, eq=False)
class SequenceTarget(Mutated):
    """A kernel of a PTX text, and launches that run it, alone or with other kernels of the text.

    Parameters
    ----------
    buffers
        (name, role, element, first values) of what the launches share.
    sources
        File -> its lines, of files that the kernel's line information names, where they are known.
    arithmetic
        The tensor core's.
    """

    name: str
    ptx: str
    symbol: str
    launches: tuple[KernelLaunch, ...]
    buffers: tuple[tuple[str, str, str, NDArray[Any]], ...]
    sources: Mapping[str, tuple[str, ...]]
    arithmetic: str = "wide"

    @property
    def digest(self) -> str:
        """Of all that decides what a mutant comes to."""
        shown = [self.name, self.ptx, self.symbol, repr(self.launches), self.arithmetic]
        values = [(name, role, element, hashlib.sha256(array.tobytes())) for name, role, element, array in self.buffers]
        shown += [f"{name} {role} {element} {digest.hexdigest()}" for name, role, element, digest in values]
        return hashlib.sha256("\0".join(shown).encode()).hexdigest()

    def __hash__(self) -> int:
        """Equal targets have one digest: a worker keeps its trial from site to site."""
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        """See `__hash__`."""
        return isinstance(other, SequenceTarget) and self.digest == other.digest

    def source_lines(self, mutant: Mutant) -> tuple[str, ...]:
        """As `Mutated` has it; `FILE:LINE` where the text is not known."""
        return tuple(self._line(file, line) for file, line in mutant.instruction.place.source)

    def _line(self, file: str, line: int) -> str:
        lines = self.sources.get(file, ())
        return lines[line - 1].strip() if line <= len(lines) else f"{file}:{line}"

    def kernel_line(self, mutant: Mutant) -> str:
        """The line in a function that the kernel calls; of a shorter chain of calls, the outermost."""
        lines = self.source_lines(mutant)
        return lines[max(len(lines) - 2, min(1, len(lines) - 1))] if lines else mutant.instruction.text


class SequenceTrial(Trial):
    """The mutants of a launch file's kernel.

    Parameters
    ----------
    seeds
        Random schedules, after the extremes.
    """

    def __init__(self, target: SequenceTarget, seeds: int) -> None:
        self._target = target
        self._others = {
            each.entry: program_of(target.ptx, each.entry) for each in target.launches if each.entry != target.symbol
        }
        self._wanted: dict[str, NDArray[Any]] = {}
        super().__init__(target, tuple(schedules(seeds, chain=False)))

    def emulate(self, program: Program, schedule: Schedule, **facts: Any) -> Outcome:
        """As `Trial` has it; the first run's outputs are what every other one must have, bit for bit."""
        target = self._target
        buffers = {name: HostBuffer(name, role, element, array) for name, role, element, array in target.buffers}
        options = Options(*schedule, target.arithmetic, **facts)
        programs = {**self._others, target.symbol: program}
        reports = run_sequence(programs, target.launches, buffers, options)
        written = {name: each.array for name, each in buffers.items() if each.role != "read"}
        self._wanted = self._wanted or written
        wrong = [name for name, array in written.items() if not _same(array, self._wanted[name])]
        problems = tuple(f"{name} has not the bits of the unmutated kernel" for name in wrong)
        return Outcome(problems, {}, max(report.instructions for report in reports))


def _same(array: NDArray[Any], wanted: NDArray[Any]) -> bool:
    return np.array_equal(array.reshape(-1).view(np.uint8), wanted.reshape(-1).view(np.uint8))
