"""Every mutant of a program, from its PTX. Pure: text in, edits out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cakegen.emulator.mutation.hoist import hoists
from cakegen.emulator.mutation.operators import OPERATORS
from cakegen.emulator.mutation.statements import statement_of
from cakegen.emulator.text.parse import parse_kernel
from cakegen.emulator.text.ptx import Instruction, Kernel

# (start, end, text that stands there instead), in characters of the PTX
Edit = tuple[int, int, str]
HOIST = "hoist"


@dataclass(frozen=True)
class Mutant:
    """One change to one program.

    Parameters
    ----------
    operator
        Name of the operator.
    change
        What it did here, in few words.
    instruction
        The instruction that was changed.
    edits
        Places in the PTX and what stands there instead; they do not overlap.
    """

    operator: str
    change: str
    instruction: Instruction
    edits: tuple[Edit, ...]

    def apply(self, ptx: str) -> str:
        """The mutated text; lines keep their numbers."""
        for start, end, text in sorted(self.edits, reverse=True):
            ptx = ptx[:start] + text + ptx[end:]
        return ptx


def mutants_of(ptx: str, symbol: str) -> tuple[Mutant, ...]:
    """Every mutant of an entry, in the order of its instructions.

    Raises
    ------
    EmulationError
        The text can't be read.
    """
    return tuple(_mutants(parse_kernel(ptx, symbol), ptx))


def _mutants(kernel: Kernel, ptx: str) -> Iterator[Mutant]:
    for instruction in kernel.instructions:
        statement = statement_of(instruction)
        if len(statement.parts) < 2:
            continue
        for operator in OPERATORS:
            for change, text in operator.rewrite(statement):
                yield Mutant(operator.name, change, instruction, ((*instruction.place.span, text),))
    for change, instruction, edits in hoists(kernel, ptx):
        yield Mutant(HOIST, change, instruction, edits)
