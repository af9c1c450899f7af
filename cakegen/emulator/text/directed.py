"""Arithmetic of fp32 in directions other than to nearest even, and of fp64 with one rounding, on arrays of 32 lanes.

Leaf module but for `arithmetic`. `rz` rounds towards zero, `rm` towards minus infinity, `rp` towards plus infinity.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from cakegen.emulator.text.arithmetic import Lanes, fma_odd

_INFINITY = np.float32(np.inf)


def round_f32(exact: Lanes, rounding: str) -> Lanes:
    """fp64 values in fp32; those that are not exact must be rounded to odd, or such that no fp32 value was crossed."""
    nearest = exact.astype(np.float32)
    if rounding == "rn":
        return nearest
    if rounding == "rz":
        return np.where(np.abs(nearest) > np.abs(exact), np.nextafter(nearest, np.float32(0)), nearest)
    if rounding == "rm":
        return np.where(nearest > exact, np.nextafter(nearest, -_INFINITY), nearest)
    return np.where(nearest < exact, np.nextafter(nearest, _INFINITY), nearest)


def fma_directed(a: Lanes, b: Lanes, c: Lanes, rounding: str) -> Lanes:
    """`fma.{rz,rm,rp}.f32`."""
    exact = fma_odd(a, b, c)
    result = round_f32(exact, rounding)
    if rounding != "rm":
        return result
    # terms that cancel leave -0 (IEEE 754, 6.3); two zeros of one sign keep theirs
    alike = (c == 0) & ((np.signbit(a) ^ np.signbit(b)) == np.signbit(c))
    return np.where((exact == 0) & ~alike, np.float32(-0.0), result)


def add_directed(a: Lanes, b: Lanes, rounding: str) -> Lanes:
    """`add.{rz,rm,rp}.f32`."""
    return fma_directed(a, np.ones_like(a), b, rounding)


def sub_directed(a: Lanes, b: Lanes, rounding: str) -> Lanes:
    """`sub.{rz,rm,rp}.f32`."""
    return fma_directed(a, np.ones_like(a), -b, rounding)


def mul_directed(a: Lanes, b: Lanes, rounding: str) -> Lanes:
    """`mul.{rz,rm,rp}.f32`: the product of two fp32 is exact in fp64."""
    return round_f32(a.astype(np.float64) * b, rounding)


def div_directed(a: Lanes, b: Lanes, rounding: str) -> Lanes:
    """`div.{rz,rm,rp}.f32`: a quotient that is no fp32 value differs from each by more than fp64's rounding."""
    return round_f32(a.astype(np.float64) / b, rounding)


def sqrt_directed(a: Lanes, rounding: str) -> Lanes:
    """`sqrt.{rz,rm,rp}.f32`: as a quotient's, its distance from fp32 values outlasts fp64's rounding."""
    return round_f32(np.sqrt(a.astype(np.float64)), rounding)


def fma_f64(a: Lanes, b: Lanes, c: Lanes, rounding: str = "rn") -> Lanes:
    """`fma.f64`, rounded once: by fractions, lane by lane."""
    result = a * b + c
    for lane in np.flatnonzero(np.isfinite(a) & np.isfinite(b) & np.isfinite(c)):
        exact = Fraction(float(a[lane])) * Fraction(float(b[lane])) + Fraction(float(c[lane]))
        if exact:
            result[lane] = _round_f64(exact, rounding)
        elif rounding == "rm" and not _zeros_alike(a[lane], b[lane], c[lane]):
            result[lane] = -0.0
    return result


def _zeros_alike(a: Any, b: Any, c: Any) -> bool:
    """Whether a product and a term are zeros of one sign."""
    return bool(c == 0 and (np.signbit(a) ^ np.signbit(b)) == np.signbit(c))


def _round_f64(exact: Fraction, rounding: str) -> float:
    try:
        nearest = exact.numerator / exact.denominator
    except OverflowError:
        nearest = float("inf") if exact > 0 else float("-inf")
    if rounding == "rn" or (np.isfinite(nearest) and Fraction(nearest) == exact):
        return nearest
    above = nearest == float("inf") or (np.isfinite(nearest) and Fraction(nearest) > exact)
    wants_below = rounding == "rm" or (rounding == "rz" and exact > 0)
    if above == wants_below:
        return float(np.nextafter(nearest, float("-inf") if above else float("inf")))
    return nearest


def add_f64(a: Lanes, b: Lanes, rounding: str) -> Lanes:
    """`add.f64` in a direction."""
    return fma_f64(a, np.ones_like(a), b, rounding)


def sub_f64(a: Lanes, b: Lanes, rounding: str) -> Lanes:
    """`sub.f64` in a direction."""
    return fma_f64(a, np.ones_like(a), -b, rounding)


def mul_f64(a: Lanes, b: Lanes, rounding: str) -> Lanes:
    """`mul.f64` in a direction: the zero that is added has the product's sign."""
    return fma_f64(a, b, np.copysign(0.0, np.copysign(1.0, a) * np.copysign(1.0, b)), rounding)


def approximate_f64(a: Lanes, what: str) -> Lanes:
    """`rcp.approx.ftz.f64` and `rsqrt.approx.f64`: the lower 32 bits of source and result count as 0."""
    coarse = _upper_half(a)
    exact = 1.0 / coarse if what == "rcp" else 1.0 / np.sqrt(coarse)
    return _upper_half(exact)


def _upper_half(a: Lanes) -> Lanes:
    bits = a.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)
    return np.where(bits & np.uint64(0x7FF << 52), bits, bits & np.uint64(1 << 63)).view(np.float64)
