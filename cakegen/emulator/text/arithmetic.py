"""What arithmetic instructions compute, on arrays of 32 lanes. Leaf module: imports numpy only.

Rounding is that of the opcode. Approximate functions are rounded from fp64, so within their documented error but not
with a device's bits (PTX ISA 9.7.3 gives the bounds).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Lanes: TypeAlias = Any  # NDArray of 32 lanes; numpy types no scalar-by-array arithmetic more closely than this

_F32_MIN_NORMAL = np.float32(2.0**-126)
_HALF_ULP = np.uint32(0x7FFF)
_CANONICAL_BF16_NAN = np.uint32(0x7FFF)
_CANONICAL_NAN = np.uint32(0x7FFFFFFF).view(np.float32)


def fma_f32(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """`a * b + c` rounded once."""
    return fma_odd(a, b, c).astype(np.float32)


def fma_odd(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """`a * b + c` in fp64, rounded to odd.

    The product of two fp32 is exact in fp64; after rounding the sum to odd there, rounding to a type of at most 51 bits
    is as good as one rounding (Boldo and Melquiond 2008).
    """
    return sum_odd(a.astype(np.float64) * b, c.astype(np.float64))


def sum_odd(a: Lanes, b: Lanes) -> Lanes:
    """The sum of two fp64, rounded to odd."""
    total = a + b
    virtual = total - a
    error = (a - (total - virtual)) + (b - virtual)
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    if np.count_nonzero(inexact):
        away = (error > 0) == (total > 0)
        bits = np.where(inexact, np.where(away, bits + 1, bits - 1), bits)
        total = bits.view(np.float64)
    return total


def add_f32(a: Lanes, b: Lanes) -> Lanes:
    """`add.f32x2`, an item."""
    return a + b


def sub_f32(a: Lanes, b: Lanes) -> Lanes:
    """`sub.f32x2`, an item."""
    return a - b


def mul_f32(a: Lanes, b: Lanes) -> Lanes:
    """`mul.f32x2`, an item."""
    return a * b


def fma_bf16(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """`fma.rn.bf16`: bits in u16, rounded once; subnormals stay."""
    exact = fma_odd(bf16_value(a), bf16_value(b), bf16_value(c))
    nearest = exact.astype(np.float32)
    # to odd in fp32 as well: towards zero, and the last bit set where that lost something
    bits = nearest.view(np.uint32) - (np.abs(nearest) > np.abs(exact))
    inexact = (nearest != exact) & np.isfinite(exact)
    return bf16_single(np.where(inexact, bits | 1, nearest.view(np.uint32)).astype(np.uint32).view(np.float32))


def add_bf16(a: Lanes, b: Lanes) -> Lanes:
    """`add.bf16`: as an fma with a factor 1, which is what the ISA's exact result comes to."""
    return fma_bf16(a, np.full_like(a, 0x3F80), b)


def sub_bf16(a: Lanes, b: Lanes) -> Lanes:
    """`sub.bf16`."""
    return fma_bf16(b, np.full_like(b, 0xBF80), a)


def mul_bf16(a: Lanes, b: Lanes) -> Lanes:
    """`mul.bf16`: with -0 added, which changes no product."""
    return fma_bf16(a, b, np.full_like(a, 0x8000))


def flush_f32(a: Lanes) -> Lanes:
    """Subnormals become zeros of their sign (`.ftz`)."""
    return np.where(np.abs(a) < _F32_MIN_NORMAL, np.copysign(np.float32(0), a), a)


def saturate(a: Lanes) -> Lanes:
    """Clamp to [0, 1]; NaN becomes 0 (`.sat`)."""
    return np.where(np.isnan(a), a.dtype.type(0), np.clip(a, a.dtype.type(0), a.dtype.type(1)))


