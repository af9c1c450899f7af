"""Arithmetic of whole registers: integers where a name serves both, fp32 and fp64 (PTX ISA 9.7.1, 9.7.3)."""

from __future__ import annotations

from cakegen.emulator.text.forms.writer import DIRECTED, TYPES, Family, FormWriter, Value, directed, unsigned
from cakegen.emulator.text.ptx import Instruction
from cakegen.errors import PtxError

# Which part of an integer product
_PARTS = frozenset({"lo", "hi", "wide"})
_HALVES = {"f16": "f16_value", "bf16": "bf16_value"}
_APPROXIMATE = {
    "ex2": "exp2_f32",
    "lg2": "log2_f32",
    "rsqrt": "reciprocal_root_f32",
    "tanh": "tanh_f32",
    "rcp": "reciprocal_f32",
    "sin": "sine_f32",
    "cos": "cosine_f32",
}
_TESTS = {"finite", "infinite", "number", "notanumber", "normal", "subnormal"}


def _add(writer: FormWriter, instruction: Instruction) -> Value:
    """`add`, `sub`."""
    if instruction.parts[-1] in _HALVES:
        return _mixed(writer, instruction)
    kind = writer.type_of(instruction, {"rn", "ftz", "sat", *DIRECTED})
    operator = "+" if instruction.root == "add" else "-"
    if "f" not in kind:
        if instruction.parts[1:] == ("sat", "s32"):
            a, b = writer.sources(instruction, kind)
            return f"saturated({a}.astype('i8') {operator} {b}, 'i4')", kind
        if len(instruction.parts) != 2:
            raise writer.refuse(instruction)
    a, b = writer.floats(instruction, unsigned(kind))
    text = _in_direction(instruction.root, instruction, f"{a}, {b}", kind) or f"({a} {operator} {b})"
    return writer.finish(instruction, text), unsigned(kind)


def _in_direction(root: str, instruction: Instruction, sources: str, kind: str) -> str:
    """The call for an instruction that rounds in a direction; empty: it rounds to nearest even."""
    rounding = directed(instruction)
    return f"{root}_{'f64' if kind == 'f8' else 'directed'}({sources}, {rounding!r})" if rounding else ""


def _mixed(writer: FormWriter, instruction: Instruction) -> Value:
    """`add{.rnd}{.sat}.f32.{f16,bf16} d, a, c` and `fma`'s: halves widened exactly, one rounding (PTX ISA 9.7.5)."""
    *modifiers, whole, half = instruction.parts[1:]
    if whole != "f32" or not set(modifiers) <= {"rn", "sat", *DIRECTED}:
        raise writer.refuse(instruction)
    *halves, last = instruction.operands[1:]
    texts = [f"{_HALVES[half]}({writer.read(operand, 'u2')})" for operand in halves]
    c = writer.read(last, "f4")
    if instruction.root == "sub":
        c = f"(-{c})"
    if len(texts) == 1:
        texts.append(writer.constant(0x3F800000, 4, "f4"))
    rounding = directed(instruction)
    name, tail = ("fma_directed", f", {rounding!r}") if rounding else ("fma_f32", "")
    return writer.finish(instruction, f"{name}({', '.join(texts)}, {c}{tail})"), "f4"


def _mul(writer: FormWriter, instruction: Instruction) -> Value:
    kind = writer.type_of(instruction, {"rn", "ftz", "sat", *_PARTS, *DIRECTED})
    a, b = writer.floats(instruction, kind)
    if "f" in kind:
        if _PARTS & set(instruction.parts):
            raise writer.refuse(instruction)
        text = _in_direction("mul", instruction, f"{a}, {b}", kind) or f"({a} * {b})"
        return writer.finish(instruction, text), kind
    match instruction.parts[1:-1]:
        case ("wide",) if kind[1] in "24":
            return f"multiply_wide({a}, {b})", f"{kind[0]}{int(kind[1]) * 2}"
        case ("hi",):
            return f"multiply_high({a}, {b})", kind
        case ("lo",):
            return f"({a} * {b})", kind
    raise writer.refuse(instruction)


def _mad(writer: FormWriter, instruction: Instruction) -> Value:
    if instruction.parts[-1] in ("f32", "f64"):
        return _fma(writer, instruction)
    kind = writer.type_of(instruction, _PARTS)
    match instruction.parts[1:-1]:
        case ("wide",) if kind[1] in "24":
            wide = f"{kind[0]}{int(kind[1]) * 2}"
            a, b = (writer.read(operand, kind) for operand in instruction.operands[1:3])
            return f"(multiply_wide({a}, {b}) + {writer.read(instruction.operands[3], wide)})", wide
        case ("hi",):
            a, b, c = writer.sources(instruction, kind)
            return f"(multiply_high({a}, {b}) + {c})", kind
        case ("lo",):
            a, b, c = writer.sources(instruction, unsigned(kind))
            return f"({a} * {b} + {c})", unsigned(kind)
    raise writer.refuse(instruction)


def _fma(writer: FormWriter, instruction: Instruction) -> Value:
    if instruction.parts[-1] in _HALVES:
        return _mixed(writer, instruction)
    kind = writer.type_of(instruction, {"rn", "ftz", "sat", *DIRECTED})
    if "f" not in kind:
        raise writer.refuse(instruction)
    texts = ", ".join(writer.floats(instruction, kind))
    name = "fma_f64" if kind == "f8" else "fma_f32"
    text = _in_direction("fma", instruction, texts, kind) or f"{name}({texts})"
    return writer.finish(instruction, text), kind


