"""Instructions on the lanes of a warp together, as lines of a block (PTX ISA 9.7.9.6, 9.7.13, 9.7.14.5.16)."""

from __future__ import annotations

from collections.abc import Callable

from cakegen.emulator.text.forms.writer import FormWriter
from cakegen.emulator.text.ptx import Instruction, Pair

_SHUFFLES = {"up", "down", "bfly", "idx"}
_VOTES = {"ballot": "u4", "any": "?", "all": "?", "uni": "?"}
# Type -> operations that reduce it
_REDUCTIONS = {"u32": {"add", "min", "max"}, "s32": {"add", "min", "max"}, "b32": {"and", "or", "xor"}}
_FLOAT_REDUCTIONS = {"min", "max"}


def _pair(writer: FormWriter, instruction: Instruction, text: str, kind: str, mask: str) -> str:
    """A line that writes a value and, where it is asked for, a predicate."""
    target = instruction.operands[0]
    if not isinstance(target, Pair):
        return writer.assign_all((target,), text, kind, mask)
    second = writer.assign(target.second, "t[1]", "?", mask)
    return f"{writer.assign_all((target.first,), text, kind, mask)}; {second}"


def _shfl(writer: FormWriter, instruction: Instruction, mask: str, index: int) -> str:
    if len(instruction.parts) != 4 or instruction.parts[1::2] != ("sync", "b32"):
        raise writer.refuse(instruction)
    if instruction.parts[2] not in _SHUFFLES:
        raise writer.refuse(instruction)
    _, value, b, c, members = instruction.operands
    arguments = ", ".join(writer.read(operand, "u4") for operand in (value, b, c, members))
    return _pair(writer, instruction, f"shuffle_lanes(w, {instruction.parts[2]!r}, {arguments}, {mask})", "u4", mask)


def _vote(writer: FormWriter, instruction: Instruction, mask: str, index: int) -> str:
    mode = instruction.parts[2]
    target, predicate, members = instruction.operands
    kind = _VOTES.get(mode, "")
    if instruction.parts != ("vote", "sync", mode, "b32" if kind == "u4" else "pred") or not kind:
        raise writer.refuse(instruction)
    text = f"vote_{mode}(w, {writer.read(predicate, '?')}, {writer.read(members, 'u4')}, {mask})"
    return writer.assign(target, text, kind, mask)


def _match(writer: FormWriter, instruction: Instruction, mask: str, index: int) -> str:
    """`match.any` gives the lanes with this lane's value; `match.all` all of them or none, and whether."""
    mode, sync, kind = instruction.parts[1:]
    target, value, members = instruction.operands
    wide = {"b32": "u4", "b64": "u8"}.get(kind)
    if sync != "sync" or mode not in ("any", "all") or wide is None or (mode == "any" and isinstance(target, Pair)):
        raise writer.refuse(instruction)
    text = f"match_lanes(w, {mode!r}, {writer.read(value, wide)}, {writer.read(members, 'u4')}, {mask})"
    return _pair(writer, instruction, text, "u4", mask)


def _redux(writer: FormWriter, instruction: Instruction, mask: str, index: int) -> str:
    sync, operation, *modifiers, name = instruction.parts[1:]
    target, value, members = instruction.operands
    if name == "f32":
        known = operation in _FLOAT_REDUCTIONS and modifiers in ([], ["abs"], ["NaN"], ["abs", "NaN"])
        operation += "_nan" if "NaN" in modifiers else "_f32"
        kind = "f4"
    else:
        known = operation in _REDUCTIONS.get(name, ()) and not modifiers
        kind = "i4" if name == "s32" else "u4"
    if sync != "sync" or not known:
        raise writer.refuse(instruction)
    source = writer.read(value, kind)
    source = f"absolute({source})" if "abs" in modifiers else source
    text = f"reduce_lanes(w, {operation!r}, {source}, {writer.read(members, 'u4')}, {mask})"
    return writer.assign(target, text, kind, mask)


def _activemask(writer: FormWriter, instruction: Instruction, mask: str, index: int) -> str:
    if instruction.parts != ("activemask", "b32"):
        raise writer.refuse(instruction)
    return writer.assign(instruction.operands[0], f"active_mask({mask})", "u4", mask)


def _elect(writer: FormWriter, instruction: Instruction, mask: str, index: int) -> str:
    target, members = instruction.operands
    if not isinstance(target, Pair):
        raise writer.refuse(instruction)
    return _pair(writer, instruction, f"elect_lane(w, {writer.read(members, 'u4')}, {mask})", "u4", mask)


def _bar_warp(writer: FormWriter, instruction: Instruction, mask: str, index: int) -> str:
    """`bar.warp.sync`: every other `bar` ends its block."""
    return f"sync_lanes(w, {writer.read(instruction.operands[0], 'u4')}, {mask})"


COLLECTIVES: dict[str, Callable[[FormWriter, Instruction, str, int], str]] = {
    "shfl": _shfl,
    "vote": _vote,
    "match": _match,
    "redux": _redux,
    "activemask": _activemask,
    "elect": _elect,
    "bar": _bar_warp,
}
