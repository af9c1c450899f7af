"""Arithmetic as the ISA's text says, from small CUDA kernels through NVRTC and on arrays directly."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.text import arithmetic, bits

# a run silences numpy; here the functions are called alone
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Launch = Callable[..., Machine]
Make = Callable[..., np.ndarray]

FLOATS = np.array(
    [0.0, -0.0, 1.0, -1.5, 3.4e38, 1e-38, 1e-45, -1e-42, np.inf, -np.inf, np.nan, 0.1, 1 / 3, 65504.0, 2.0**-126, 7.0],
    np.float32,
)


def pairs(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    make = np.random.default_rng(seed)
    bits = make.integers(0, 1 << 32, (3, 2048), np.uint32)
    return tuple(row.view(np.float32) for row in bits)  # type: ignore[return-value]


def exact_rounded(value: Fraction) -> np.float32:
    """Round a fraction to fp32, to nearest even, without going through another precision."""
    if value == 0:
        return np.float32(0)
    magnitude, exponent = abs(value), -149
    while magnitude >= Fraction(2) ** (exponent + 24):
        exponent += 1
    scaled = magnitude / Fraction(2) ** exponent
    whole = scaled.numerator // scaled.denominator
    rest = scaled - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2):
        whole += 1
    result = np.float64(whole) * np.float64(2.0) ** exponent
    return np.float32(result if value > 0 else -result)


def test_fma_rounds_once() -> None:
    """Random bits, and cases built so that rounding the product first, or in fp64, gives another result."""
    a, b, c = pairs(1)
    tie = np.float32(1 + 2.0**-23)
    a = np.append(a, [tie, np.float32(1 + 2.0**-12), np.float32(2.0**-75)])
    b = np.append(b, [tie, np.float32(1 + 2.0**-12), np.float32(2.0**-75)])
    c = np.append(c, [np.float32(2.0**30), np.float32(2.0**-60), np.float32(1 + 2.0**-23)]).astype(np.float32)
    usable = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    got = arithmetic.fma_f32(a, b, c)
    checked = 0
    for x, y, z, result in zip(a[usable], b[usable], c[usable], got[usable], strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        if abs(exact) < Fraction(2) ** 127:
            assert result == exact_rounded(exact), (x, y, z)
            checked += 1
    assert checked > 500


def test_bf16_rounds_to_nearest_even_and_makes_nan_canonical() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -1.00390625, 3.4e38, np.inf, -np.inf, np.nan, 1e-40], np.float32)
    expected = [0x3F80, 0x3F80, 0x3F82, 0xBF80, 0x7F80, 0x7F80, 0xFF80, 0x7FFF, 0x0001]
    assert arithmetic.bf16_bits(values).tolist() == expected


def test_integer_instructions_match(launch: Launch, array: Make) -> None:
    source = """
    extern "C" __global__ void kernel_test(u32* out, const i32* a, const i32* b) {
        const u32 t = threadIdx.x;
        const i32 x = a[t], y = b[t];
        const u32 ux = x, uy = y;
        u32 r[16] = {ux + uy, ux - uy, ux * uy, __umulhi(ux, uy), (u32)__mulhi(x, y), ux / (uy | 1), (u32)(x / (y | 1)),
                     ux % (uy | 1), (u32)(x % (y | 1)), (u32)min(x, y), max(ux, uy), ~(ux & uy) ^ (ux | uy),
                     (u32)(x >> (uy & 31)), ux >> (uy & 31), ux << (uy & 31), (u32)__popc(ux)};
        for (u32 i = 0; i < 16; ++i) out[i * 32 + t] = r[i];
    }"""
    make = np.random.default_rng(0)
    a = array(make.integers(-(1 << 31), 1 << 31, 32), np.int32)
    b = array(make.integers(-(1 << 31), 1 << 31, 32), np.int32)
    out = array(np.zeros((16, 32)), np.uint32)
    launch(source, out, a, b)
    mask = (1 << 32) - 1
    for t in range(32):
        x, y = int(a[t]), int(b[t])
        ux, uy = x & mask, y & mask
        odd, uodd = y | 1, uy | 1
        quotient = abs(x) // abs(odd) * (1 if (x < 0) == (odd < 0) else -1)
        expected = [
            *(ux + uy, ux - uy, ux * uy, ux * uy >> 32, x * y >> 32, ux // uodd, quotient, ux % uodd),
            *(x - quotient * odd, min(x, y), max(ux, uy), ~(ux & uy) ^ (ux | uy), x >> (uy & 31), ux >> (uy & 31)),
            *(ux << (uy & 31), bin(ux).count("1")),
        ]
        assert out[:, t].tolist() == [value & mask for value in expected], t


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
def test_signed_division_goes_towards_zero(dtype: type) -> None:
    """Also of the smallest value, whose magnitude has no signed counterpart."""
    limits = np.iinfo(dtype)
    values = [int(limits.min), int(limits.min) + 1, -7, -1, 0, 1, 7, int(limits.max)]
    pairs = [(a, b) for a in values for b in values if b and (a, b) != (limits.min, -1)]
    a, b = (np.array(each, dtype) for each in zip(*pairs, strict=True))
    quotients = [abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) for x, y in pairs]
    assert arithmetic.divide(a, b).tolist() == quotients
    assert arithmetic.remainder(a, b).tolist() == [x - q * y for (x, y), q in zip(pairs, quotients, strict=True)]


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 200])
def test_shifts_past_the_width_give_zero_or_the_sign(count: int) -> None:
    value = np.full(32, 0x80000001, np.uint32)
    counts = np.full(32, count, np.uint32)
    assert arithmetic.shift_left(value, counts)[0] == (0x80000001 << count) & 0xFFFFFFFF
    assert arithmetic.shift_right(value, counts)[0] == 0x80000001 >> count
    assert arithmetic.shift_right(value.view(np.int32), counts)[0] == np.int32(-0x7FFFFFFF) >> min(count, 31)


@pytest.mark.parametrize(("position", "length"), [(0, 8), (29, 3), (4, 0), (8, 32), (32, 4), (31, 5)])
def test_bit_insert_matches_the_isa(position: int, length: int) -> None:
    a, b = 0xDEADBEEF, 0x12345678
    expected = b
    for bit in range(min(length, 32 - position) if position < 32 else 0):
        expected = expected & ~(1 << (position + bit)) | (a >> bit & 1) << (position + bit)
    lanes = [np.full(32, value, np.uint32) for value in (a, b, position, length)]
    assert bits.bit_insert(*lanes)[0] == expected


def test_float_instructions_match(launch: Launch, array: Make) -> None:
    source = """
    extern "C" __global__ void kernel_test(float* out, u32* bits, const float* a, const float* b) {
        const u32 t = threadIdx.x;
        const float x = a[t], y = b[t];
        out[t] = __fadd_rn(x, y); out[32 + t] = __fmul_rn(x, y); out[64 + t] = div_rn(x, y); out[96 + t] = sqrt_rn(x);
        out[128 + t] = ex2_approx(x); out[160 + t] = rcp_approx(x); out[192 + t] = tanh_approx(x);
        bits[t] = cvt_rn_bf16x2(x, y); bits[32 + t] = x < y; bits[64 + t] = !(x < y); bits[96 + t] = x != y;
        bits[128 + t] = (u32)(i32)(y * 100.0f); out[224 + t] = (float)(i32)bits[t]; out[256 + t] = (float)bits[t];
    }"""
    a, b = array(np.tile(FLOATS, 2)), array(np.repeat(FLOATS, 2))
    out, bits = array(np.zeros((9, 32)), np.float32), array(np.zeros((5, 32)), np.uint32)
    launch(source, out, bits, a, b)
    with np.errstate(all="ignore"):
        wide = a.astype(np.float64)
        expected = [a + b, a * b, a / b, np.sqrt(a), np.exp2(wide), np.float32(1) / a, np.tanh(wide)]
    for row, value in zip(out, expected, strict=False):
        np.testing.assert_array_equal(row, value.astype(np.float32))
    packed = arithmetic.bf16_bits(a).astype(np.int64) << 16 | arithmetic.bf16_bits(b)
    assert bits[0].tolist() == packed.tolist()
    for row, value in zip(bits[1:4], (a < b, ~(a < b), a != b), strict=True):
        assert row.astype(bool).tolist() == value.tolist()
    with np.errstate(all="ignore"):
        truncated = [0 if np.isnan(v) else int(np.clip(np.trunc(float(v)), -(2**31), 2**31 - 1)) for v in b * 100]
    assert bits[4].view(np.int32).tolist() == truncated
    np.testing.assert_array_equal(out[7], bits[0].view(np.int32).astype(np.float32))
    np.testing.assert_array_equal(out[8], bits[0].astype(np.float32))


def test_ftz_flushes_inputs_and_results() -> None:
    values = np.array([1e-40, -1e-40, 1.0, np.nan], np.float32)
    flushed = arithmetic.flush_f32(values)
    assert flushed.view(np.uint32)[:3].tolist() == [0, 0x80000000, 0x3F800000]
    assert np.isnan(flushed[3])


@pytest.mark.parametrize(
    ("mode", "b", "c", "expected"),
    [
        ("bfly", 5, 31, lambda lane: lane ^ 5),
        ("idx", 3, 31, lambda lane: 3),
        ("up", 4, 0, lambda lane: lane - 4 if lane >= 4 else lane),
        ("down", 4, 31, lambda lane: lane + 4 if lane + 4 < 32 else lane),
        # segments of 8 lanes: bits 8 to 12 of c hold the segment mask 0x18
        ("idx", 1, 0x1807 | 0x1F, lambda lane: (lane & 24) | 1),
    ],
)
def test_shuffle_takes_the_lane_that_the_isa_names(mode: str, b: int, c: int, expected: Any) -> None:
    lanes = np.arange(32, dtype=np.uint32)
    values, _ = arithmetic.shuffle(mode, lanes, np.full(32, b, np.uint32), np.full(32, c, np.uint32))
    assert values.tolist() == [expected(lane) for lane in range(32)]
