"""Moves, and addresses of one state space as those of another (PTX ISA 9.7.9)."""

from __future__ import annotations

from cakegen.emulator.text.forms.writer import Family, FormWriter, Value
from cakegen.emulator.text.ptx import Instruction

# State space -> where its window of generic addresses starts
_WINDOWS = {"global": 0, "const": 0, "shared": 1 << 60, "param": 2 << 60, "local": 3 << 60}
_WINDOW_SHIFT = 60


def _mov(writer: FormWriter, instruction: Instruction) -> Value:
    kind = writer.type_of(instruction)
    return writer.read(instruction.operands[1], kind), kind


def _cvta(writer: FormWriter, instruction: Instruction) -> Value:
    """The generic view of a window starts at its own base; `to` goes back."""
    spaces = {part.removesuffix("::cta").removesuffix("::cluster") for part in instruction.parts[1:-1]} - {"to"}
    if len(spaces) != 1 or instruction.parts[-1] != "u64" or not spaces <= _WINDOWS.keys():
        raise writer.refuse(instruction)
    window = _WINDOWS[spaces.pop()]
    source = writer.read(instruction.operands[1], "u8")
    if not window:
        return source, "u8"
    return f"({source} {'-' if 'to' in instruction.parts else '+'} {writer.number(window, 'u8')})", "u8"


def _isspacep(writer: FormWriter, instruction: Instruction) -> Value:
    """Whether a generic address is of a window; constants lie in global memory here, so that they can't be told."""
    space = instruction.parts[1].removesuffix("::cta")
    if len(instruction.parts) != 2 or space not in _WINDOWS.keys() - {"const"}:
        raise writer.refuse(instruction)
    window = writer.number(_WINDOWS[space] >> _WINDOW_SHIFT, "u8")
    shift = writer.number(_WINDOW_SHIFT, "u8")
    return f"(({writer.read(instruction.operands[1], 'u8')} >> {shift}) == {window})", "?"


def _mapa(writer: FormWriter, instruction: Instruction) -> Value:
    if instruction.parts != ("mapa", "shared::cluster", "u32"):
        raise writer.refuse(instruction)
    address, rank = writer.sources(instruction, "u4")
    low, shift = writer.number(0xFFFFFF, "u4"), writer.number(24, "u4")
    return f"(({address} & {low}) | ({rank} << {shift}))", "u4"


def _policy(writer: FormWriter, instruction: Instruction) -> Value:
    """PTX ISA 9.7.9.19: an opaque hint for caches, which changes no value."""
    kind = instruction.parts[1] if len(instruction.parts) > 2 else ""
    if kind not in ("fractional", "range", "range::strided", "cvt") or instruction.parts[-1] != "b64":
        raise writer.refuse(instruction)
    return writer.number(0, "u8"), "u8"


FAMILIES = {
    "mov": Family((2,), _mov),
    "cvta": Family((2,), _cvta),
    "isspacep": Family((2,), _isspacep),
    "mapa": Family((3,), _mapa),
    "createpolicy": Family((1, 2, 3, 4), _policy),
}
