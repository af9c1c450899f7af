"""`cvt`, of one value or of a pair (PTX ISA 9.7.9.21, 9.7.9.22)."""

from __future__ import annotations

from cakegen.emulator.text.forms.writer import DIRECTED, TYPES, Family, FormWriter, Value
from cakegen.emulator.text.ptx import Instruction
from cakegen.emulator.text.small_floats import FORMATS

# Types of one narrow number -> numpy type of the register
_NARROW = {"f16": "u2", "bf16": "u2", "tf32": "u4"}
_TO_INTEGER = {"rni", "rzi", "rmi", "rpi"}
_ROUNDINGS = {"rn", *DIRECTED}
# Pairs of numbers -> numpy type of the register
_PAIRS = {"f16x2": "u4", "bf16x2": "u4", "e4m3x2": "u2", "e5m2x2": "u2", "e2m3x2": "u2", "e3m2x2": "u2"}
_PAIRS |= {"e2m1x2": "u1", "ue8m0x2": "u2"}
_WIDE_PAIRS = {"f16x2", "bf16x2"}
# `cvt.pack` -> bits of an item
_PACKED = {"u16": 16, "s16": 16, "u8": 8, "s8": 8}


def _cvt(writer: FormWriter, instruction: Instruction) -> Value:
    if instruction.parts[1] == "pack":
        return _pack(writer, instruction)
    *modifiers, to, source = instruction.parts[1:]
    rest = set(modifiers)
    if to in _PAIRS or source in _PAIRS:
        return _pair(writer, instruction, rest)
    if len(instruction.operands) != 2 or not {to, source} <= {*TYPES, *_NARROW} or "pred" in (to, source):
        raise writer.refuse(instruction)
    if _is_float(to):
        return _to_float(writer, instruction, rest)
    if _is_float(source):
        rounding = rest - {"ftz", "sat"}
        if len(rounding) != 1 or not rounding <= _TO_INTEGER:
            raise writer.refuse(instruction)
        value, kind = _source(writer, instruction), TYPES[to]
        (name,) = rounding
        return f"to_integer({value}, '{kind}'{'' if name == 'rzi' else f', {name!r}'})", kind
    if rest - {"sat"}:
        raise writer.refuse(instruction)
    value, kind = writer.sources(instruction, TYPES[source])[0], TYPES[to]
    return (f"saturated({value}, '{kind}')" if rest else f"{value}.astype('{kind}')"), kind


def _is_float(name: str) -> bool:
    return name in _NARROW or name[0] == "f"


def _source(writer: FormWriter, instruction: Instruction) -> str:
    """The float that is converted: halves as fp32, subnormals of fp32 flushed where `.ftz` says so."""
    source = instruction.parts[-1]
    if source in _NARROW:
        return f"{source}_value({writer.sources(instruction, 'u2')[0]})"
    value = writer.sources(instruction, TYPES[source])[0]
    return f"flush_f32({value})" if source == "f32" and "ftz" in instruction.parts else value


def _to_float(writer: FormWriter, instruction: Instruction, rest: set[str]) -> Value:
    """Into a float: what a plain conversion is comes first, since programs are full of it."""
    to, source = instruction.parts[-2:]
    if to in _NARROW:
        return _to_narrow(writer, instruction, rest)
    kind = TYPES[to]
    roundings = rest - {"ftz", "sat"}
    if len(roundings) > 1 or ("ftz" in rest and "f32" not in (to, source)) or source == "tf32":
        raise writer.refuse(instruction)
    rounding = next(iter(roundings), "")
    if not _is_float(source):
        text = _of_integer(writer, instruction, rounding, kind)
    elif rounding in _TO_INTEGER and to == source:
        text = f"to_whole({_source(writer, instruction)}, {rounding!r})"
    elif (to, source) == ("f32", "f64") and rounding in DIRECTED:
        text = f"round_f32({_source(writer, instruction)}, {rounding!r})"
    elif rounding == ("rn" if (to, source) == ("f32", "f64") else ""):
        value = _source(writer, instruction)
        # halves are read as fp32
        text = value if to == "f32" and source != "f64" else f"{value}.astype('{kind}')"
    else:
        raise writer.refuse(instruction)
    if "ftz" in rest and to == "f32":
        text = f"flush_f32({text})"
    return (f"saturate({text})" if "sat" in rest else text), kind


def _of_integer(writer: FormWriter, instruction: Instruction, rounding: str, kind: str) -> str:
    source = TYPES[instruction.parts[-1]]
    value = writer.sources(instruction, source)[0]
    if rounding == "rn" or (kind == "f8" and source[1] != "8" and rounding in DIRECTED):
        return f"{value}.astype('{kind}')"
    if rounding in DIRECTED and kind == "f4":
        return f"round_f32(exact_or_odd({value}), {rounding!r})"
    raise writer.refuse(instruction)


