"""Products of the types beside bf16: what elements stand for, and how they add up.

PTX ISA 9.7.14.5 (`mma`) and 9.7.15.5 (`wgmma`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.text.small_floats import FORMATS, decode
from cakegen.emulator.units.product_chains import MultiplyAdd
from cakegen.emulator.units.tensor_core import multiply_add_hopper, multiply_add_hopper_fp8

Array = NDArray[Any]

_FP8 = ("e4m3", "e5m2")
# A tensor core reads a tf32 factor from the upper 19 bits of a word.
_TF32_BITS = np.uint32(0xFFFFE000)


def values_of(elements: Array, kind: str) -> Array:
    """Unsigned elements of a type -> fp32 of a floating-point type, integers in i4 of another; shapes stay."""
    if kind == "tf32":
        return (elements & _TF32_BITS).view(np.float32)
    if kind == "f16":
        return elements.view(np.float16).astype(np.float32)
    if kind in FORMATS:
        return np.asarray(decode(elements, FORMATS[kind]))
    values = elements.astype(np.int32)
    bits = int(kind[1:])
    if kind[0] == "s":
        values = values - (values >> bits - 1 << bits)
    return values


def add_integers(a: Array, b: Array, c: Array, saturates: bool) -> Array:
    """`c [m, n] + a [m, k] b [n, k]^T` in s32: sums wrap, or with `.satfinite` stay in its range."""
    total = a.astype(np.int64) @ b.astype(np.int64).T + c
    if saturates:
        total = np.clip(total, -(1 << 31), (1 << 31) - 1)
    return np.asarray(total.astype(np.int32))


@dataclass(frozen=True)
class ProductKind:
    """Types of a product `d = a b + d`, and which factors are negated.

    Parameters
    ----------
    saturates
        Integers stay in the range of s32; else they wrap.
    """

    a: str
    b: str
    d: str
    negates_a: bool = False
    negates_b: bool = False
    saturates: bool = False

    @functools.cached_property
    def width(self) -> int:
        """Bytes of an element of A and B."""
        return {"f16": 2, "bf16": 2, "tf32": 4}.get(self.a, 1)

    @property
    def depth(self) -> int:
        """Elements along K: 32 bytes."""
        return 32 // self.width

    @functools.cached_property
    def is_plain(self) -> bool:
        """bf16 into fp32, which has machine code (`product_chains`)."""
        return self == ProductKind("bf16", "bf16", "f32")

    @functools.cached_property
    def sum_type(self) -> str:
        """numpy's type of a sum as a register holds it."""
        return {"f16": "f2", "s32": "i4"}.get(self.d, "f4")

    def factors(self, a: Array, b: Array) -> tuple[Array, Array]:
        """Elements -> what a tensor core's arithmetic takes: bits of bf16, values of other types."""
        return _factor(a, self.a, self.negates_a), _factor(b, self.b, self.negates_b)

    def add(self, multiply_add: MultiplyAdd, a: Array, b: Array, sums: Array) -> Array:
        """One product of elements `[m, k]` and `[n, k]` on sums, of `sum_type`."""
        left, right = self.factors(a, b)
        if self.d == "s32":
            return add_integers(left, right, sums, self.saturates)
        if self.a in _FP8 and multiply_add is multiply_add_hopper:
            multiply_add = multiply_add_hopper_fp8
        # an f16 accumulator is rounded once an instruction
        return multiply_add(left, right, sums.astype(np.float32)).astype(self.sum_type)


def _factor(elements: Array, kind: str, negates: bool) -> Array:
    if kind == "bf16":
        return elements ^ np.uint16(0x8000) if negates else elements
    values = values_of(elements, kind)
    return -values if negates else values
