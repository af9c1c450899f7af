"""What a Hopper wgmma adds up, bit for bit as an H200 does. Leaf module: imports numpy only.

PTX ISA 9.7.15 leaves order, rounding and subnormals open. The 16 products of an instruction and the accumulator are one
sum; every term is shifted to the largest exponent and truncated to 25 fractional bits; the sum is exact, and truncated
to fp32 (arXiv 2511.10909; arXiv 2512.07004 agrees in structure). A device added two things (docs/hopper-answers.md): a
product of zero has no part in the largest exponent, and a sum of 2^128 or more is infinite.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

FRACTION_BITS = 25
FRACTION_BITS_FP8 = 13
# What 13 fractional bits leave of the 23 of fp32.
_FP8_SUM_BITS = np.uint32(0xFFFFFFFF << 10 & 0xFFFFFFFF)
# Exponents of factors up to which terms fit into 32 bits at each step, of an accumulator beside them, and that of a
# factor of zero: no product with it is as large as another product or the accumulator.
_NARROW, _NARROW_C = 20, 40
_NARROW_ZERO = np.int16(-62)
# Elements of a sum at a time, so that its parts stay in a cache.
_BLOCK_ELEMENTS = 8192
# Multiplications of an fp64 product up to which OpenBLAS keeps to one thread (its SMP_THRESHOLD_MIN *
# GEMM_MULTITHREAD_THRESHOLD). Its other threads wait busily, which on a busy machine takes many times as long.
_SERIAL_PRODUCT = 1 << 18
_NAN = np.uint32(0x7FFFFFFF)
# Likewise, beside any other factor.
_ZERO_EXPONENT = np.int16(-300)
_FIRST_INFINITE = 2.0**128


def bf16_to_f32(bits: Array) -> Array:
    """bf16 bits -> fp32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _values(operand: Array) -> Array:
    return bf16_to_f32(operand) if operand.dtype == np.uint16 else operand


def multiply_add_hopper(a_bits: Array, b_bits: Array, c: Array) -> Array:
    """`c [m, n] + a [m, 16] b [n, 16]^T` in the model's arithmetic.

    Parameters
    ----------
    a_bits, b_bits
        bf16 bits in u16; or both as their values in fp32, where one holds f16.
    c
        fp32.
    """
    a, b = _values(a_bits).astype(np.float64), _values(b_bits).astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(c).all()):
        return _with_specials(a, b, a_bits, b_bits, c)
    bits = a_bits.dtype == np.uint16
    narrow = bits and _is_narrow(a_bits, 7, _NARROW) and _is_narrow(b_bits, 7, _NARROW)
    if narrow and _is_narrow(c.view(np.uint32), 23, _NARROW_C):
        return _narrow_sum(a_bits, b_bits, c)
    return _aligned_sum(a, b, a_bits, b_bits, c)


def multiply_add_hopper_fp8(a: Array, b: Array, c: Array) -> Array:
    """The same of fp8 factors as their values in fp32, `[m, 32]` and `[n, 32]`, by its published narrower accumulator.

    Terms, the accumulator among them, keep 13 fractional bits of the largest exponent, and so does the sum (arXiv
    2511.10909; PTX ISA 9.7.15.5 promises less than single precision). No device was asked here.
    """
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    exact = np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(c).all()
    add = _aligned_sum if exact else _with_specials
    sums = add(wide_a, wide_b, a, b, c, FRACTION_BITS_FP8)
    kept = np.isnan(sums) | np.isinf(sums)
    return np.where(kept, sums, (sums.view(np.uint32) & _FP8_SUM_BITS).view(np.float32))


