"""Arithmetic instructions as Python expressions on arrays of 32 lanes.

`ExpressionWriter.value` gives the text of an instruction's result and its type; `translate` puts such texts into one
function a basic block. Families, not opcode strings: a type or a modifier that a family does not know is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import numpy as np

from cakegen.emulator.text import arithmetic
from cakegen.emulator.text.ptx import Immediate, Instruction, Kernel, Negated, Operand, Register, Special, Symbol
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
BANK_TYPES = {"pred": "?", "b16": "u2", "b32": "u4", "f32": "f4", "b64": "u8", "f64": "f8", "b128": "c16"}
TYPES_BYTES = {"?": 1, "c16": 16} | {f"{letter}{size}": size for letter in "iuf" for size in (1, 2, 4, 8)}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<="}
_COMPARISONS |= {"hi": ">", "hs": ">="}
_BITWISE = {"and": "&", "or": "|", "xor": "^"}
_ROUNDINGS = {"rn"}
_APPROXIMATE = {
    "ex2": "exp2_f32",
    "lg2": "log2_f32",
    "rsqrt": "reciprocal_root_f32",
    "tanh": "tanh_f32",
    "rcp": "reciprocal_f32",
}

# Packed and half types -> (type of the register, type of an item, how functions of `arithmetic` name it)
_PACKED = {"f32x2": ("u8", "f4", "f32"), "bf16x2": ("u4", "u2", "bf16"), "bf16": ("u2", "u2", "bf16")}
_PACKED_ROOTS = {"add", "sub", "mul", "fma"}

# Operands of each family, the result included.
_OPERANDS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "rem", "and", "or", "xor", "shl", "shr", "setp", "mapa"), (3,)),
    **dict.fromkeys(("mad", "fma", "selp"), (4,)),
    **dict.fromkeys(("abs", "neg", "not", "popc", "mov", "cvta", "sqrt", *_APPROXIMATE), (2,)),
    "min": (3, 4),
    "max": (3, 4),
    "cvt": (2, 3),
    "bfi": (5,),
    "createpolicy": (1,),
}

Value = tuple[str, str]


def environment() -> dict[str, Any]:
    """Names that the expressions use."""
    names: dict[str, Any] = {
        name: getattr(arithmetic, name) for name in dir(arithmetic) if callable(getattr(arithmetic, name))
    }
    names |= {"sqrt": np.sqrt, "minimum": np.minimum, "maximum": np.maximum, "absolute": np.abs, "where": np.where}
    names |= {"bitwise_count": np.bitwise_count, "isnan": np.isnan}
    return names


class ExpressionWriter:
    """Writes expressions for one kernel; literals become numbered constants `K[i]`."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.constants: list[Any] = []
        self._numbered: dict[tuple[int, int, str], int] = {}
        self._families: dict[str, Callable[[Instruction], Value]] = {
            "add": self._add,
            "sub": self._add,
            "mul": self._mul,
            "mad": self._mad,
            "fma": self._fma,
            "div": self._div,
            "rem": self._rem,
            "min": self._minmax,
            "max": self._minmax,
            "abs": self._abs,
            "neg": self._neg,
            "and": self._bitwise,
            "or": self._bitwise,
            "xor": self._bitwise,
            "not": self._not,
            "shl": self._shift,
            "shr": self._shift,
            "bfi": self._bfi,
            "popc": self._popc,
            "setp": self._setp,
            "selp": self._selp,
            "mov": self._mov,
            "cvt": self._cvt,
            "cvta": self._cvta,
            "mapa": self._mapa,
            "createpolicy": self._policy,
            "sqrt": self._sqrt,
            **dict.fromkeys(_APPROXIMATE, self._approximate),
        }

    def knows(self, root: str) -> bool:
        """Whether a family of arithmetic instructions is known."""
        return root in self._families

    def value(self, instruction: Instruction) -> Value:
        """(expression, numpy type) of an instruction's result.

        Raises
        ------
        EmulationError
            The family does not know the form.
        """
        wanted, found = _OPERANDS[instruction.root], len(instruction.operands)
        if found not in wanted:
            numbers = " or ".join(map(str, wanted))
            raise PtxError(f"{instruction.place}: {instruction.text!r}: {instruction.root} has {numbers} operands")
        if instruction.parts[-1] in _PACKED and instruction.root in _PACKED_ROOTS:
            return self._packed(instruction)
        return self._families[instruction.root](instruction)

    def read(self, operand: Operand, kind: str) -> str:
        """The expression of an operand as a numpy type."""
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
            if operand.name == "globaltimer":
                return f"w.clock().astype('{kind}')"
            return f"w.special({operand.name!r})" + ("" if kind == "u4" else f".astype('{kind}')")
        if isinstance(operand, Symbol):
            parameter = self._kernel.parameter(operand.name)
            if parameter is not None:
                return self.constant(parameter.offset, 0, kind)
            return f"w.symbol({operand.name!r}).astype('{kind}')"
        raise EmulationError(f"operand {operand} has no value")

    def constant(self, value: int, float_bytes: int, kind: str) -> str:
        """A literal as 32 equal lanes."""
        key = (value, float_bytes, kind)
        if key not in self._numbered:
            self._numbered[key] = len(self.constants)
            self.constants.append(_lanes_of(value, float_bytes, kind))
        return f"K[{self._numbered[key]}]"

    def refuse(self, instruction: Instruction) -> EmulationError:
        """The error for a form that is not modelled."""
        return EmulationError(f"{instruction.place}: {instruction.text!r} is not modelled (opcode form unknown)")

    def _type(self, instruction: Instruction, allowed: Set[str] = frozenset()) -> str:
        """The numpy type of the last part; every other part must be allowed."""
        *modifiers, kind = instruction.parts[1:]
        if kind not in TYPES or not set(modifiers) <= allowed:
            raise self.refuse(instruction)
        return TYPES[kind]

    def _all(self, instruction: Instruction, kind: str) -> list[str]:
        return [self.read(operand, kind) for operand in instruction.operands[1:]]

    def _finish(self, instruction: Instruction, text: str) -> str:
        if "ftz" in instruction.parts:
            text = f"flush_f32({text})"
        return f"saturate({text})" if "sat" in instruction.parts else text

    def _floats(self, instruction: Instruction, kind: str) -> list[str]:
        values = self._all(instruction, kind)
        return [f"flush_f32({value})" for value in values] if "ftz" in instruction.parts else values

    def _packed(self, instruction: Instruction) -> Value:
        """Two items of a register at once, or one bf16: the same operation on each."""
        whole, item, name = _PACKED[instruction.parts[-1]]
        modifiers = set(instruction.parts[1:-1])
        if not modifiers <= ({"rn", "ftz"} if name == "f32" else {"rn"}):
            raise self.refuse(instruction)
        values = [f"{value}.view('{item}')" for value in self._all(instruction, whole)]
        if "ftz" in modifiers:
            values = [f"flush_f32({value})" for value in values]
        text = f"{instruction.root}_{name}({', '.join(values)})"
        return f"{self._finish(instruction, text)}.view('{whole}')", whole

    def _add(self, instruction: Instruction) -> Value:
        kind = self._type(instruction, {"rn", "ftz", "sat"})
        if "f" not in kind and len(instruction.parts) != 2:
            raise self.refuse(instruction)
        kind = _unsigned(kind)
        a, b = self._floats(instruction, kind)
        return self._finish(instruction, f"({a} {'+' if instruction.root == 'add' else '-'} {b})"), kind

    def _mul(self, instruction: Instruction) -> Value:
        kind = self._type(instruction, {"rn", "ftz", "sat", "lo", "wide", "hi"})
        a, b = self._floats(instruction, kind)
        if "wide" in instruction.parts:
            return f"multiply_wide({a}, {b})", f"{kind[0]}{int(kind[1]) * 2}"
        if "hi" in instruction.parts:
            if kind[1] == "8":
                raise self.refuse(instruction)
            return f"multiply_high({a}, {b})", kind
        return self._finish(instruction, f"({a} * {b})"), kind

    def _mad(self, instruction: Instruction) -> Value:
        kind = self._type(instruction, {"lo", "wide"})
        if "wide" in instruction.parts:
            wide = f"{kind[0]}{int(kind[1]) * 2}"
            a, b = (self.read(operand, kind) for operand in instruction.operands[1:3])
            return f"(multiply_wide({a}, {b}) + {self.read(instruction.operands[3], wide)})", wide
        if "f" in kind:
            raise self.refuse(instruction)
        a, b, c = self._all(instruction, _unsigned(kind))
        return f"({a} * {b} + {c})", _unsigned(kind)

    def _fma(self, instruction: Instruction) -> Value:
        kind = self._type(instruction, {"rn", "ftz", "sat"})
        if kind != "f4":
            raise self.refuse(instruction)
        a, b, c = self._floats(instruction, kind)
        return self._finish(instruction, f"fma_f32({a}, {b}, {c})"), kind

    def _div(self, instruction: Instruction) -> Value:
        kind = self._type(instruction, {"rn", "ftz", "approx", "full"})
        a, b = self._floats(instruction, kind)
        if "f" in kind:
            return self._finish(instruction, f"({a} / {b})"), kind
        return f"divide({a}, {b})", kind

    def _rem(self, instruction: Instruction) -> Value:
        kind = self._type(instruction)
        a, b = self._all(instruction, kind)
        return f"remainder({a}, {b})", kind

    def _minmax(self, instruction: Instruction) -> Value:
        """Of two values, or of three in fp32 (PTX ISA 9.7.3.12 and 9.7.3.13: sm_100 and later)."""
        kind = self._type(instruction, {"ftz"})
        a, b, *third = self._floats(instruction, kind)
        name = f"{'minimum' if instruction.root == 'min' else 'maximum'}{'_f32' if 'f' in kind else ''}"
        if not third:
            return f"{name}({a}, {b})", kind
        if kind != "f4" or self._kernel.target.startswith("sm_90"):
            raise PtxError(
                f"{instruction.place}: {instruction.text!r}: three inputs are for f32 on sm_100 and later; the target "
                f"is {self._kernel.target}"
            )
        return f"{name}({name}({a}, {b}), {third[0]})", kind

    def _abs(self, instruction: Instruction) -> Value:
        kind = self._type(instruction, {"ftz"})
        return self._finish(instruction, f"absolute({self._floats(instruction, kind)[0]})"), kind

    def _neg(self, instruction: Instruction) -> Value:
        kind = self._type(instruction, {"ftz"})
        return self._finish(instruction, f"(-{self._floats(instruction, kind)[0]})"), kind

    def _bitwise(self, instruction: Instruction) -> Value:
        kind = self._type(instruction)
        a, b = self._all(instruction, kind)
        return f"({a} {_BITWISE[instruction.root]} {b})", kind

    def _not(self, instruction: Instruction) -> Value:
        kind = self._type(instruction)
        return f"(~{self._all(instruction, kind)[0]})", kind

    def _shift(self, instruction: Instruction) -> Value:
        kind = self._type(instruction)
        a = self.read(instruction.operands[1], kind)
        count = instruction.operands[2]
        operator, name = ("<<", "shift_left") if instruction.root == "shl" else (">>", "shift_right")
        if isinstance(count, Immediate) and 0 <= count.value < int(kind[1]) * 8:
            return f"({a} {operator} {self.constant(count.value, 0, kind)})", kind
        return f"{name}({a}, {self.read(count, 'u4')})", kind

    def _bfi(self, instruction: Instruction) -> Value:
        if instruction.parts != ("bfi", "b32"):
            raise self.refuse(instruction)
        return f"bit_insert({', '.join(self._all(instruction, 'u4'))})", "u4"

    def _popc(self, instruction: Instruction) -> Value:
        kind = self._type(instruction)
        return f"bitwise_count({self._all(instruction, kind)[0]}).astype('u4')", "u4"

    def _setp(self, instruction: Instruction) -> Value:
        kind = TYPES.get(instruction.parts[-1])
        modifiers = [part for part in instruction.parts[1:-1] if part != "ftz"]
        if kind is None or len(modifiers) != 1 or len(instruction.operands) != 3:
            raise self.refuse(instruction)
        comparison = modifiers[0]
        a, b = self._floats(instruction, kind)
        unordered = comparison.endswith("u") and kind[0] == "f" and comparison[:-1] in _COMPARISONS
        operator = _COMPARISONS.get(comparison[:-1] if unordered else comparison)
        if operator is None:
            raise self.refuse(instruction)
        if comparison == "ne" and kind[0] == "f":
            return f"(({a} < {b}) | ({a} > {b}))", "?"
        return (f"(({a} {operator} {b}) | isnan({a}) | isnan({b}))" if unordered else f"({a} {operator} {b})"), "?"

    def _selp(self, instruction: Instruction) -> Value:
        kind = self._type(instruction)
        a, b = (self.read(operand, kind) for operand in instruction.operands[1:3])
        return f"where({self.read(instruction.operands[3], '?')}, {a}, {b})", kind

    def _mov(self, instruction: Instruction) -> Value:
        kind = self._type(instruction)
        return self.read(instruction.operands[1], kind), kind

    def _sqrt(self, instruction: Instruction) -> Value:
        kind = self._type(instruction, {"rn", "approx", "ftz"})
        return self._finish(instruction, f"sqrt({self._floats(instruction, kind)[0]})"), kind

    def _approximate(self, instruction: Instruction) -> Value:
        kind = self._type(instruction, {"approx", "ftz", "rn"})
        if kind != "f4":
            raise self.refuse(instruction)
        argument = self._floats(instruction, kind)[0]
        return self._finish(instruction, f"{_APPROXIMATE[instruction.root]}({argument})"), kind

    def _cvta(self, instruction: Instruction) -> Value:
        """The generic view of a window starts at its own base; `to` goes back."""
        spaces = set(instruction.parts[1:-1]) - {"to"}
        if len(spaces) != 1 or instruction.parts[-1] != "u64" or not spaces <= {"shared", "param", "global"}:
            raise self.refuse(instruction)
        space = spaces.pop()
        source = self.read(instruction.operands[1], "u8")
        if space == "global":
            return source, "u8"
        window = self.constant(1 << 60 if space == "shared" else 2 << 60, 0, "u8")
        return f"({source} {'-' if 'to' in instruction.parts else '+'} {window})", "u8"

    def _mapa(self, instruction: Instruction) -> Value:
        if instruction.parts != ("mapa", "shared::cluster", "u32"):
            raise self.refuse(instruction)
        address, rank = self._all(instruction, "u4")
        low, shift = self.constant(0xFFFFFF, 0, "u4"), self.constant(24, 0, "u4")
        return f"(({address} & {low}) | ({rank} << {shift}))", "u4"

    def _policy(self, instruction: Instruction) -> Value:
        """PTX ISA 9.7.9.19: an opaque hint for caches."""
        if instruction.parts[1:3] != ("fractional", "L2::evict_first") or len(instruction.operands) != 1:
            raise self.refuse(instruction)
        return self.constant(0, 0, "u8"), "u8"

    def _cvt(self, instruction: Instruction) -> Value:
        *modifiers, to, source = instruction.parts[1:]
        rounding = set(modifiers)
        if to == "bf16x2" and source == "f32" and rounding == {"rn"}:
            high, low = self._all(instruction, "f4")
            return f"bf16_pair({high}, {low})", "u4"
        if to == "bf16" and source == "f32" and rounding == {"rn"}:
            return f"bf16_single({self._all(instruction, 'f4')[0]})", "u2"
        if to == "f32" and source == "bf16" and not rounding:
            return f"bf16_value({self._all(instruction, 'u2')[0]})", "f4"
        if to not in TYPES or source not in TYPES:
            raise self.refuse(instruction)
        kind, value = TYPES[to], self._all(instruction, TYPES[source])[0]
        into_float, from_float = to[0] == "f", source[0] == "f"
        if from_float and not into_float and rounding <= {"rzi", "ftz"} and "rzi" in rounding:
            return f"to_integer({value}, '{kind}')", kind
        if (into_float and rounding <= _ROUNDINGS) or (not into_float and not from_float and not rounding):
            return f"{value}.astype('{kind}')", kind
        raise self.refuse(instruction)


def _unsigned(kind: str) -> str:
    return f"u{kind[1]}" if kind[0] == "i" else kind


def _lanes_of(value: int, float_bytes: int, kind: str) -> Any:
    dtype = np.dtype(kind)
    if kind == "?":
        return np.full(LANES, value != 0)
    bits = value & ((1 << (dtype.itemsize * 8)) - 1)
    if dtype.kind == "f" and float_bytes == 8 and dtype.itemsize == 4:
        return np.full(LANES, np.uint64(value)).view("f8").astype("f4")
    return np.full(LANES, bits, f"u{dtype.itemsize}").view(dtype)
