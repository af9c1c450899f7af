"""Rounding of exact numbers into binary formats, by fractions: shares nothing with the emulator's arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

# Name -> (bits of the exponent's field, bits of the mantissa's)
FIELDS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52), "e5m2": (5, 2), "e4m3": (4, 3)}
FIELDS |= {"e3m2": (3, 2), "e2m3": (2, 3), "e2m1": (2, 1), "tf32": (8, 10)}


def rounded_bits(value: Fraction, name: str, mode: str = "rn") -> int:
    """Bits of a number in a format with infinities; of 0 those of +0.

    Parameters
    ----------
    mode
        `rn`, `rna`, `rz`, `rm` or `rp`.
    """
    exponent_bits, mantissa_bits = FIELDS[name]
    bias = (1 << exponent_bits - 1) - 1
    sign, magnitude = value < 0, abs(value)
    if not value:
        return 0
    # one too few at most
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 1
    exponent += magnitude >= Fraction(2) ** (exponent + 1)
    unit = max(exponent, 1 - bias) - mantissa_bits
    scaled = magnitude / Fraction(2) ** unit
    below, rest = math.floor(scaled), scaled - math.floor(scaled)
    away = {"rz": False, "rm": sign, "rp": not sign}.get(mode)
    if away is None:
        tie = below % 2 if mode == "rn" else True
        up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and bool(tie))
    else:
        up = away and rest > 0
    # the code's lowest exponent field is 0 for subnormals, where the unit is the smallest
    code = ((unit + bias + mantissa_bits - 1) << mantissa_bits) + below + up
    infinity = ((1 << exponent_bits) - 1) << mantissa_bits
    if code >= infinity:
        code = infinity if away is None or away else infinity - 1
    return sign << exponent_bits + mantissa_bits | code


def exact(value: float) -> Fraction:
    """The number that a finite float is."""
    return Fraction(float(value))


def floats_of(codes: list[int], kind: str) -> np.ndarray:
    """Bits -> an array of floats."""
    return np.array(codes, f"u{kind[1]}").view(kind)