def _to_narrow(writer: FormWriter, instruction: Instruction, rest: set[str]) -> Value:
    """Into f16, bf16 or tf32."""
    to, source = instruction.parts[-2:]
    roundings = rest - {"ftz", "sat", "relu", "satfinite"}
    allowed = {"rna", "rn", "rz"} if to == "tf32" else _ROUNDINGS
    if source not in {*TYPES, "f16", "bf16"} or (to == "tf32" and source != "f32") or len(roundings) > 1:
        raise writer.refuse(instruction)
    rounding = next(iter(roundings), "")
    if to == source and to != "tf32" and rounding in _TO_INTEGER and rest <= {rounding, "sat"}:
        value = f"to_whole({_source(writer, instruction)}, {rounding!r})"
        rounding = "rn"
    elif to == source and not rounding:
        value, rounding = _source(writer, instruction), "rn"
    elif rounding not in allowed:
        raise writer.refuse(instruction)
    elif _is_float(source):
        value = _source(writer, instruction)
    else:
        value = f"exact_or_odd({writer.sources(instruction, TYPES[source])[0]})"
    if "sat" in rest:
        value = f"saturate({value})"
    kind = _NARROW[to]
    limits = rest & {"relu", "satfinite"}
    # once more to nearest in fp32 would round a wider source twice
    if to != "tf32" and source in ("f32", "f16", "bf16") and rounding == "rn" and not limits:
        return f"{to}_single({value})", kind
    return f"narrow({value}, {to!r}, {rounding!r}, {'satfinite' in limits}, {'relu' in limits})", kind


def _pair(writer: FormWriter, instruction: Instruction, rest: set[str]) -> Value:
    """Two numbers at once; of two sources the first goes to the upper item."""
    to, source = instruction.parts[-2:]
    roundings = rest - {"relu", "satfinite"}
    sources = instruction.operands[1:]
    if len(roundings) != 1 or to not in _PAIRS or len(sources) != (2 if source == "f32" else 1):
        raise writer.refuse(instruction)
    (rounding,) = roundings
    kind, name = _PAIRS[to], to.removesuffix("x2")
    flags = f"{'satfinite' in rest}, {'relu' in rest}"
    if to in _WIDE_PAIRS and source in _PAIRS.keys() - _WIDE_PAIRS and rounding == "rn":
        codes = writer.read(sources[0], _PAIRS[source])
        return f"widen_pair({codes}, {source.removesuffix('x2')!r}, {name!r}, {'relu' in rest})", kind
    if source == "f32":
        high, low = (writer.read(each, "f4") for each in sources)
        if to in _WIDE_PAIRS and rest == {"rn"}:
            return f"{name}_pair({high}, {low})", kind
    elif source in _WIDE_PAIRS and to not in _WIDE_PAIRS:
        half, items = source.removesuffix("x2"), f"{writer.read(sources[0], 'u4')}.view('u2')"
        high, low = f"{half}_value({items}[1::2])", f"{half}_value({items}[::2])"
    else:
        raise writer.refuse(instruction)
    allowed = {"rz", "rp"} if name == "ue8m0" else {"rn", "rz"} if to in _WIDE_PAIRS else {"rn"}
    if rounding not in allowed or (name in FORMATS and to not in _WIDE_PAIRS and "satfinite" not in rest):
        raise writer.refuse(instruction)
    return f"narrow_pair({high}, {low}, {name!r}, {rounding!r}, {flags}).astype('{kind}')", kind


def _pack(writer: FormWriter, instruction: Instruction) -> Value:
    """`cvt.pack.sat.{u16,s16}.s32 d, a, b` and `cvt.pack.sat.{u8,s8}.s32.b32 d, a, b, c`: a above b, above c's bits."""
    saturation, item, source, *rest = instruction.parts[2:]
    bits = _PACKED.get(item, 0)
    if saturation != "sat" or not bits or source != "s32" or rest != ([] if bits == 16 else ["b32"]):
        raise writer.refuse(instruction)
    high, low, *third = instruction.operands[1:]
    if len(third) != len(rest):
        raise writer.refuse(instruction)
    kind = TYPES[item]
    items = [f"saturated({writer.read(each, 'i4')}, '{kind}').view('u{kind[1]}')" for each in (high, low)]
    text = f"pack_items({', '.join(items)})"
    if third:
        text = f"(({writer.read(third[0], 'u4')} << {writer.number(16, 'u4')}) | {text})"
    return text, "u4"


FAMILIES = {"cvt": Family((2, 3, 4), _cvt)}
