"""What instructions on f16 compute, and narrow formats' conversions, on arrays of 32 lanes.

A half is a numpy `f2`, or 16 bits in a `u2` where the name says value or single. bf16 stands in `arithmetic`.
"""

from __future__ import annotations

import numpy as np

from cakegen.emulator.text.arithmetic import Lanes, bf16_value, fma_odd
from cakegen.emulator.text.small_floats import FORMATS, decode, decode_scale, encode, encode_scale

_MIN_NORMAL = np.float16(2.0**-14)
_CANONICAL_NAN = np.uint16(0x7FFF)


def f16_value(bits: Lanes) -> Lanes:
    """`cvt.f32.f16`: exact."""
    return bits.view(np.float16).astype(np.float32)


def f16_single(a: Lanes) -> Lanes:
    """`cvt.rn.f16.f32`: 16 bits; NaN becomes 0x7FFF."""
    return _canonical(a.astype(np.float16)).view(np.uint16)


def _canonical(a: Lanes) -> Lanes:
    nan = np.isnan(a)
    return np.where(nan, _CANONICAL_NAN.view(np.float16), a) if np.count_nonzero(nan) else a


def f16_pair(high: Lanes, low: Lanes) -> Lanes:
    """`cvt.rn.f16x2.f32`: the first source goes to the upper half."""
    return np.stack((f16_single(low), f16_single(high)), 1).view(np.uint32).reshape(-1)


def add_f16(a: Lanes, b: Lanes) -> Lanes:
    """`add.f16`: numpy adds in fp32, whose 24 bits are enough to round a sum or a product of halves twice."""
    return _canonical(a + b)


def sub_f16(a: Lanes, b: Lanes) -> Lanes:
    """`sub.f16`."""
    return _canonical(a - b)


def mul_f16(a: Lanes, b: Lanes) -> Lanes:
    """`mul.f16`."""
    return _canonical(a * b)


def fma_f16(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """`fma.rn.f16`: rounded once."""
    return _canonical(fma_odd(a, b, c).astype(np.float16))


def flush_f16(a: Lanes) -> Lanes:
    """Subnormals become zeros of their sign (`.ftz`)."""
    return np.where(np.abs(a) < _MIN_NORMAL, np.copysign(np.float16(0), a), a)


def saturate_f16(a: Lanes) -> Lanes:
    """Clamp to [0, 1]; NaN becomes 0 (`.sat`)."""
    return np.where(np.isnan(a), np.float16(0), np.clip(a, np.float16(0), np.float16(1)))


def relu_f16(a: Lanes) -> Lanes:
    """`.relu`: negative results become +0, NaN the canonical one."""
    return _relu(a.view(np.uint16), np.isnan(a)).view(np.float16)


def relu_bf16(bits: Lanes) -> Lanes:
    """`.relu` of bf16 bits."""
    return _relu(bits, np.isnan(bf16_value(bits)))


def _relu(bits: Lanes, nan: Lanes) -> Lanes:
    return np.where(nan, _CANONICAL_NAN, np.where(bits & np.uint16(0x8000), np.uint16(0), bits))


def narrow(a: Lanes, name: str, rounding: str, saturates: bool, relu: bool) -> Lanes:
    """`cvt` of fp32 or fp64 into one narrow number; tf32 fills the upper bits of a u32."""
    codes = encode(a, FORMATS[name], rounding=rounding, saturates=saturates, relu=relu)
    if name == "tf32":
        return np.where(np.isnan(a), np.uint32(0x7FFFFFFF), codes << np.uint32(13))
    return codes.astype(np.uint16)


def narrow_pair(high: Lanes, low: Lanes, name: str, rounding: str, saturates: bool, relu: bool) -> Lanes:
    """`cvt` of two fp32 into a pair; the first source goes to the upper half."""
    if name == "ue8m0":
        codes = encode_scale(np.concatenate((high, low)), rounding, saturates)
    else:
        codes = encode(np.concatenate((high, low)), FORMATS[name], rounding=rounding, saturates=saturates, relu=relu)
    return codes[: high.size] << np.uint32(_field_bits(name)) | codes[high.size :]


def _field_bits(name: str) -> int:
    """Bits between the items of a pair: numbers of six bits stand in bytes."""
    if name == "ue8m0":
        return 8
    bits = FORMATS[name].bits
    return 8 if bits == 6 else bits


def widen_pair(codes: Lanes, source: str, name: str, relu: bool) -> Lanes:
    """`cvt.rn.f16x2.e4m3x2` and the like: exact."""
    shift = np.uint32(_field_bits(source))
    wide = codes.astype(np.uint32)
    both = np.concatenate((wide & (np.uint32(1) << shift) - np.uint32(1), wide >> shift))
    if source == "ue8m0":
        values = decode_scale(both)
    else:
        values = decode(both & np.uint32((1 << FORMATS[source].bits) - 1), FORMATS[source])
    halves = encode(values, FORMATS[name], relu=relu)
    return halves[codes.size :] << np.uint32(16) | halves[: codes.size]


def pack_items(high: Lanes, low: Lanes) -> Lanes:
    """`cvt.pack`: two items in the lower bits of a u32."""
    return high.astype(np.uint32) << np.uint32(high.dtype.itemsize * 8) | low
