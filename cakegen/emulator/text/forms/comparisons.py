"""Comparisons and what chooses by them: `setp`, `set`, `selp`, `slct` (PTX ISA 9.7.6)."""

from __future__ import annotations

from cakegen.emulator.text.forms.writer import TYPES, Family, FormWriter, Value
from cakegen.emulator.text.ptx import Instruction, Pair

_ORDERED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_COMBINED = {"and": "&", "or": "|", "xor": "^"}
# Halves are compared as fp32
_HALVES = {"f16": "f16_value", "bf16": "bf16_value"}
_PACKED = {"f16x2": "f16", "bf16x2": "bf16"}


def _compare(operator: str, kind: str, a: str, b: str) -> str | None:
    """The expression of a comparison; None: the type has none of that name."""
    if kind[0] != "f":
        sign = _ORDERED.get(operator) or (_UNSIGNED.get(operator) if kind[0] == "u" else None)
        return f"({a} {sign} {b})" if sign else None
    if operator == "num":
        return f"~(isnan({a}) | isnan({b}))"
    if operator == "nan":
        return f"(isnan({a}) | isnan({b}))"
    if operator == "ne":
        return f"(({a} < {b}) | ({a} > {b}))"
    if operator in _ORDERED:
        return f"({a} {_ORDERED[operator]} {b})"
    sign = _ORDERED.get(operator[:-1]) if operator.endswith("u") else None
    return f"(({a} {sign} {b}) | isnan({a}) | isnan({b}))" if sign else None


def _sides(writer: FormWriter, instruction: Instruction, name: str) -> tuple[str, list[str]]:
    """(numpy type, the two values that are compared)."""
    operands = instruction.operands[1:3]
    if name in _HALVES:
        values = [writer.read(operand, "u2") for operand in operands]
        if "ftz" in instruction.parts and name == "f16":
            return "f4", [f"f16_value(flush_f16({value}.view('f2')))" for value in values]
        return "f4", [f"{_HALVES[name]}({value})" for value in values]
    kind = TYPES.get(name, "")
    if not kind or kind == "?":
        raise writer.refuse(instruction)
    values = [writer.read(operand, kind) for operand in operands]
    return kind, [f"flush_f32({value})" for value in values] if "ftz" in instruction.parts else values


def _operators(writer: FormWriter, instruction: Instruction, modifiers: list[str]) -> tuple[str, str]:
    """(comparison, what it is combined with the last operand by, or empty)."""
    names = [part for part in modifiers if part != "ftz"]
    combined = names[1] if len(names) == 2 else ""
    if not 1 <= len(names) <= 2 or (combined and combined not in _COMBINED):
        raise writer.refuse(instruction)
    if len(instruction.operands) != (4 if combined else 3):
        raise writer.refuse(instruction)
    return names[0], combined


def _setp(writer: FormWriter, instruction: Instruction) -> Value:
    """The first predicate; `second` has the other of `p|q`."""
    *modifiers, name = instruction.parts[1:]
    comparison, combined = _operators(writer, instruction, modifiers)
    if name in _PACKED:
        return _of_item(writer, instruction, comparison, combined, 0), "?"
    kind, (a, b) = _sides(writer, instruction, name)
    text = _compare(comparison, kind, a, b)
    if text is None:
        raise writer.refuse(instruction)
    return _combine(writer, instruction, text, combined), "?"


def _combine(writer: FormWriter, instruction: Instruction, text: str, combined: str) -> str:
    if not combined:
        return text
    return f"({text} {_COMBINED[combined]} {writer.read(instruction.operands[3], '?')})"


def _of_item(writer: FormWriter, instruction: Instruction, comparison: str, combined: str, item: int) -> str:
    """`setp.f16x2 p|q, a, b`: p of the lower items, q of the upper ones."""
    name = _PACKED[instruction.parts[-1]]
    flush = "ftz" in instruction.parts and name == "f16"
    values = []
    for operand in instruction.operands[1:3]:
        bits = f"{writer.read(operand, 'u4')}.view('u2')[{item}::2]"
        bits = f"flush_f16({bits}.view('f2'))" if flush else bits
        values.append(f"{name}_value({bits})")
    text = _compare(comparison, "f4", *values)
    if text is None or not isinstance(instruction.operands[0], Pair):
        raise writer.refuse(instruction)
    return _combine(writer, instruction, text, combined)


def second(writer: FormWriter, instruction: Instruction) -> Value:
    """The other predicate of `setp p|q`: of the comparison's opposite, or of the upper items.

    Raises
    ------
    EmulationError
        The instruction has one result.
    """
    if instruction.root != "setp" or instruction.parts[-1] in _HALVES:
        raise writer.refuse(instruction)
    *modifiers, name = instruction.parts[1:]
    comparison, combined = _operators(writer, instruction, modifiers)
    if name in _PACKED:
        return _of_item(writer, instruction, comparison, combined, 1), "?"
    kind, (a, b) = _sides(writer, instruction, name)
    return _combine(writer, instruction, f"~{_compare(comparison, kind, a, b)}", combined), "?"


def _set(writer: FormWriter, instruction: Instruction) -> Value:
    """All ones, or 1.0, where a comparison holds; else 0."""
    *modifiers, to, name = instruction.parts[1:]
    comparison, combined = _operators(writer, instruction, modifiers)
    kind, (a, b) = _sides(writer, instruction, name)
    text = _compare(comparison, kind, a, b)
    if text is None or to not in ("u32", "s32", "f32"):
        raise writer.refuse(instruction)
    result = TYPES[to]
    ones = writer.constant(0x3F800000, 4, result) if to == "f32" else writer.number(-1, result)
    return f"where({_combine(writer, instruction, text, combined)}, {ones}, {writer.number(0, result)})", result


def _selp(writer: FormWriter, instruction: Instruction) -> Value:
    kind = writer.type_of(instruction)
    a, b = (writer.read(operand, kind) for operand in instruction.operands[1:3])
    return f"where({writer.read(instruction.operands[3], '?')}, {a}, {b})", kind


def _slct(writer: FormWriter, instruction: Instruction) -> Value:
    """The first value where the third is not negative; NaN takes the second."""
    *modifiers, to, name = instruction.parts[1:]
    if to not in TYPES or name not in ("s32", "f32") or modifiers not in ([], ["ftz"]):
        raise writer.refuse(instruction)
    kind = TYPES[to]
    a, b = (writer.read(operand, kind) for operand in instruction.operands[1:3])
    c = writer.read(instruction.operands[3], TYPES[name])
    if modifiers:
        c = f"flush_f32({c})"
    return f"where({c} >= {writer.number(0, TYPES[name])}, {a}, {b})", kind


FAMILIES = {
    "setp": Family((3, 4), _setp),
    "set": Family((3, 4), _set),
    "selp": Family((4,), _selp),
    "slct": Family((4,), _slct),
}
