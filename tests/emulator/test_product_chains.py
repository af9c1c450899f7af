"""Chains of products: with machine code and without, against one product at a time and the description."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest

from cakegen.emulator.units import product_chains
from cakegen.emulator.units.product_chains import MultiplyAdd, add_products, has_compiler, kernel_of
from cakegen.emulator.units.tensor_core import bf16_to_f32, multiply_add_hopper, multiply_add_wide

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
PRODUCTS = 6
FRESH = np.array([False, False, True, False, False, True])


@dataclass(frozen=True, eq=False)
class Operands:
    """`[products, rows, 16]` indices of a and b in `elements`."""

    elements: np.ndarray
    a: np.ndarray
    b: np.ndarray
    sums: np.ndarray


def draw(n: int, spread: int, seed: int = 0) -> Operands:
    """bf16 of exponents up to a spread and zeros, at shuffled places; sums of exponents up to 30."""
    make = np.random.default_rng(1000 * n + spread + seed)
    shape = (PRODUCTS * (16 + n), 16)
    values = make.uniform(1, 2, shape) * 2.0 ** make.integers(-spread, spread + 1, shape)
    values *= make.choice([-1, 0, 1], shape, p=[0.4, 0.2, 0.4])
    elements = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).ravel()
    places = make.permutation(elements.size)
    a, b = places[: PRODUCTS * 256].reshape(PRODUCTS, 16, 16), places[PRODUCTS * 256 :].reshape(PRODUCTS, n, 16)
    sums = (make.standard_normal((16, n)) * 2.0 ** make.integers(-30, 30, (16, n))).astype(np.float32)
    sums[::3, ::5] = 0
    return Operands(elements, a, b, sums)


def one_at_a_time(multiply_add: MultiplyAdd, operands: Operands) -> np.ndarray:
    sums = operands.sums
    for product in range(PRODUCTS):
        before = np.zeros_like(sums) if FRESH[product] else sums
        sums = multiply_add(operands.elements[operands.a[product]], operands.elements[operands.b[product]], before)
    return sums


@pytest.fixture(params=["numpy", "llvm"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether machine code runs, from the first product on."""
    if request.param == "llvm" and not has_compiler():
        pytest.skip("llvmlite compiles the chains")
    enough = 0 if request.param == "llvm" else 1 << 62
    kernels = {each: (name, enough) for each, (name, _) in product_chains._KERNELS.items()}
    monkeypatch.setattr(product_chains, "_KERNELS", kernels)
    return request.param == "llvm"


@pytest.mark.parametrize("multiply_add", [multiply_add_hopper, multiply_add_wide])
@pytest.mark.parametrize(("n", "spread"), [(8, 0), (8, 18), (40, 6), (256, 3), (8, 30)])
def test_chain_has_the_bits_of_its_products(multiply_add: MultiplyAdd, n: int, spread: int, compiled: bool) -> None:
    operands = draw(n, spread)
    expected = one_at_a_time(multiply_add, operands)
    got = operands.sums.copy()
    # as a schedule may do it: some at once, the others later
    for span in ((0, 2), (2, 3), (3, PRODUCTS)):
        got = add_products(multiply_add, operands.elements, operands, FRESH, span, got)
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def test_chain_is_the_description(compiled: bool) -> None:
    """Each term cut at 25 fractional bits of the largest exponent, the sum exact, and cut to fp32."""
    operands = draw(8, 12, seed=7)
    got = add_products(
        multiply_add_hopper, operands.elements, operands, np.zeros(1, np.bool_), (0, 1), operands.sums.copy()
    )
    a, b = (bf16_to_f32(operands.elements[at[0]]) for at in (operands.a, operands.b))
    for m in range(16):
        for n in range(8):
            terms = [Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a[m], b[n], strict=True) if x and y]
            exponents = [
                np.frexp(float(x))[1] + np.frexp(float(y))[1] - 2 for x, y in zip(a[m], b[n], strict=True) if x and y
            ]
            c = float(operands.sums[m, n])
            unit = Fraction(2) ** int(max(*exponents, np.frexp(c)[1] - 1 if c else -126) - 25)
            total = sum(int(term / unit) for term in (*terms, Fraction(c))) * unit
            assert abs(Fraction(float(got[m, n]))) <= abs(total)
            assert np.nextafter(got[m, n], np.float32(np.inf if total > 0 else -np.inf)) != got[m, n]
            ulp = Fraction(float(np.spacing(np.abs(got[m, n]))))
            assert abs(total - Fraction(float(got[m, n]))) < ulp