def _div(writer: FormWriter, instruction: Instruction) -> Value:
    kind = writer.type_of(instruction, {"rn", "ftz", "approx", "full", *DIRECTED})
    a, b = writer.floats(instruction, kind)
    if "f" in kind:
        if directed(instruction) and kind == "f8":
            raise writer.refuse(instruction)
        text = _in_direction("div", instruction, f"{a}, {b}", kind) or f"({a} / {b})"
        return writer.finish(instruction, text), kind
    if len(instruction.parts) != 2:
        raise writer.refuse(instruction)
    return f"divide({a}, {b})", kind


def _minmax(writer: FormWriter, instruction: Instruction) -> Value:
    """Of two values, or of three in fp32 (PTX ISA 9.7.3.12 and 9.7.3.13: sm_100 and later)."""
    kind = writer.type_of(instruction, {"ftz", "NaN", "xorsign", "abs", "relu"})
    values = writer.floats(instruction, kind)
    modifiers = set(instruction.parts[1:-1])
    if len(values) == 3 and (kind != "f4" or writer.kernel.target.startswith("sm_90")):
        raise PtxError(
            f"{instruction.place}: {instruction.text!r}: three inputs are for f32 on sm_100 and later; the target "
            f"is {writer.kernel.target}"
        )
    if "f" in kind:
        if "relu" in modifiers or (kind == "f8" and modifiers):
            raise writer.refuse(instruction)
        return writer.extremum(instruction, values), kind
    if modifiers - {"relu"} or (modifiers and kind[0] != "i"):
        raise writer.refuse(instruction)
    text = f"{'minimum' if instruction.root == 'min' else 'maximum'}({', '.join(values)})"
    return (f"maximum({text}, {writer.number(0, kind)})" if modifiers else text), kind


def _abs(writer: FormWriter, instruction: Instruction) -> Value:
    kind = writer.type_of(instruction, {"ftz"})
    return writer.finish(instruction, f"absolute({writer.floats(instruction, kind)[0]})"), kind


def _neg(writer: FormWriter, instruction: Instruction) -> Value:
    kind = writer.type_of(instruction, {"ftz"})
    return writer.finish(instruction, f"(-{writer.floats(instruction, kind)[0]})"), kind


def _copysign(writer: FormWriter, instruction: Instruction) -> Value:
    """The magnitude of the second operand with the sign of the first."""
    kind = writer.type_of(instruction)
    sign, magnitude = writer.sources(instruction, kind)
    return f"copysign({magnitude}, {sign})", kind


def _testp(writer: FormWriter, instruction: Instruction) -> Value:
    what, kind = instruction.parts[1], TYPES.get(instruction.parts[-1], "")
    if what not in _TESTS or len(instruction.parts) != 3 or kind[:1] != "f":
        raise writer.refuse(instruction)
    return f"has_property({writer.sources(instruction, kind)[0]}, {what!r})", "?"


def _sqrt(writer: FormWriter, instruction: Instruction) -> Value:
    kind = writer.type_of(instruction, {"rn", "approx", "ftz", *DIRECTED})
    rounding = directed(instruction)
    argument = writer.floats(instruction, kind)[0]
    if rounding and kind != "f4":
        raise writer.refuse(instruction)
    text = f"sqrt_directed({argument}, {rounding!r})" if rounding else f"sqrt({argument})"
    return writer.finish(instruction, text), kind


def _approximate(writer: FormWriter, instruction: Instruction) -> Value:
    allowed = {"approx", "ftz", "rn", *DIRECTED} if instruction.root == "rcp" else {"approx", "ftz"}
    kind = writer.type_of(instruction, allowed)
    rounding = directed(instruction)
    if kind == "f8":
        return _approximate_f64(writer, instruction)
    if kind != "f4":
        raise writer.refuse(instruction)
    argument = writer.floats(instruction, kind)[0]
    if rounding:
        one = writer.constant(0x3F800000, 4, kind)
        return writer.finish(instruction, f"div_directed({one}, {argument}, {rounding!r})"), kind
    return writer.finish(instruction, f"{_APPROXIMATE[instruction.root]}({argument})"), kind


def _approximate_f64(writer: FormWriter, instruction: Instruction) -> Value:
    """`rcp.rn.f64`, and the coarse `rcp.approx.ftz.f64` and `rsqrt.approx.ftz.f64`."""
    argument = writer.sources(instruction, "f8")[0]
    if instruction.parts[1:-1] == ("approx", "ftz") and instruction.root in ("rcp", "rsqrt"):
        return f"approximate_f64({argument}, {instruction.root!r})", "f8"
    if instruction.parts[:-1] == ("rcp", "rn"):
        return f"({writer.constant(1023 << 52, 8, 'f8')} / {argument})", "f8"
    if instruction.parts[:-1] == ("rsqrt", "approx"):
        return f"({writer.constant(1023 << 52, 8, 'f8')} / sqrt({argument}))", "f8"
    raise writer.refuse(instruction)


FAMILIES = {
    **dict.fromkeys(("add", "sub"), Family((3,), _add)),
    "mul": Family((3,), _mul),
    "mad": Family((4,), _mad),
    "fma": Family((4,), _fma),
    "div": Family((3,), _div),
    **dict.fromkeys(("min", "max"), Family((3, 4), _minmax)),
    "abs": Family((2,), _abs),
    "neg": Family((2,), _neg),
    "copysign": Family((3,), _copysign),
    "testp": Family((2,), _testp),
    "sqrt": Family((2,), _sqrt),
    **dict.fromkeys(_APPROXIMATE, Family((2,), _approximate)),
}
