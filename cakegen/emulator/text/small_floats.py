"""Formats narrower than fp32: how a value is rounded to one, and what one's bits stand for.

Sources: PTX ISA 5.2.3 (alternate floating-point formats) and 9.7.9.21 (`cvt`); OCP Microscaling Formats 1.0. Leaf
module: imports numpy only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Lanes: TypeAlias = Any  # NDArray of 32 lanes


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Parameters
    ----------
    exponent_bits, mantissa_bits
        Of its fields; one sign bit stands above them.
    has_infinity
        Whether the largest exponent holds infinities and NaNs; else its codes are numbers, but for those of `nan`.
    nan
        The code that a conversion from NaN gives; None: the format has none.
    """

    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool
    nan: int | None

    @property
    def bias(self) -> int:
        """Of its exponent."""
        return (1 << self.exponent_bits - 1) - 1

    @property
    def bits(self) -> int:
        """Of a code, the sign's with it."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @functools.cached_property
    def largest(self) -> int:
        """The code of the largest finite magnitude."""
        top = 1 << self.exponent_bits + self.mantissa_bits
        if self.has_infinity:
            return top - (1 << self.mantissa_bits) - 1
        return top - 1 - (self.nan == top - 1)

    @functools.cached_property
    def values(self) -> Any:
        """`[2 ** bits]` fp32: what each code stands for. For formats of at most 16 bits."""
        codes = np.arange(1 << self.bits, dtype=np.int64)
        exponent = codes >> self.mantissa_bits & ((1 << self.exponent_bits) - 1)
        mantissa = codes & ((1 << self.mantissa_bits) - 1)
        scale = np.maximum(exponent, 1) - self.bias - self.mantissa_bits
        magnitude = np.ldexp((mantissa + np.where(exponent > 0, 1 << self.mantissa_bits, 0)).astype(np.float64), scale)
        magnitudes = codes & ((1 << self.bits - 1) - 1)
        if self.has_infinity:
            magnitude = np.where(magnitudes > self.largest, np.where(mantissa == 0, np.inf, np.nan), magnitude)
        else:
            magnitude = np.where(magnitudes > self.largest, np.nan, magnitude)
        return np.where(codes >> self.bits - 1, -magnitude, magnitude).astype(np.float32)


F16 = Format(5, 10, has_infinity=True, nan=0x7FFF)
BF16 = Format(8, 7, has_infinity=True, nan=0x7FFF)
E5M2 = Format(5, 2, has_infinity=True, nan=0x7F)
E4M3 = Format(4, 3, has_infinity=False, nan=0x7F)
E3M2 = Format(3, 2, has_infinity=False, nan=None)
E2M3 = Format(2, 3, has_infinity=False, nan=None)
E2M1 = Format(2, 1, has_infinity=False, nan=None)
TF32 = Format(8, 10, has_infinity=True, nan=0x3FFFF)

FORMATS = {
    "f16": F16,
    "bf16": BF16,
    "e5m2": E5M2,
    "e4m3": E4M3,
    "e3m2": E3M2,
    "e2m3": E2M3,
    "e2m1": E2M1,
    "tf32": TF32,
}


def encode(values: Lanes, form: Format, *, rounding: str = "rn", saturates: bool = False, relu: bool = False) -> Lanes:
    """Codes (u32) of fp64 or fp32 values, each rounded once.

    Parameters
    ----------
    rounding
        `rn`: to nearest even; `rna`: to nearest, ties away from zero; `rz`, `rm`, `rp`: towards zero, minus and plus
        infinity.
    saturates
        `.satfinite`: what is too large, infinities too, becomes the largest finite number. A format without infinities
        always does so.
    relu
        `.relu`: negative values become +0.
    """
    exact = values.astype(np.float64)
    magnitude = np.abs(exact)
    finite = np.isfinite(magnitude)
    safe = np.where(finite, magnitude, 0.0)
    _, exponent = np.frexp(safe)
    unit = np.maximum(np.where(safe > 0, exponent - 1, -form.bias), 1 - form.bias) - form.mantissa_bits
    steps = np.ldexp(safe, -unit)
    signs = np.signbit(exact)
    towards_zero = {"rz": np.ones_like(signs), "rm": ~signs, "rp": signs}.get(rounding)
    if towards_zero is not None:
        whole = np.where(towards_zero, np.floor(steps), np.ceil(steps))
    else:
        whole = np.rint(steps) if rounding == "rn" else np.floor(steps + 0.5)
    # the implicit one carries into the exponent's field, and so does a mantissa that is rounded up to two
    codes = whole.astype(np.int64) + ((unit + form.mantissa_bits + form.bias - 1) << form.mantissa_bits)
    codes = np.where(finite, codes, form.largest + 1)
    over = codes > form.largest
    if saturates or not form.has_infinity:
        stays = over
    else:
        # towards zero, what is finite stays so
        stays = over & finite & (False if towards_zero is None else towards_zero)
    codes = np.where(stays, form.largest, np.where(over, form.largest + 1, codes))
    if relu:
        codes, signs = np.where(signs, 0, codes), np.zeros_like(signs)
    codes = codes | np.where(signs, 1 << form.bits - 1, 0)
    nan = np.isnan(exact)
    if nan.any():
        codes = np.where(nan, form.largest if form.nan is None else form.nan, codes)
    return codes.astype(np.uint32)


def decode(codes: Lanes, form: Format) -> Lanes:
    """fp32 values of codes; exact."""
    return form.values[codes.astype(np.int64)]


def encode_scale(values: Lanes, rounding: str, saturates: bool) -> Lanes:
    """`cvt.{rz,rp}.ue8m0x2`, an item: the exponent of a power of two as a byte, 0xFF for NaN. The sign is dropped."""
    bits = np.abs(values.astype(np.float32)).view(np.uint32)
    exponent = bits >> np.uint32(23)
    rest = bits & np.uint32(0x7FFFFF)
    if rounding == "rp":
        # a subnormal up to 2^-127 rounds up to 2^-127, which is code 0
        up = np.where(exponent == 0, rest > 0x400000, rest != 0)
        exponent = exponent + up
    limit = np.uint32(0xFE)
    infinite = np.isinf(values)
    exponent = np.where(exponent > limit, limit if saturates else np.uint32(0xFF), exponent)
    exponent = np.where(infinite, limit if saturates else np.uint32(0xFF), exponent)
    return np.where(np.isnan(values), np.uint32(0xFF), exponent).astype(np.uint32)


def decode_scale(codes: Lanes) -> Lanes:
    """fp32 values of `ue8m0`: 2 ** (code - 127)."""
    values = np.ldexp(np.float64(1), codes.astype(np.int64) - 127).astype(np.float32)
    return np.where(codes == 0xFF, np.float32(np.nan), values)
