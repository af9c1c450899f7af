"""Arithmetic of halves, alone or two in a register, and of two fp32 in one (PTX ISA 9.7.3.6, 9.7.4)."""

from __future__ import annotations

from dataclasses import dataclass

from cakegen.emulator.text.forms.writer import DIRECTED, FormWriter, Value, directed
from cakegen.emulator.text.ptx import Instruction


@dataclass(frozen=True)
class Items:
    """A register of items.

    Parameters
    ----------
    whole, item
        numpy types of the register and of an item.
    name
        What the functions on items end with.
    modifiers
        Of add, sub, mul and fma.
    """

    whole: str
    item: str
    name: str
    modifiers: frozenset[str]


_BF16 = frozenset({"rn", "relu"})
_F16 = frozenset({"rn", "ftz", "sat", "relu"})
ITEMS = {
    "f32x2": Items("u8", "f4", "f32", frozenset({"rn", "ftz", *DIRECTED})),
    "bf16x2": Items("u4", "u2", "bf16", _BF16),
    "bf16": Items("u2", "u2", "bf16", _BF16),
    "f16x2": Items("u4", "f2", "f16", _F16),
    "f16": Items("u2", "f2", "f16", _F16),
}
_ARITHMETIC = {"add", "sub", "mul", "fma"}
_CURVES = {"ex2": "exp2_f32", "tanh": "tanh_f32"}
ROOTS = {*_ARITHMETIC, *_CURVES, "min", "max", "abs", "neg"}
_SIGN = {"u4": 0x80008000, "u2": 0x8000}


def is_packed(instruction: Instruction) -> bool:
    """Whether it is one of these: an instruction of such items whose result is one, too."""
    parts = instruction.parts
    return parts[-1] in ITEMS and instruction.root in ROOTS and "f32" not in parts[1:-1]


def packed(writer: FormWriter, instruction: Instruction) -> Value:
    """(expression, numpy type) of such an instruction."""
    root = instruction.root
    if root in _ARITHMETIC:
        return _arithmetic(writer, instruction)
    if instruction.parts[-1] == "f32x2":
        raise writer.refuse(instruction)
    if root in _CURVES:
        return _curve(writer, instruction)
    return _sign(writer, instruction) if root in ("abs", "neg") else _minmax(writer, instruction)


def _arithmetic(writer: FormWriter, instruction: Instruction) -> Value:
    items = ITEMS[instruction.parts[-1]]
    modifiers = set(instruction.parts[1:-1])
    allowed = items.modifiers if instruction.root == "fma" else items.modifiers - {"relu"}
    if not modifiers <= allowed:
        raise writer.refuse(instruction)
    values = [f"{value}.view('{items.item}')" for value in writer.sources(instruction, items.whole)]
    if "ftz" in modifiers:
        values = [f"flush_{items.name}({value})" for value in values]
    rounding = directed(instruction)
    if rounding:
        text = f"{instruction.root}_directed({', '.join(values)}, {rounding!r})"
    else:
        text = f"{instruction.root}_{items.name}({', '.join(values)})"
    for modifier, call in (("ftz", "flush"), ("sat", "saturate"), ("relu", "relu")):
        if modifier in modifiers:
            text = f"{call}_{items.name}({text})"
    return f"{text}.view('{items.whole}')", items.whole


def _sign(writer: FormWriter, instruction: Instruction) -> Value:
    items = ITEMS[instruction.parts[-1]]
    if set(instruction.parts[1:-1]) - {"ftz"} or ("ftz" in instruction.parts and items.name != "f16"):
        raise writer.refuse(instruction)
    (value,) = writer.sources(instruction, items.whole)
    sign = writer.number(_SIGN[items.whole], items.whole)
    text = f"({value} & ~{sign})" if instruction.root == "abs" else f"({value} ^ {sign})"
    if "ftz" in instruction.parts:
        text = f"flush_f16({text}.view('f2')).view('{items.whole}')"
    return text, items.whole


def _values(writer: FormWriter, instruction: Instruction) -> list[str]:
    """Sources widened to fp32, where all halves are exact; f16 is flushed before, bf16 as fp32."""
    items = ITEMS[instruction.parts[-1]]
    values = [f"{value}.view('u2')" for value in writer.sources(instruction, items.whole)]
    if "ftz" not in instruction.parts:
        return [f"{items.name}_value({value})" for value in values]
    if items.name == "f16":
        return [f"f16_value(flush_f16({value}.view('f2')))" for value in values]
    return [f"flush_f32(bf16_value({value}))" for value in values]


def _minmax(writer: FormWriter, instruction: Instruction) -> Value:
    items, modifiers = ITEMS[instruction.parts[-1]], set(instruction.parts[1:-1])
    allowed = {"NaN", "xorsign", "abs"} | ({"ftz"} if items.name == "f16" else set())
    if modifiers - allowed or len(instruction.operands) != 3:
        raise writer.refuse(instruction)
    text = writer.extremum(instruction, _values(writer, instruction))
    return f"{items.name}_single({text}).view('{items.whole}')", items.whole


def _curve(writer: FormWriter, instruction: Instruction) -> Value:
    """`ex2.approx` and `tanh.approx`: bf16 has an `ex2` with `.ftz` alone, f16 one without it."""
    items, modifiers = ITEMS[instruction.parts[-1]], set(instruction.parts[1:-1])
    flushes = instruction.root == "ex2" and items.name == "bf16"
    if modifiers != {"approx"} | ({"ftz"} if flushes else set()):
        raise writer.refuse(instruction)
    text = f"{_CURVES[instruction.root]}({_values(writer, instruction)[0]})"
    if flushes:
        text = f"flush_f32({text})"
    return f"{items.name}_single({text}).view('{items.whole}')", items.whole