def test_kernel_stops_at_a_product_that_it_can_not_do() -> None:
    kernel = kernel_of(multiply_add_hopper)
    if kernel is None:
        pytest.skip("llvmlite compiles the chains")
    operands = draw(8, 3)
    operands.elements[operands.a[2, 5, 1]] = 0x7F80  # infinity
    operands.elements[operands.b[4, 7, 0]] = 0x0001  # subnormal
    assert kernel(operands.elements, operands.a, operands.b, FRESH, 0, PRODUCTS, operands.sums.copy()) == 2
    assert kernel(operands.elements, operands.a, operands.b, FRESH, 3, PRODUCTS, operands.sums.copy()) == 4


def test_machine_code_comes_only_when_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[MultiplyAdd] = []
    monkeypatch.setattr(product_chains, "kernel_of", asked.append)
    monkeypatch.setattr(
        product_chains,
        "_KERNELS",
        {multiply_add_wide: ("wide", 2 * PRODUCTS * (16 * 8 * 16 + product_chains._OVERHEAD))},
    )
    monkeypatch.setattr(product_chains, "_multiplied", {multiply_add_wide: 0})
    operands = draw(8, 3)
    for _ in range(2):
        assert not asked
        add_products(multiply_add_wide, operands.elements, operands, FRESH, (0, PRODUCTS), operands.sums)
    assert asked == [multiply_add_wide]


def test_kernel_does_small_factors_and_sums_and_stops_below_them() -> None:
    kernel = kernel_of(multiply_add_hopper)
    if kernel is None:
        pytest.skip("llvmlite compiles the chains")
    operands = draw(8, 3)
    never = np.zeros(PRODUCTS, np.bool_)
    operands.elements[operands.a[0, 5, 1]] = operands.elements[operands.b[0, 2, 1]] = (127 - 40) << 7
    operands.elements[operands.a[1, 5, 1]] = (127 - 41) << 7
    assert kernel(operands.elements, operands.a, operands.b, never, 0, PRODUCTS, operands.sums.copy()) == 1
    operands.elements[operands.a[1, 5, 1]] = (127 + 20) << 7
    operands.elements[operands.b[3, 5, 1]] = (127 + 21) << 7
    sums = operands.sums.copy()
    sums[2, 3], sums[4, 5] = 2.0**-80, 2.0**40
    assert kernel(operands.elements, operands.a, operands.b, never, 0, PRODUCTS, sums) == 3
    sums[2, 3] = 2.0**-81
    assert kernel(operands.elements, operands.a, operands.b, never, 0, PRODUCTS, sums) == 0


@pytest.mark.parametrize("low", [-40, -30])
def test_chain_of_small_factors_has_the_bits_of_its_products(low: int, compiled: bool) -> None:
    operands = draw(8, 3)
    make = np.random.default_rng(-low)
    values = make.uniform(1, 2, operands.elements.size) * 2.0 ** make.integers(low, low + 8, operands.elements.size)
    operands.elements[:] = values.astype(np.float32).view(np.uint32) >> 16
    operands.sums[:] *= np.float32(2.0 ** (2 * low + 30))
    expected = one_at_a_time(multiply_add_hopper, operands)
    got = add_products(multiply_add_hopper, operands.elements, operands, FRESH, (0, PRODUCTS), operands.sums.copy())
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
