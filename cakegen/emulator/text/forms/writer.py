"""What every family of instructions asks of a kernel's text: operands and literals as expressions, types, refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from cakegen.emulator.text.ptx import (
    Address,
    Immediate,
    Instruction,
    Kernel,
    Negated,
    Operand,
    Register,
    Sink,
    Special,
    Symbol,
)
from cakegen.errors import EmulationError, PtxError

LANES = 32
# PTX type -> numpy type, by which an operand is read
TYPES = {
    "pred": "?",
    "u8": "u1",
    "b8": "u1",
    "s8": "i1",
    "u16": "u2",
    "b16": "u2",
    "s16": "i2",
    "u32": "u4",
    "b32": "u4",
    "s32": "i4",
    "f32": "f4",
    "u64": "u8",
    "b64": "u8",
    "s64": "i8",
    "f64": "f8",
}
BANK_TYPES = {"pred": "?", "b8": "u1", "b16": "u2", "b32": "u4", "f32": "f4", "b64": "u8", "f64": "f8", "b128": "c16"}
TYPES_BYTES = {"?": 1, "c16": 16} | {f"{letter}{size}": size for letter in "iuf" for size in (1, 2, 4, 8)}
# Roundings other than to nearest even
DIRECTED = frozenset({"rz", "rm", "rp"})
# Special registers whose value is another at every read -> the bit of the time that is their lowest
_CLOCKS = {"globaltimer": 0, "globaltimer_lo": 0, "globaltimer_hi": 32, "clock64": 0, "clock": 0, "clock_hi": 32}

Value = tuple[str, str]


class FormWriter:
    """Writes operands for one kernel; literals become numbered constants `K[i]`."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.constants: list[Any] = []
        self._numbered: dict[tuple[int, int, str], int] = {}

    def read(self, operand: Operand, kind: str) -> str:
        """The expression of an operand as a numpy type.

        Raises
        ------
        EmulationError
            It is no value.
        """
        if isinstance(operand, Register):
            bank = BANK_TYPES[operand.bank]
            name = f"R[{operand.index}]"
            if bank == kind:
                return name
            if TYPES_BYTES[bank] == TYPES_BYTES[kind] and "?" not in (bank, kind):
                return f"{name}.view('{kind}')"
            return f"{name}.astype('{kind}')"
        if isinstance(operand, Negated):
            return f"(~R[{operand.register.index}])"
        if isinstance(operand, Immediate):
            return self.constant(operand.value, operand.float_bytes, kind)
        if isinstance(operand, Special):
            if operand.name in _CLOCKS:
                shift = _CLOCKS[operand.name]
                clock = f"(w.clock() >> {self.number(shift, 'u8')})" if shift else "w.clock()"
                return f"{clock}.astype('{kind}')"
            return f"w.special({operand.name!r})" + ("" if kind == "u4" else f".astype('{kind}')")
        if isinstance(operand, Symbol):
            for group in (self.kernel.parameters, self.kernel.local):
                for each in group:
                    if each.name == operand.name:
                        return self.number(each.offset, kind)
            return f"w.symbol({operand.name!r}).astype('{kind}')"
        raise EmulationError(f"operand {operand} has no value")

    def constant(self, value: int, float_bytes: int, kind: str) -> str:
        """A literal as 32 equal lanes."""
        key = (value, float_bytes, kind)
        if key not in self._numbered:
            self._numbered[key] = len(self.constants)
            self.constants.append(_lanes_of(value, float_bytes, kind))
        return f"K[{self._numbered[key]}]"

    def number(self, value: int, kind: str) -> str:
        """An integer as 32 equal lanes."""
        return self.constant(value, 0, kind)

    def refuse(self, instruction: Instruction) -> EmulationError:
        """The error for a form that is not modelled."""
        return EmulationError(f"{instruction.place}: {instruction.text!r} is not modelled (opcode form unknown)")

    def type_of(self, instruction: Instruction, allowed: Set[str] = frozenset()) -> str:
        """The numpy type of the last part; every other part must be allowed."""
        *modifiers, kind = instruction.parts[1:]
        if kind not in TYPES or not set(modifiers) <= allowed:
            raise self.refuse(instruction)
        return TYPES[kind]

    def address(self, address: Address, kind: str) -> str:
        """The expression of an address as a numpy type."""
        text = self.read(address.base, kind)
        return f"({text} + {self.number(address.offset, kind)})" if address.offset else text

    def assign(self, target: Operand, text: str, kind: str, mask: str) -> str:
        """A line that writes a register, where a mask says so; `None`: in all lanes."""
        if isinstance(target, Sink):
            return text
        if not isinstance(target, Register):
            raise PtxError(f"{target} can't be written")
        bank = BANK_TYPES[target.bank]
        if bank != kind:
            same = TYPES_BYTES[bank] == TYPES_BYTES[kind] and "?" not in (bank, kind)
            text = f"{text}.{'view' if same else 'astype'}('{bank}')"
        name = f"R[{target.index}]"
        return f"{name} = {text}" if mask == "None" else f"{name} = where({mask}, {text}, {name})"

    def assign_all(self, targets: Sequence[Operand], text: str, kind: str, mask: str) -> str:
        """`t = …; R[a] = t[0]; …` on one line."""
        parts = [f"t = {text}"]
        parts += [
            self.assign(target, f"t[{number}]", kind, mask)
            for number, target in enumerate(targets)
            if not isinstance(target, Sink)
        ]
        return "; ".join(parts)

    def sources(self, instruction: Instruction, kind: str) -> list[str]:
        """All operands but the first, as one type."""
        return [self.read(operand, kind) for operand in instruction.operands[1:]]

    def floats(self, instruction: Instruction, kind: str) -> list[str]:
        """The same, with subnormals flushed where `.ftz` says so."""
        values = self.sources(instruction, kind)
        return [f"flush_f32({value})" for value in values] if "ftz" in instruction.parts else values

    def extremum(self, instruction: Instruction, values: list[str]) -> str:
        """`min` or `max` of two or three floats, with `.NaN`, and `.xorsign.abs` of two or `.abs` of three."""
        modifiers = instruction.parts[1:-1]
        if ("xorsign" in modifiers) != ("abs" in modifiers and len(values) == 2):
            raise self.refuse(instruction)
        name = f"{'minimum' if instruction.root == 'min' else 'maximum'}_{'nan' if 'NaN' in modifiers else 'f32'}"
        plain = ", ".join(values)
        if "abs" in modifiers:
            values = [f"absolute({value})" for value in values]
        text = f"{name}({values[0]}, {values[1]})"
        if len(values) == 3:
            text = f"{name}({text}, {values[2]})"
        return f"with_signs({text}, {plain})" if "xorsign" in modifiers else text

    def finish(self, instruction: Instruction, text: str) -> str:
        """A result with `.ftz` and `.sat`."""
        if "ftz" in instruction.parts:
            text = f"flush_f32({text})"
        return f"saturate({text})" if "sat" in instruction.parts else text


@dataclass(frozen=True)
class Family:
    """Instructions of one name: how many operands they have, the result included, and who writes them."""

    operands: tuple[int, ...]
    write: Callable[[FormWriter, Instruction], Value]


def directed(instruction: Instruction) -> str:
    """The rounding of an instruction other than to nearest even; empty: none."""
    return next((part for part in instruction.parts if part in DIRECTED), "")


def unsigned(kind: str) -> str:
    """The unsigned type of a signed one's width; any other stays."""
    return f"u{kind[1]}" if kind[0] == "i" else kind


def _lanes_of(value: int, float_bytes: int, kind: str) -> Any:
    dtype = np.dtype(kind)
    if kind == "?":
        return np.full(LANES, value != 0)
    bits = value & ((1 << (dtype.itemsize * 8)) - 1)
    if dtype.kind == "f" and float_bytes == 8 and dtype.itemsize == 4:
        return np.full(LANES, np.uint64(value)).view("f8").astype("f4")
    return np.full(LANES, bits, f"u{dtype.itemsize}").view(dtype)