def bf16_bits(a: Lanes) -> Lanes:
    """fp32 -> bf16 bits in a u32, to nearest even; NaN becomes 0x7FFF."""
    bits = a.view(np.uint32)
    rounded = (bits + _HALF_ULP + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = np.isnan(a)
    # on 32 elements count_nonzero takes a fifth of the time of any
    return np.where(nan, _CANONICAL_BF16_NAN, rounded) if np.count_nonzero(nan) else rounded


def bf16_pair(high: Lanes, low: Lanes) -> Lanes:
    """`cvt.rn.bf16x2.f32`: the first source goes to the upper half."""
    # both in one go: with so few lanes what costs is the number of numpy's calls
    both = bf16_bits(np.concatenate((high, low)))
    return (both[: high.size] << np.uint32(16)) | both[high.size :]


def bf16_single(a: Lanes) -> Lanes:
    """`cvt.rn.bf16.f32`: 16 bits."""
    return bf16_bits(a).astype(np.uint16)


def bf16_value(a: Lanes) -> Lanes:
    """`cvt.f32.bf16`: exact."""
    return (a.astype(np.uint32) << np.uint32(16)).view(np.float32)


def shift_left(a: Lanes, count: Lanes) -> Lanes:
    """`shl`: counts past the width give 0."""
    width = a.dtype.itemsize * 8
    small = np.minimum(count, np.uint32(width - 1)).astype(a.dtype)
    return np.where(count < width, a << small, a.dtype.type(0))


def shift_right(a: Lanes, count: Lanes) -> Lanes:
    """`shr`: counts past the width give 0, or the sign of a signed value."""
    width = a.dtype.itemsize * 8
    small = np.minimum(count, np.uint32(width - 1)).astype(a.dtype)
    if a.dtype.kind == "i":
        return a >> small
    return np.where(count < width, a >> small, a.dtype.type(0))


def multiply_wide(a: Lanes, b: Lanes) -> Lanes:
    """`mul.wide`: the product in twice the width."""
    wide = np.dtype(f"{a.dtype.kind}{a.dtype.itemsize * 2}")
    return a.astype(wide) * b.astype(wide)


def multiply_high(a: Lanes, b: Lanes) -> Lanes:
    """`mul.hi`: the upper half of the product."""
    if a.dtype.itemsize < 8:
        return (multiply_wide(a, b) >> (a.dtype.itemsize * 8)).astype(a.dtype)
    # of 64 bits by halves of 32: the middle sums keep their carries in the upper halves of u64
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = a.view(np.uint64), b.view(np.uint64)
    x_low, x_high, y_low, y_high = x & low, x >> shift, y & low, y >> shift
    middle = x_high * y_low + (x_low * y_low >> shift)
    upper = x_high * y_high + (middle >> shift) + ((x_low * y_high + (middle & low)) >> shift)
    if a.dtype.kind == "i":
        # a negative factor counts as 2^64 too much of the other
        upper = upper - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return upper.view(a.dtype)


def divide(a: Lanes, b: Lanes) -> Lanes:
    """Integer `div`: towards zero. By zero: all ones, which is what devices give (the ISA leaves it open)."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    signed = a.dtype.kind == "i"
    if signed:
        # magnitudes are unsigned: that of the smallest value has no signed counterpart
        unsigned = f"u{a.dtype.itemsize}"
        magnitude = (np.abs(a).view(unsigned) // np.abs(safe).view(unsigned)).view(a.dtype)
        quotient = np.where((a < 0) != (safe < 0), -magnitude, magnitude)
    else:
        quotient = a // safe
    return np.where(b == 0, ~a.dtype.type(0), quotient)


def remainder(a: Lanes, b: Lanes) -> Lanes:
    """Integer `rem`: with the sign of the dividend."""
    return a - divide(a, b) * b


_TO_WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def to_whole(a: Lanes, rounding: str) -> Lanes:
    """`cvt.rni` and the like into the same type: a whole number; zeros keep their sign."""
    return _TO_WHOLE[rounding](a)


def to_integer(a: Lanes, dtype: str, rounding: str = "rzi") -> Lanes:
    """`cvt` of a float into an integer: clamped.

    NaN becomes 0, or the integer whose highest bit alone is set where the source has 64 bits, or the result has.
    """
    limits = np.iinfo(dtype)
    nan = 1 << limits.bits - 1 if a.dtype.itemsize == 8 or limits.bits == 64 else 0
    wide = _TO_WHOLE[rounding](a.astype(np.float64))
    inside = (wide < float(limits.max)) & (wide > float(limits.min))
    result = np.where(inside, wide, 0.0).astype(dtype)
    result = np.where(wide >= float(limits.max), np.dtype(dtype).type(limits.max), result)
    result = np.where(wide <= float(limits.min), np.dtype(dtype).type(limits.min), result)
    return np.where(np.isnan(wide), np.array(nan, f"u{limits.bits // 8}").astype(dtype), result) if nan else result


def saturated(a: Lanes, dtype: str) -> Lanes:
    """`cvt.sat` of an integer, and what `add.sat` and `sub.sat` make of their exact sum: clamped to a type."""
    ours, theirs = np.iinfo(a.dtype), np.iinfo(dtype)
    return np.clip(a, max(ours.min, theirs.min), min(ours.max, theirs.max)).astype(dtype)


def exact_or_odd(a: Lanes) -> Lanes:
    """An integer as fp64; what has more than 53 bits is rounded to odd, so that it can be rounded once more."""
    if a.dtype.itemsize < 8:
        return a.astype(np.float64)
    high = (a >> a.dtype.type(32)).astype(np.float64) * 2.0**32
    return sum_odd(high, (a.view(np.uint64) & np.uint64(0xFFFFFFFF)).astype(np.float64))


def minimum_f32(a: Lanes, b: Lanes) -> Lanes:
    """`min` of floats: NaN loses, -0 < +0."""
    result, zeros = np.fmin(a, b), (a == 0) & (b == 0)
    return np.where(zeros, np.where(np.signbit(a), a, b), result) if np.count_nonzero(zeros) else result


def maximum_f32(a: Lanes, b: Lanes) -> Lanes:
    """`max` of floats: NaN loses, -0 < +0."""
    result, zeros = np.fmax(a, b), (a == 0) & (b == 0)
    return np.where(zeros, np.where(np.signbit(a), b, a), result) if np.count_nonzero(zeros) else result


def minimum_nan(a: Lanes, b: Lanes) -> Lanes:
    """`min.NaN`: NaN wins, and is canonical."""
    return np.where(np.isnan(a) | np.isnan(b), _CANONICAL_NAN, minimum_f32(a, b))


def maximum_nan(a: Lanes, b: Lanes) -> Lanes:
    """`max.NaN`: NaN wins, and is canonical."""
    return np.where(np.isnan(a) | np.isnan(b), _CANONICAL_NAN, maximum_f32(a, b))


def with_signs(magnitude: Lanes, *sources: Lanes) -> Lanes:
    """`.xorsign`: the exclusive or of the sources' signs."""
    negative = np.signbit(sources[0])
    for source in sources[1:]:
        negative = negative ^ np.signbit(source)
    return np.where(np.isnan(magnitude), magnitude, np.where(negative, -magnitude, magnitude))


def has_property(a: Lanes, name: str) -> Lanes:
    """`testp`. Zeros are normal."""
    magnitude = np.abs(a)
    subnormal = (magnitude > 0) & (magnitude < np.finfo(a.dtype).tiny)
    match name:
        case "finite":
            return np.isfinite(a)
        case "infinite":
            return np.isinf(a)
        case "number":
            return ~np.isnan(a)
        case "notanumber":
            return np.isnan(a)
        case "subnormal":
            return subnormal
    return np.isfinite(a) & ~subnormal


def exp2_f32(a: Lanes) -> Lanes:
    """`ex2.approx.f32` (documented: 2 ulp)."""
    return np.exp2(a.astype(np.float64)).astype(np.float32)


def log2_f32(a: Lanes) -> Lanes:
    """`lg2.approx.f32` (documented: absolute 2^-22 near 1, else relative)."""
    return np.log2(a.astype(np.float64)).astype(np.float32)


def reciprocal_f32(a: Lanes) -> Lanes:
    """`rcp` (approx: 1 ulp; rn: exact rounding, as here)."""
    return np.float32(1) / a


def reciprocal_root_f32(a: Lanes) -> Lanes:
    """`rsqrt.approx.f32` (documented: relative 2^-22.9)."""
    return (1.0 / np.sqrt(a.astype(np.float64))).astype(np.float32)


def sine_f32(a: Lanes) -> Lanes:
    """`sin.approx.f32` (documented: absolute 2^-20.5 between -2 pi and 2 pi)."""
    return np.sin(a.astype(np.float64)).astype(np.float32)


def cosine_f32(a: Lanes) -> Lanes:
    """`cos.approx.f32` (documented: as `sin`)."""
    return np.cos(a.astype(np.float64)).astype(np.float32)


def tanh_f32(a: Lanes) -> Lanes:
    """`tanh.approx.f32` (documented: relative 2^-11)."""
    return np.tanh(a.astype(np.float64)).astype(np.float32)


def shuffle(mode: str, value: Lanes, b: Lanes, c: Lanes) -> tuple[Lanes, Lanes]:
    """`shfl.sync`: the values, and whether each came from a lane in range (PTX ISA 9.7.9.6)."""
    lane = np.arange(32)
    offset = (b & np.uint32(31)).astype(np.int64)
    clamp = (c & np.uint32(31)).astype(np.int64)
    segment = ((c >> np.uint32(8)) & np.uint32(31)).astype(np.int64)
    last = (lane & segment) | (clamp & ~segment)
    first = lane & segment
    if mode == "up":
        source = lane - offset
        inside = source >= last
    else:
        source = {"down": lane + offset, "bfly": lane ^ offset, "idx": first | (offset & ~segment)}[mode]
        inside = source <= last
    return value[np.where(inside, source, lane)], inside
