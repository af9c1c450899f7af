"""`mma.sync`: a product of matrices that a warp holds in its registers.

PTX ISA 9.7.14.5; fragments as `fragments` has them.

The ISA leaves the order and the rounding of a floating-point sum open. Sums of f16, bf16, tf32 and fp8 follow the model
of the launch (`tensor_core`), which an H200 showed for `wgmma` of bf16; it is not measured for `mma.sync`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.text.ptx import Instruction, Register, Sink
from cakegen.emulator.units.fragments import factor_cells, sum_cells
from cakegen.emulator.units.product_chains import MultiplyAdd
from cakegen.emulator.units.product_values import add_integers, values_of
from cakegen.emulator.units.warp_matrix.collective import (
    Collective,
    RegisterWarp,
    by_whole_warp,
    read_registers,
    refused,
    registers_of,
    write_registers,
)

Array = NDArray[Any]
Registers = tuple[Register | Sink, ...]

_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)$")
# Type of A -> K of its shapes; of integers, by the type's width, with 16 rows and with 8.
_FLOATS = {"f16": (8, 16), "bf16": (8, 16), "tf32": (4, 8), "e4m3": (16, 32), "e5m2": (16, 32)}
_INTEGERS = {"s8": ((16, 32), (16,)), "s4": ((32, 64), (32,))}
# Bits of an element.
_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "f64": 64}
_FP8 = {"e4m3", "e5m2"}


class MultiplyHost(Protocol):
    """What products ask of their launch."""

    @property
    def multiply_add(self) -> MultiplyAdd:
        """The tensor core's arithmetic."""


class MultiplyWarp(RegisterWarp, Protocol):
    """A warp that multiplies."""

    @property
    def machine(self) -> MultiplyHost:
        """Its launch."""


@dataclass(frozen=True)
class _Form:
    """`d [m, n] = a [m, k] b [k, n] + c [m, n]`."""

    m: int
    k: int
    a: str
    b: str
    c: str
    d: str
    saturates: bool


def decode_mma(instruction: Instruction, index: int) -> Collective:
    """`mma.sync`.

    Raises
    ------
    EmulationError
        A shape or types that are not modelled.
    """
    form = _form_of(instruction)
    operands = instruction.operands
    if form is None or len(operands) != 4:
        raise refused(instruction)
    per_register = 1 if form.a == "f64" else 32 // _BITS[form.a]
    # elements of a matrix over those that 32 lanes hold in one register
    wanted = (
        form.m * 8 // 32 // _packed(form.d),
        form.m * form.k // 32 // per_register,
        8 * form.k // 32 // per_register,
        form.m * 8 // 32 // _packed(form.c),
    )
    d, a, b, c = (registers_of(instruction, operand, (count,)) for operand, count in zip(operands, wanted, strict=True))
    multiply = _arithmetic(form)

    def run(warp: MultiplyWarp) -> None:
        left = _factor(warp, a, form.a, form.m, form.k)
        right = _factor(warp, b, form.b, 8, form.k)
        _write_sums(warp, d, form, multiply(warp, left, right, _read_sums(warp, c, form)))

    return by_whole_warp(instruction, run)


def _packed(kind: str) -> int:
    return 2 if kind == "f16" else 1


def _form_of(instruction: Instruction) -> _Form | None:
    parts = [part for part in instruction.parts if part != "satfinite"]
    shape = _SHAPE.match(parts[3]) if len(parts) == 10 else None
    if shape is None or parts[1:3] != ["sync", "aligned"] or parts[4:6] != ["row", "col"]:
        return None
    m, n, k = (int(each) for each in shape.groups())
    d, a, b, c = parts[6:]
    form = _Form(m, k, a, b, c, d, "satfinite" in instruction.parts)
    return form if n == 8 and _is_legal(form) else None


def _is_legal(form: _Form) -> bool:
    """Shapes and types that go together (PTX ISA 9.7.14.5, table of `mma` shapes)."""
    m, k, a, b = form.m, form.k, form.a, form.b
    if a == "f64":
        return (b, form.c, form.d) == ("f64", "f64", "f64") and (m, k) in ((8, 4), (16, 4), (16, 8), (16, 16))
    if a in _FLOATS:
        same = b == a or {a, b} <= _FP8
        sums = {form.c, form.d} <= {"f32", "f16"} if a in _FP8 | {"f16"} else (form.c, form.d) == ("f32", "f32")
        return m == 16 and same and sums and k in _FLOATS[a] and not form.saturates
    family = _INTEGERS.get(f"s{a[1:]}") if a[:1] in "su" else None
    if family is None or b not in (a, f"s{a[1:]}", f"u{a[1:]}") or (form.c, form.d) != ("s32", "s32"):
        return False
    return k in family[0 if m == 16 else 1] and m in (8, 16)


def _factor(warp: RegisterWarp, registers: Registers, kind: str, rows: int, depth: int) -> Array:
    """`[rows, depth]` elements of A, or of B by its columns: values; of bf16 its bits."""
    bits = _BITS[kind]
    if kind == "f64":
        elements = read_registers(warp, registers, "f8")[:, :, None]
    else:
        words = read_registers(warp, registers, "u4")
        elements = _nibbles(words) if bits == 4 else words[:, :, None].view(f"u{bits // 8}")
    matrix = np.empty((rows, depth), elements.dtype)
    matrix[factor_cells(rows, elements.shape[0], elements.shape[2])] = elements
    if kind in ("bf16", "f64"):
        return matrix
    return values_of(matrix, kind)


def _nibbles(words: Array) -> Array:
    return (words[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32) & np.uint32(15)).astype(np.uint8)


def _read_sums(warp: RegisterWarp, registers: Registers, form: _Form) -> Array:
    kind = {"f16": "f2", "f32": "f4", "s32": "i4", "f64": "f8"}[form.c]
    words = read_registers(warp, registers, "u8" if form.c == "f64" else "u4")
    elements = words[:, :, None].view(kind)
    sums = np.empty((form.m, 8), kind)
    sums[sum_cells(elements.shape[0], elements.shape[2])] = elements
    return sums


def _write_sums(warp: RegisterWarp, registers: Registers, form: _Form, sums: Array) -> None:
    elements = sums[sum_cells(len(registers), _packed(form.d))]
    write_registers(warp, registers, np.ascontiguousarray(elements).view("u8" if form.d == "f64" else "u4")[:, :, 0])


def _arithmetic(form: _Form) -> Callable[[MultiplyWarp, Array, Array, Array], Array]:
    if form.a == "f64":
        return lambda warp, a, b, c: a @ b.T + c
    if form.d == "s32":
        return lambda warp, a, b, c: add_integers(a, b, c, form.saturates)
    kind = {"f16": np.float16, "f32": np.float32}[form.d]
    return lambda warp, a, b, c: warp.machine.multiply_add(a, b, c.astype(np.float32)).astype(kind)
