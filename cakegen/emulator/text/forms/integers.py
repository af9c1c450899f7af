"""Integer, logic, shift and bit-field instructions (PTX ISA 9.7.1, 9.7.8)."""

from __future__ import annotations

from cakegen.emulator.text import bits
from cakegen.emulator.text.forms.writer import TYPES, Family, FormWriter, Value
from cakegen.emulator.text.ptx import Immediate, Instruction

_BITWISE = {"and": "&", "or": "|", "xor": "^"}


def _rem(writer: FormWriter, instruction: Instruction) -> Value:
    kind = writer.type_of(instruction)
    a, b = writer.sources(instruction, kind)
    return f"remainder({a}, {b})", kind


def _bitwise(writer: FormWriter, instruction: Instruction) -> Value:
    kind = writer.type_of(instruction)
    a, b = writer.sources(instruction, kind)
    return f"({a} {_BITWISE[instruction.root]} {b})", kind


def _not(writer: FormWriter, instruction: Instruction) -> Value:
    kind = writer.type_of(instruction)
    return f"(~{writer.sources(instruction, kind)[0]})", kind


def _shift(writer: FormWriter, instruction: Instruction) -> Value:
    kind = writer.type_of(instruction)
    a = writer.read(instruction.operands[1], kind)
    count = instruction.operands[2]
    operator, name = ("<<", "shift_left") if instruction.root == "shl" else (">>", "shift_right")
    if isinstance(count, Immediate) and 0 <= count.value < int(kind[1]) * 8:
        return f"({a} {operator} {writer.number(count.value, kind)})", kind
    return f"{name}({a}, {writer.read(count, 'u4')})", kind


def _funnel_shift(writer: FormWriter, instruction: Instruction) -> Value:
    direction, mode, kind = instruction.parts[1:]
    if direction not in ("l", "r") or mode not in ("clamp", "wrap") or kind != "b32":
        raise writer.refuse(instruction)
    low, high, count = writer.sources(instruction, "u4")
    return f"funnel_shift({low}, {high}, {count}, {direction == 'l'}, {mode == 'wrap'})", "u4"


def _field(writer: FormWriter, instruction: Instruction) -> Value:
    """`bfe`, and `bfi`, whose first two operands are of the type."""
    kind = writer.type_of(instruction)
    if kind[1] not in "48" or (instruction.root == "bfi" and instruction.parts[-1] not in ("b32", "b64")):
        raise writer.refuse(instruction)
    *values, position, length = instruction.operands[1:]
    texts = [writer.read(value, kind) for value in values] + [writer.read(each, "u4") for each in (position, length)]
    name = "bit_insert" if instruction.root == "bfi" else "bit_extract"
    return f"{name}({', '.join(texts)})", kind


def _popc(writer: FormWriter, instruction: Instruction) -> Value:
    kind = writer.type_of(instruction)
    return f"bitwise_count({writer.sources(instruction, kind)[0]}).astype('u4')", "u4"


def _clz(writer: FormWriter, instruction: Instruction) -> Value:
    kind = writer.type_of(instruction)
    return f"leading_zeros({writer.sources(instruction, kind)[0]})", "u4"


def _bfind(writer: FormWriter, instruction: Instruction) -> Value:
    kind = writer.type_of(instruction, {"shiftamt"})
    return f"find_leading({writer.sources(instruction, kind)[0]}, {'shiftamt' in instruction.parts})", "u4"


def _brev(writer: FormWriter, instruction: Instruction) -> Value:
    kind = writer.type_of(instruction)
    return f"reverse_bits({writer.sources(instruction, kind)[0]})", kind


def _lop3(writer: FormWriter, instruction: Instruction) -> Value:
    table = instruction.operands[-1]
    if instruction.parts != ("lop3", "b32") or not isinstance(table, Immediate):
        raise writer.refuse(instruction)
    a, b, c = (writer.read(operand, "u4") for operand in instruction.operands[1:4])
    return f"logic_of_three({a}, {b}, {c}, {table.value})", "u4"


def _prmt(writer: FormWriter, instruction: Instruction) -> Value:
    kind, *mode = instruction.parts[1:]
    if kind != "b32" or len(mode) > 1 or not set(mode) <= bits.PERMUTATIONS:
        raise writer.refuse(instruction)
    texts = ", ".join(writer.sources(instruction, "u4"))
    return f"permute_bytes({texts}, {mode[0] if mode else ''!r})", "u4"


def _dp4a(writer: FormWriter, instruction: Instruction) -> Value:
    kinds = [TYPES.get(part, "") for part in instruction.parts[1:]]
    if len(kinds) != 2 or not set(kinds) <= {"u4", "i4"}:
        raise writer.refuse(instruction)
    a, b = (writer.read(operand, "u4") for operand in instruction.operands[1:3])
    c = writer.read(instruction.operands[3], "i4" if "i4" in kinds else "u4")
    return f"dot_of_bytes({a}, {b}, {c}, {(kinds[0][0], kinds[1][0])})", "u4"


def _sad(writer: FormWriter, instruction: Instruction) -> Value:
    kind = writer.type_of(instruction)
    a, b, c = writer.sources(instruction, kind)
    return f"({c} + (maximum({a}, {b}) - minimum({a}, {b})))", kind


FAMILIES = {
    "rem": Family((3,), _rem),
    **dict.fromkeys(_BITWISE, Family((3,), _bitwise)),
    "not": Family((2,), _not),
    **dict.fromkeys(("shl", "shr"), Family((3,), _shift)),
    "shf": Family((4,), _funnel_shift),
    "bfe": Family((4,), _field),
    "bfi": Family((5,), _field),
    "popc": Family((2,), _popc),
    "clz": Family((2,), _clz),
    "bfind": Family((2,), _bfind),
    "brev": Family((2,), _brev),
    "lop3": Family((5,), _lop3),
    "prmt": Family((4,), _prmt),
    "dp4a": Family((4,), _dp4a),
    "sad": Family((4,), _sad),
}
