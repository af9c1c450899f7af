"""Chains of products as loops that numba compiles; only `product_chains` imports this, and only where numba is.

What a kernel takes: bf16 bits in u16, `[products, m, k]` and `[products, n, k]` indices of them, which products start
from zero, the first product to do and the one behind the last, and fp32 sums `[m, n]`, which are written in place. It
returns the number of the product that it can't do, or the one behind the last.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from cakegen.compile.cache_folder import cache_root, refuse_strangers
from cakegen.errors import CakeError

Kernel = Callable[[Any, Any, Any, Any, int, int, Any], int]

_FRACTION_BITS = 25
# Exponents as in `tensor_core`: of factors and accumulators that fit, and of a factor of zero, which no other is below.
_NARROW, _NARROW_C, _ZERO = 20, 40, -300
_SIGNATURE = "int64(uint16[::1], int64[:, :, ::1], int64[:, :, ::1], boolean[::1], int64, int64, float32[:, ::1])"
_config: Any = importlib.import_module("numba.core.config")
_inlined: Callable[[Any], Any] = numba.njit


@functools.cache
def compiled(kernel: Kernel) -> Kernel:
    """A kernel in machine code, which is kept in the cache's folder for later processes if that folder is ours."""
    before = _config.CACHE_DIR
    with contextlib.suppress(CakeError, OSError):
        folder = cache_root() / "numba"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        refuse_strangers(folder)
        _config.CACHE_DIR = str(folder)
    try:
        found: Kernel = numba.njit(_SIGNATURE, cache=bool(_config.CACHE_DIR), nogil=True)(kernel)
    finally:
        _config.CACHE_DIR = before
    return found


@_inlined
def _exponent(field: Any) -> Any:
    return np.int32(field if field > 1 else 1) - np.int32(127)


@_inlined
def _factor_exponent(bits: Any) -> Any:
    return _exponent(bits >> 7 & 0xFF) if bits & 0x7FFF else np.int32(_ZERO)


@_inlined
def _factor_size(bits: Any) -> Any:
    return np.int32(bits & 0x7F | (0x80 if bits & 0x7F80 else 0))


@_inlined
def _is_narrow(exponent: Any, limit: Any) -> Any:
    return exponent == _ZERO or -limit <= exponent <= limit


@_inlined
def _unpack(elements: Any, at: Any, sizes: Any, signs: Any, exponents: Any) -> Any:
    """Factors `[rows, k]` as `[k, rows]` magnitudes, masks of the sign, and exponents; whether all are narrow."""
    narrow = True
    for row in range(at.shape[0]):
        for k in range(at.shape[1]):
            bits = np.int32(elements[at[row, k]])
            exponents[k, row] = _factor_exponent(bits)
            sizes[k, row] = _factor_size(bits)
            signs[k, row] = -(bits >> 15)
            narrow &= _is_narrow(exponents[k, row], _NARROW)
    return narrow


@_inlined
def _are_narrow_sums(words: Any) -> Any:
    narrow = True
    for i in range(words.shape[0]):
        for j in range(words.shape[1]):
            word = words[i, j]
            narrow &= word & 0x7FFFFFFF == 0 or _is_narrow(_exponent(word >> 23 & 0xFF), _NARROW_C)
    return narrow


@_inlined
def _add_row(a: Any, b: Any, i: Any, words: Any, largest: Any, total: Any) -> None:
    """Terms of one row of sums, cut at 25 fractional bits of the largest exponent, in i32: 16 are below 2^31."""
    (a_sizes, a_signs, a_exponents), (b_sizes, b_signs, b_exponents) = a, b
    n = words.shape[1]
    for j in range(n):
        largest[j] = _exponent(words[i, j] >> 23 & 0xFF)
        total[j] = 0
    for k in range(a_sizes.shape[0]):
        for j in range(n):
            largest[j] = max(largest[j], a_exponents[k, i] + b_exponents[k, j])
    for k in range(a_sizes.shape[0]):
        for j in range(n):
            # a product's magnitude has 14 fractional bits; one of zero has any exponent
            shift = largest[j] - a_exponents[k, i] - b_exponents[k, j]
            term = a_sizes[k, i] * b_sizes[k, j] << np.int32(11) >> min(shift, np.int32(31))
            sign = a_signs[k, i] ^ b_signs[k, j]
            total[j] += (term ^ sign) - sign


@_inlined
def _finish_row(i: Any, sums: Any, words: Any, largest: Any, total: Any) -> None:
    """Add the accumulator, cut likewise, and cut the sum to fp32."""
    for j in range(sums.shape[1]):
        word = words[i, j]
        field = word >> 23 & 0xFF
        size = word & 0x7FFFFF | (0x800000 if field else 0)
        kept = np.int64(size << 2 >> min(largest[j] - _exponent(field), np.int32(31)))
        exact = np.int64(total[j]) + (-kept if word < 0 else kept)
        value = np.float64(exact) * 2.0 ** np.float64(largest[j] - _FRACTION_BITS)
        nearest = np.float32(value)
        sums[i, j] = nearest
        # one ulp towards zero is one less in the bits of either sign
        words[i, j] -= np.int32(abs(np.float64(nearest)) > abs(value))


def hopper(elements: Any, a_at: Any, b_at: Any, fresh: Any, first: int, last: int, sums: Any) -> int:
    """`multiply_add_hopper` of operands whose exponents are small; it stops at any other."""
    rows, depth, n = a_at.shape[1], a_at.shape[2], b_at.shape[1]
    shape_a, shape_b = (depth, rows), (depth, n)
    a = np.empty(shape_a, np.int32), np.empty(shape_a, np.int32), np.empty(shape_a, np.int32)
    b = np.empty(shape_b, np.int32), np.empty(shape_b, np.int32), np.empty(shape_b, np.int32)
    largest, total = np.empty(n, np.int32), np.empty(n, np.int32)
    words = sums.view(np.int32)
    for product in range(first, last):
        if fresh[product]:
            sums[:, :] = 0
        narrow = _unpack(elements, a_at[product], a[0], a[1], a[2])
        narrow &= _unpack(elements, b_at[product], b[0], b[1], b[2])
        if not narrow or not _are_narrow_sums(words):
            return product
        for i in range(rows):
            _add_row(a, b, i, words, largest, total)
            _finish_row(i, sums, words, largest, total)
    return last


@_inlined
def _widen(elements: Any, at: Any, values: Any) -> None:
    """bf16 bits `[rows, k]` -> fp64 `[k, rows]`."""
    word = np.empty(1, np.uint32)
    single = word.view(np.float32)
    for row in range(at.shape[0]):
        for k in range(at.shape[1]):
            word[0] = np.uint32(elements[at[row, k]]) << np.uint32(16)
            values[k, row] = single[0]


def wide(elements: Any, a_at: Any, b_at: Any, fresh: Any, first: int, last: int, sums: Any) -> int:
    """`multiply_add_wide`; terms are added in the order of k."""
    rows, depth, n = a_at.shape[1], a_at.shape[2], b_at.shape[1]
    a, b = np.empty((depth, rows), np.float64), np.empty((depth, n), np.float64)
    total = np.empty(n, np.float64)
    for product in range(first, last):
        _widen(elements, a_at[product], a)
        _widen(elements, b_at[product], b)
        if fresh[product]:
            sums[:, :] = 0
        for i in range(rows):
            total[:] = 0
            for k in range(depth):
                for j in range(n):
                    total[j] += a[k, i] * b[k, j]
            for j in range(n):
                sums[i, j] = total[j] + sums[i, j]
    return last
