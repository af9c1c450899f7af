"""The model of wgmma's sum against a direct reading of its description, and NaN and infinity."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from cakegen.emulator.units.tensor_core import bf16_to_f32, multiply_add_hopper, multiply_add_wide

# a run silences numpy; here the functions are called alone
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def random_bf16(make: np.random.Generator, *shape: int) -> np.ndarray:
    """Exponents far apart, so that alignment loses bits."""
    values = make.standard_normal(shape) * 2.0 ** make.integers(-12, 12, shape)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def exponent(value: float) -> int:
    return math.frexp(value)[1] - 1 if value else -126


def described(a: np.ndarray, b: np.ndarray, c: float) -> np.float32:
    """Align to the largest exponent, truncate at 25 fractional bits, add exactly, truncate to fp32."""
    terms = [Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a, b, strict=True)] + [Fraction(float(c))]
    exponents = [exponent(float(x)) + exponent(float(y)) for x, y in zip(a, b, strict=True)] + [exponent(float(c))]
    unit = Fraction(2) ** (max(exponents) - 25)
    total = sum(math.trunc(term / unit) for term in terms) * unit
    if total == 0:
        return np.float32(0)
    ulp = Fraction(2) ** (math.floor(math.log2(abs(total))) - 23)
    return np.float32(float(math.trunc(total / ulp) * ulp))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_model_is_what_its_description_says(seed: int) -> None:
    make = np.random.default_rng(seed)
    a, b = random_bf16(make, 16, 16), random_bf16(make, 8, 16)
    c = (make.standard_normal((16, 8)) * 2.0 ** make.integers(-8, 12, (16, 8))).astype(np.float32)
    got = multiply_add_hopper(a, b, c)
    for m in range(16):
        for n in range(8):
            expected = described(bf16_to_f32(a[m]), bf16_to_f32(b[n]), c[m, n])
            assert got[m, n] == expected, (m, n)


@pytest.mark.parametrize("seed", [0, 1])
def test_f16_operands_follow_the_same_model(seed: int) -> None:
    make = np.random.default_rng(seed)
    a, b = (
        (make.standard_normal((rows, 16)) * 2.0 ** make.integers(-6, 7, (rows, 16))).astype(np.float16)
        for rows in (16, 8)
    )
    a[0], b[0, 3] = 0, 0
    c = (make.standard_normal((16, 8)) * 2.0 ** make.integers(-8, 12, (16, 8))).astype(np.float32)
    got = multiply_add_hopper(a.astype(np.float32), b.astype(np.float32), c)
    for m in range(1, 16):
        for n in range(8):
            assert got[m, n] == described(a[m], b[n], c[m, n]), (m, n)
    assert (got[0] == c[0]).all()


def test_model_differs_from_a_wide_sum_and_never_grows() -> None:
    """A model that were exact would make the comparison with a device worthless."""
    make = np.random.default_rng(3)
    a, b = random_bf16(make, 16, 16), random_bf16(make, 64, 16)
    c = np.zeros((16, 64), np.float32)
    hopper, wide = multiply_add_hopper(a, b, c), multiply_add_wide(a, b, c)
    assert (hopper != wide).any()
    np.testing.assert_allclose(hopper, wide, rtol=1e-4, atol=2.0**-10)


def test_nan_and_infinity_stay_in_their_row_and_column() -> None:
    one = np.full((16, 16), 0x3F80, np.uint16)
    a, b = one.copy(), one[:8].copy()
    a[3, 5] = 0x7F80  # infinity
    a[4, 0] = 0x7FC0  # NaN
    b[2, 5] = 0x0000
    got = multiply_add_hopper(a, b, np.zeros((16, 8), np.float32))
    assert np.isnan(got[4]).all()
    assert got.view(np.uint32)[4, 0] == 0x7FFFFFFF
    assert np.isnan(got[3, 2])
    assert np.isinf(np.delete(got[3], 2)).all()
    assert (np.delete(got, (3, 4), axis=0)[:, [0, 1, 3, 4, 5, 6, 7]] == 16).all()


@pytest.mark.parametrize("spread", [0, 6, 18])
def test_fast_path_is_the_model_bit_for_bit(spread: int) -> None:
    """Exponents within its limit, zeros among them; and one beyond it, which takes the general path."""
    make = np.random.default_rng(spread)

    def draw(rows: int) -> np.ndarray:
        exponents = make.integers(-spread, spread + 1, (rows, 16))
        values = (
            make.uniform(1, 2, (rows, 16)) * 2.0**exponents * make.choice([-1, 0, 1], (rows, 16), p=[0.4, 0.2, 0.4])
        )
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    a, b = draw(64), draw(40)
    c = (make.standard_normal((64, 40)) * 2.0 ** make.integers(-30, 30, (64, 40))).astype(np.float32)
    c[::3, ::5] = 0
    a[5], c[5] = 0, 0
    a[7], c[7] = 0, np.float32(1.2345) * np.float32(2) ** np.arange(-37, 3, dtype=np.float32)
    with pytest.MonkeyPatch.context() as patch:
        fast = multiply_add_hopper(a, b, c)
        patch.setattr("cakegen.emulator.units.tensor_core._is_narrow", lambda *_: False)
        slow = multiply_add_hopper(a, b, c)
    np.testing.assert_array_equal(fast, slow)
    assert (fast[5] == 0).all()
    assert (fast[7] == c[7]).all(), "products of zero cost an accumulator nothing"
