"""One PTX instruction as text that can be rewritten.

An operand that a mutation changes by an instruction of its own (`add`, `xor`) gets a register in a scope of its own,
so that nothing else sees the change.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cakegen.emulator.text.operand_text import split_operands
from cakegen.emulator.text.ptx import Instruction

_STATEMENT = re.compile(r"(@!?[%\w$]+\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_OFFSET = re.compile(r"(.*?)\s*\+\s*(-?\w+)$", re.S)
_SCRATCH = "%mutated"


@dataclass(frozen=True)
class Statement:
    """An instruction in pieces: guard with its space (or nothing), opcode, operands as written."""

    guard: str
    opcode: str
    operands: tuple[str, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        """The opcode cut at its dots."""
        return tuple(self.opcode.split("."))

    def text(self, opcode: str | None = None, operands: Sequence[str] | None = None) -> str:
        """The instruction again, with another opcode or other operands; no semicolon."""
        chosen = self.operands if operands is None else operands
        return f"{self.guard}{opcode or self.opcode} {', '.join(chosen)}".rstrip()

    def with_operand(self, number: int, text: str) -> str:
        """The instruction with one operand replaced."""
        return self.text(operands=[*self.operands[:number], text, *self.operands[number + 1 :]])

    def with_computed(self, number: int, operation: str, amount: int, bits: int, inner: int | None = None) -> str:
        """The instruction with an operand replaced by `operation operand, amount`, computed in front of it.

        Parameters
        ----------
        inner
            Of a tensor address, which coordinate; else the whole operand.
        """
        whole = self.operands[number]
        if inner is None:
            old, new = whole, _SCRATCH
        else:
            base, vector = split_operands(whole[1:-1])
            coordinates = split_operands(vector[1:-1])
            old = coordinates[inner]
            coordinates[inner] = _SCRATCH
            new = f"[{base}, {{{', '.join(coordinates)}}}]"
        computed = f".reg .b{bits} {_SCRATCH}; {operation} {_SCRATCH}, {old}, {amount}"
        return f"{{ {computed}; {self.with_operand(number, new)}; }}"

    def with_moved_address(self, number: int, num_bytes: int) -> str:
        """The instruction with an address operand `[base + offset]` moved."""
        inside = self.operands[number][1:-1].strip()
        base, *rest = split_operands(inside)
        match = _OFFSET.match(base)
        name, offset = (match.group(1), int(match.group(2), 0)) if match else (base, 0)
        address = f"[{', '.join([f'{name}+{offset + num_bytes}', *rest])}]"
        return self.with_operand(number, address)


def statement_of(instruction: Instruction) -> Statement:
    """An instruction's text in pieces."""
    match = _STATEMENT.fullmatch(instruction.text)
    assert match is not None, instruction.text
    guard, opcode, rest = match.groups()
    return Statement(guard or "", opcode, tuple(split_operands(rest)))