def multiply_add_wide(a_bits: Array, b_bits: Array, c: Array) -> Array:
    """The same in fp64, rounded once to fp32: faster, and within the tolerance of any model."""
    a, b = _values(a_bits).astype(np.float64), _values(b_bits).astype(np.float64)
    result: Array = np.empty(c.shape, np.float32)
    step = max(1, _SERIAL_PRODUCT // b.size)
    for first in range(0, len(a), step):
        rows = slice(first, first + step)
        result[rows] = a[rows] @ b.T + c[rows]
    return result


def _aligned_sum(
    a: Array, b: Array, a_bits: Array, b_bits: Array, c: Array, fraction_bits: int = FRACTION_BITS
) -> Array:
    # k is the slowest axis, so that sums and maxima run along whole rows
    a_exponents, b_exponents = _factor_exponents(a_bits).T, _factor_exponents(b_bits).T
    largest = (a_exponents[:, :, None] + b_exponents[:, None, :]).max(axis=0)
    largest = np.maximum(largest, _exponents(c.view(np.uint32), 23))
    # 2 ** (fraction_bits - largest), and its inverse, put together from their bits
    scale = ((1023 + fraction_bits - largest).astype(np.int64) << 52).view(np.float64)
    inverse = ((1023 - fraction_bits + largest).astype(np.int64) << 52).view(np.float64)
    products = a.T[:, :, None] * b.T[:, None, :]
    products *= scale
    total = np.trunc(products, out=products).sum(axis=0)
    total += np.trunc(c * scale)
    total *= inverse
    return _truncate_f32(total)


def _factor_exponents(bits: Array) -> Array:
    """Exponents of factors (bf16 bits, or fp32); that of zero is so low that no product with it is the largest."""
    if bits.dtype == np.float32:
        return np.where(bits != 0, _exponents(bits.view(np.uint32), 23), _ZERO_EXPONENT)
    return np.where(bits & np.uint16(0x7FFF), _exponents(bits, 7), _ZERO_EXPONENT)


def _is_narrow(bits: Array, shift: int, limit: int) -> bool:
    """Whether all values are zero or have exponents of at most a limit."""
    exponents = _exponents(bits, shift)[bits << bits.dtype.type(1) != 0]
    return bool((np.abs(exponents) <= limit).all())


def _narrow_sum(a_bits: Array, b_bits: Array, c: Array) -> Array:
    """`_aligned_sum` of operands whose exponents are small, four times as fast.

    Every step is exact: exponents add up in i8, products and scaled products are fp32 with 16 bits, and terms are below
    2^27, so that 16 of them fit in i32, into which numpy truncates.
    """
    a, b = (np.ascontiguousarray(bf16_to_f32(bits).T) for bits in (a_bits, b_bits))
    a_exponents, b_exponents = (
        np.where(values == 0, _NARROW_ZERO, _exponents(bits, 7).T).astype(np.int8)
        for values, bits in ((a, a_bits), (b, b_bits))
    )
    result = np.empty_like(c)
    block = max(1, _BLOCK_ELEMENTS // c.shape[1])
    for first in range(0, c.shape[0], block):
        rows = slice(first, first + block)
        largest = _exponents(c[rows].view(np.uint32), 23)
        for k in range(a.shape[0]):
            np.maximum(largest, a_exponents[k, rows, None] + b_exponents[k], out=largest)
        # where all terms are zero, any scale will do
        exponent = np.maximum(largest, np.int16(-100)).astype(np.int32)
        scale = (127 + FRACTION_BITS - exponent << 23).view(np.float32)
        total = np.zeros(scale.shape, np.int32)
        for k in range(a.shape[0]):
            product = a[k, rows, None] * b[k]
            product *= scale
            total += product.astype(np.int32)
        aligned = total.astype(np.float64) + np.trunc(c[rows] * scale.astype(np.float64))
        aligned *= 1 / scale.astype(np.float64)
        result[rows] = _truncate_f32(aligned)
    return result


def _exponents(bits: Array, shift: int) -> Array:
    """Unbiased exponents in i16; a subnormal counts as the smallest normal, and so does an accumulator of zero."""
    field = (bits >> bits.dtype.type(shift)).astype(np.int16) & np.int16(0xFF)
    unbiased: Array = np.maximum(field, np.int16(1)) - np.int16(127)
    return unbiased


def _truncate_f32(value: Array) -> Array:
    nearest = value.astype(np.float32)
    magnitude = np.abs(value)
    beyond = (np.abs(nearest) > magnitude) & (magnitude < _FIRST_INFINITE)
    # one ulp towards zero is one less in the bits of either sign
    return (nearest.view(np.int32) - beyond).view(np.float32)


def _with_specials(
    a: Array, b: Array, a_bits: Array, b_bits: Array, c: Array, fraction_bits: int = FRACTION_BITS
) -> Array:
    """NaN and infinity go where the exact sum says; all other elements follow the model."""
    exact = (a[:, None, :] * b[None, :, :]).sum(axis=2) + c
    finite_rows: Array = np.asarray(np.isfinite(a).all(axis=1))
    finite_cols: Array = np.asarray(np.isfinite(b).all(axis=1))
    usual = finite_rows[:, None] & finite_cols[None, :] & np.isfinite(c)
    clean = np.zeros_like(a_bits), np.zeros_like(b_bits)
    clean[0][finite_rows], clean[1][finite_cols] = a_bits[finite_rows], b_bits[finite_cols]
    zeros_a, zeros_b = np.where(finite_rows[:, None], a, 0.0), np.where(finite_cols[:, None], b, 0.0)
    result = _aligned_sum(zeros_a, zeros_b, *clean, np.where(np.isfinite(c), c, np.float32(0)), fraction_bits)
    special = np.where(np.isnan(exact), np.full_like(c, 0).view(np.uint32) + _NAN, exact.astype(np.float32).view("u4"))
    return np.where(usual, result, special.view(np.float32))
