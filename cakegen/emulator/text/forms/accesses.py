"""Weak and volatile loads and stores, as lines of a block (PTX ISA 9.7.9.8 to 9.7.9.11)."""

from __future__ import annotations

import dataclasses

from cakegen.emulator.order.vector_clock import GPU
from cakegen.emulator.text.forms.writer import TYPES, FormWriter
from cakegen.emulator.text.ptx import Address, Instruction, Operand, Symbol, Vector

# What caches are told: hints (PTX ISA 9.7.9.1, 9.7.9.2).
HINTS = {f"{level}::{what}" for level in ("L1", "L2") for what in ("evict_normal", "evict_first", "evict_last")}
HINTS |= {"L1::evict_unchanged", "L1::no_allocate", "L2::64B", "L2::128B", "L2::256B", "L2::cache_hint"}
_LD_MODIFIERS = HINTS | {"nc", "volatile", "weak", "ca", "cg", "cs", "lu", "cv"}
_ST_MODIFIERS = HINTS | {"volatile", "weak", "wb", "cg", "cs", "wt"}
_VECTORS = {"v2", "v4", "v8"}
_SPACES = {"global", "shared", "shared::cta", "shared::cluster", "param", "local", "const"}
# `.param` of a called function is a variable of the thread's own memory
_QUALIFIED = {"param::entry": "param", "param::func": "local"}


def _operands(writer: FormWriter, instruction: Instruction) -> tuple[Operand, Operand]:
    """The two operands of an access; a third is the policy of `.L2::cache_hint`."""
    first, second, *policy = instruction.operands
    if len(policy) != ("L2::cache_hint" in instruction.parts):
        raise writer.refuse(instruction)
    return first, second


def _access(
    writer: FormWriter, instruction: Instruction, address: Operand, known: set[str]
) -> tuple[str, str, str, int]:
    """(space, address expression, numpy type, vector length) of a load or store."""
    *modifiers, kind = instruction.parts[1:]
    modifiers = [_QUALIFIED.get(part, part) for part in modifiers]
    spaces = [part for part in modifiers if part in _SPACES]
    lengths = [int(part[1]) for part in modifiers if part in _VECTORS]
    unknown = set(modifiers) - known - _SPACES - _VECTORS
    if unknown or kind not in TYPES or kind == "pred" or len(spaces) > 1 or not isinstance(address, Address):
        raise writer.refuse(instruction)
    space = spaces[0].replace("shared::cta", "shared") if spaces else "generic"
    if space == "param" and isinstance(address.base, Symbol) and _is_local(writer, address.base):
        space = "local"
    elif space == "const":
        space = "global"
    elif space == "generic" and _has_more_windows(writer):
        space = "anywhere"
    if lengths and lengths[0] * int(TYPES[kind][1]) > (32 if space == "global" else 16):
        raise writer.refuse(instruction)
    wide = "u4" if space.startswith("shared") else "u8"
    return space, writer.address(address, wide), TYPES[kind], lengths[0] if lengths else 1


def _is_local(writer: FormWriter, symbol: Symbol) -> bool:
    return any(each.name == symbol.name for each in writer.kernel.local)


def _has_more_windows(writer: FormWriter) -> bool:
    """Whether generic addresses may be of parameters or of a thread's own memory."""
    if writer.kernel.local:
        return True
    return any(each.root == "cvta" and "param" in each.parts for each in writer.kernel.instructions)


def _in_halves(instruction: Instruction) -> Instruction:
    """An access of 128 bits as one of two words."""
    return dataclasses.replace(instruction, parts=(*instruction.parts[:-1], "v2", "b64"))


def load(writer: FormWriter, instruction: Instruction, mask: str, index: int) -> str:
    """`ld`."""
    target, address = _operands(writer, instruction)
    whole = instruction.parts[-1] == "b128"
    read = _in_halves(instruction) if whole else instruction
    space, text, kind, length = _access(writer, read, address, _LD_MODIFIERS)
    items = target.items if isinstance(target, Vector) else (target,)
    assert isinstance(address, Address)
    if space == "param" and isinstance(address.base, Symbol):
        return _load_parameter(writer, instruction, items, kind, mask)
    name = {"shared::cluster": "load_cluster"}.get(space, f"load_{space}")
    name = "load_constant" if "nc" in instruction.parts and space == "global" else name
    text = f"{name}(w, {text}, '{kind}', {length}, {mask}, {index}{_strong(instruction)})"
    if whole:
        return writer.assign(target, f"pack(list({text}), 'c16')", "c16", mask)
    return writer.assign_all(items, text, kind, mask)


def _load_parameter(
    writer: FormWriter, instruction: Instruction, items: tuple[Operand, ...], kind: str, mask: str
) -> str:
    address = instruction.operands[1]
    assert isinstance(address, Address)
    parameter = writer.kernel.parameter(address.base.name) if isinstance(address.base, Symbol) else None
    if parameter is None or instruction.parts[-1] == "b128":
        raise writer.refuse(instruction)
    start, step = parameter.offset + address.offset, int(kind[1])
    texts = [f"w.parameter({start + step * number}, '{kind}')" for number in range(len(items))]
    return "; ".join(writer.assign(item, text, kind, mask) for item, text in zip(items, texts, strict=True))


def store(writer: FormWriter, instruction: Instruction, mask: str, index: int) -> str:
    """`st`."""
    address, source = _operands(writer, instruction)
    whole = instruction.parts[-1] == "b128"
    space, text, kind, _ = _access(writer, _in_halves(instruction) if whole else instruction, address, _ST_MODIFIERS)
    if space == "param" or "const" in instruction.parts:
        raise writer.refuse(instruction)
    items = source.items if isinstance(source, Vector) else (source,)
    values = ", ".join(writer.read(item, kind) for item in items)
    values = f"*unpack({writer.read(source, 'c16')}, 'u8')" if whole else values
    name = {"shared::cluster": "store_cluster"}.get(space, f"store_{space}")
    return f"{name}(w, {text}, [{values}], {mask}, {index}{_strong(instruction)})"


def _strong(instruction: Instruction) -> str:
    """The argument of a volatile access: relaxed, at the widest scope (PTX ISA 9.7.9.8)."""
    return f", {GPU}" if "volatile" in instruction.parts else ""
