"""Operands that tell models of wgmma's sum apart, and the models: `judge` compares them with what a device gave.

All of it is whole-number arithmetic on numpy's raw random bits, so that two machines make the same operands.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

K = 16
ROWS = 64


@dataclass(frozen=True, eq=False)
class SumCase:
    """`d [B, 64, n] = c + a [B, 64, k] b [B, n, k]^T`: bf16 bits in u16, and fp32."""

    name: str
    a: np.ndarray
    b: np.ndarray
    c: np.ndarray


def bits_of(values: np.ndarray) -> np.ndarray:
    """fp64 -> bf16 bits, cut."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def values_of(bits: np.ndarray) -> np.ndarray:
    """bf16 bits -> fp64."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


class Draw:
    """Random numbers made of a generator's raw bits."""

    def __init__(self, seed: int) -> None:
        self._source = np.random.PCG64(seed)

    def integers(self, low: int, high: int, *shape: int) -> np.ndarray:
        """Whole numbers from `low` to `high - 1`."""
        raw = np.asarray(self._source.random_raw(int(np.prod(shape))), np.uint64)
        return (low + ((raw >> np.uint64(11)) % np.uint64(high - low)).astype(np.int64)).reshape(shape)

    def bf16(self, low: int, high: int, *shape: int) -> np.ndarray:
        """bf16 bits of random sign and mantissa, exponents from 2^low to 2^(high - 1)."""
        fields = self.integers(low + 127, high + 127, *shape) << 7 | self.integers(0, 128, *shape)
        return (fields | self.integers(0, 2, *shape) << 15).astype(np.uint16)

    def fp32(self, low: int, high: int, *shape: int) -> np.ndarray:
        """fp32 likewise."""
        fields = self.integers(low + 127, high + 127, *shape) << 23 | self.integers(0, 1 << 23, *shape)
        return (fields | self.integers(0, 2, *shape) << 31).astype(np.uint32).view(np.float32)

    def normal(self, *shape: int) -> np.ndarray:
        """fp64, a sum of four uniform numbers: mean 0, variance 1."""
        parts = self.integers(0, 1 << 53, *shape)
        total = sum((parts >> shift & 0x1FFF) for shift in (0, 13, 26, 39)) - 4 * 4095.5
        return total / (0x2000 * (4 / 12) ** 0.5)


def sum_cases() -> Iterator[tuple[str, SumCase]]:
    """(kernel of `products.cu`, operands); shapes [B, 64, k], [B, n, k], [B, 64, n]."""
    for seed, (name, kernel, n, k) in enumerate(
        (
            ("normal", "add_64_1", 64, 16),
            ("normal_c", "add_64_1", 64, 16),
            ("normal n8", "add_8_1", 8, 16),
            ("normal n256", "add_256_1", 256, 16),
            ("normal k64", "add_64_4", 64, 64),
        )
    ):
        draw = Draw(100 + seed)
        a, b = bits_of(draw.normal(1, ROWS, k)), bits_of(draw.normal(1, n, k))
        c = draw.normal(1, ROWS, n) * (0 if name == "normal" else 4)
        yield kernel, SumCase(name, a, b, c.astype(np.float32))
    for name, case in _ranges().items():
        yield "add_64_1", SumCase(name, *case)
    yield "add_64_1", _cancelling()
    yield "add_64_1", _cancelling_with_c()
    yield "add_64_1", _three_terms()
    yield "add_64_1", _zeros_beside_small()
    yield "add_64_1", _specials()


def _ranges() -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Exponents from ranges: (a and b, c)."""
    ranges = {
        "spread": ((-6, 7), (-12, 13)),
        "wide": ((-20, 21), (-40, 41)),
        "large c": ((-6, 7), (12, 24)),
        "small c": ((-6, 7), (-40, -12)),
        "small products": ((-70, -55), (-126, -120)),
        "subnormal results": ((-75, -62), (-127, -126)),
        "near overflow": ((60, 63), (120, 127)),
        "overflow": ((61, 65), (124, 128)),
    }
    made = {}
    for seed, (name, (products, c)) in enumerate(ranges.items()):
        draw = Draw(200 + seed)
        a, b = draw.bf16(*products, 1, ROWS, K), draw.bf16(*products, 1, 64, K)
        made[name] = a, b, draw.fp32(*c, 1, ROWS, 64)
    draw = Draw(250)
    a = draw.bf16(-127, -126, 1, ROWS, K)  # subnormal: the exponent field is 0
    made["subnormal a"] = a, draw.bf16(100, 127, 1, 64, K), draw.fp32(-30, 1, 1, ROWS, 64)
    return made


def _cancelling() -> SumCase:
    """Pairs of large products that cancel exactly, at shuffled places, among smaller ones."""
    draw = Draw(300)
    a, b = draw.bf16(-4, 5, 2, ROWS, K), draw.bf16(-14, 3, 2, 64, K)
    for batch in range(2):
        order = np.argsort(draw.integers(0, 1 << 40, K), kind="stable")
        for one, other in order[:8].reshape(4, 2):
            a[batch, :, other] = a[batch, :, one]
            b[batch, :, one] = draw.bf16(4, 16, 64)
            b[batch, :, other] = b[batch, :, one] ^ np.uint16(0x8000)
    return SumCase("cancelling", a, b, draw.fp32(-20, 2, 2, ROWS, 64))


def _cancelling_with_c() -> SumCase:
    """c is minus the exact sum of products, cut to fp32 and moved by a few of its last bits."""
    draw = Draw(310)
    a, b = draw.bf16(-5, 6, 1, ROWS, K), draw.bf16(-5, 6, 1, 64, K)
    exact = np.einsum("bmk,bnk->bmn", values_of(a), values_of(b), optimize=False)
    c = -exact.astype(np.float32)
    return SumCase(
        "cancelling with c",
        a,
        b,
        (c.view(np.int32) + draw.integers(-3, 4, 1, ROWS, 64).astype(np.int32)).view(np.float32),
    )


def _three_terms(batches: int = 6) -> SumCase:
    """Products v, -v and v w 2^-x at random places: what is left is the third as it was aligned to the first."""
    draw = Draw(320)
    a = np.repeat(draw.bf16(0, 1, batches, ROWS, 1), K, axis=2)
    b = np.zeros((batches, 64, K), np.uint16)
    for batch, column in itertools.product(range(batches), range(64)):
        one, opposite, small = np.argsort(draw.integers(0, 1 << 40, K), kind="stable")[:3]
        b[batch, column, one], b[batch, column, opposite] = 0x3F80, 0xBF80
        x = int(draw.integers(14, 32, 1)[0])
        b[batch, column, small] = draw.bf16(-x, 1 - x, 1)[0]
    return SumCase("three terms", a, b, np.zeros((batches, ROWS, 64), np.float32))


def _zeros_beside_small() -> SumCase:
    """Products of zero and a huge number beside small ones: whether a zero takes part in the largest exponent."""
    draw = Draw(330)
    a, b = draw.bf16(-50, -45, 1, ROWS, K), draw.bf16(-50, -45, 1, 64, K)
    a[:, :, ::3] = 0
    b[:, :, ::3] = draw.bf16(100, 127, 1, 64, len(range(0, K, 3)))
    c = draw.fp32(-110, -90, 1, ROWS, 64)
    c[:, ::2] = 0
    return SumCase("zeros beside small", a, b, c)


def _specials() -> SumCase:
    """NaN, infinity and signed zeros in a few rows and columns."""
    draw = Draw(340)
    a, b = draw.bf16(-2, 3, 1, ROWS, K), draw.bf16(-2, 3, 1, 64, K)
    c = draw.fp32(-2, 3, 1, ROWS, 64)
    a[0, 1, 3], a[0, 2, 4], a[0, 3, 5], a[0, 4, 6] = 0x7F80, 0xFF80, 0x7FC1, 0xFF81
    b[0, 1, 3], b[0, 2, 4] = 0, 0x7F80
    c[0, 5], c[0, 6], c[0, 7] = np.inf, -np.inf, np.nan
    a[0, 8:12], c[0, 8], c[0, 9] = 0, 0.0, -0.0
    a[0, 10:12], c[0, 10:12] = 0x8000, -0.0
    b[0, 60:] = 0
    return SumCase("specials", a, b, c)


@dataclass(frozen=True)
class SumModel:
    """How a block of products and the accumulator become one fp32.

    Parameters
    ----------
    fraction_bits
        What a term keeps below the largest exponent.
    block
        Products that are added at once; K = 16 in one, or in several after each other.
    cut
        `zero`: aligned terms are cut towards zero; `down`: towards minus infinity.
    rounding
        Of the sum: `zero` or `nearest` even.
    exponent
        Of a product: `added` from those of its factors, or that of its `value`.
    zeros
        Whether a product or an accumulator of zero counts in the largest exponent, with its factors' exponents.
    """

    fraction_bits: int = 25
    block: int = K
    cut: str = "zero"
    rounding: str = "zero"
    exponent: str = "added"
    zeros: bool = False

    def add(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        """`c [m, n] + a [m, k] b [n, k]^T` of finite operands (bits, bits, fp32)."""
        for first in range(0, a.shape[1], self.block):
            c = self._add_block(a[:, first : first + self.block], b[:, first : first + self.block], c)
        return c

    def _add_block(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        terms = np.concatenate((values_of(a)[:, None] * values_of(b)[None], c[:, :, None].astype(np.float64)), axis=2)
        exponents = self._exponents(a, b, c, terms)
        scale = np.exp2((self.fraction_bits - exponents.max(axis=2)).astype(np.float64))[:, :, None]
        aligned = terms * scale
        total = (np.trunc(aligned) if self.cut == "zero" else np.floor(aligned)).sum(axis=2) / scale[:, :, 0]
        nearest = total.astype(np.float32)
        if self.rounding == "nearest":
            return nearest
        beyond = (np.abs(nearest) > np.abs(total)) & (np.abs(total) < 2.0**128)
        return (nearest.view(np.int32) - beyond).astype(np.int32).view(np.float32)

    def _exponents(self, a: np.ndarray, b: np.ndarray, c: np.ndarray, terms: np.ndarray) -> np.ndarray:
        def field(bits: np.ndarray, shift: int) -> np.ndarray:
            return np.maximum(bits.astype(np.int64) >> shift & 0xFF, 1) - 127

        of_c = field(c.view(np.uint32), 23)[:, :, None]
        if self.exponent == "added":
            of_products = field(a, 7)[:, None] + field(b, 7)[None]
        else:
            of_products = np.maximum(np.frexp(terms[:, :, :-1])[1].astype(np.int64) - 1, -252)
        found = np.concatenate((of_products, of_c), axis=2)
        return found if self.zeros else np.where(terms == 0, -300, found)


def candidate_models() -> list[SumModel]:
    """The fitted model first, and what differs from it in one or two respects."""
    models = [SumModel(bits, block) for bits in (25, 23, 24, 26, 27, 40) for block in (16, 8, 4)]
    variants = list(itertools.product(("zero", "down"), ("zero", "nearest"), ("added", "value"), (False, True)))
    models += [SumModel(bits, K, *rest) for bits in (24, 25, 26) for rest in variants]
    return list(dict.fromkeys(models))


def judge(case: SumCase, got: np.ndarray, model: SumModel) -> tuple[int, int]:
    """(elements whose bits are the model's, elements judged): those whose operands and sum are finite."""
    equal = judged = 0
    with np.errstate(all="ignore"):
        for a, b, c, d in zip(case.a, case.b, case.c, got, strict=True):
            rows, cols = np.isfinite(values_of(a)).all(axis=1), np.isfinite(values_of(b)).all(axis=1)
            usual = rows[:, None] & cols[None] & np.isfinite(c)
            sums = np.where(usual, c, np.float32(0))
            clean = np.where(rows[:, None], a, 0).astype(np.uint16), np.where(cols[:, None], b, 0).astype(np.uint16)
            for first in range(0, a.shape[1], K):
                sums = model.add(*(side[:, first : first + K] for side in clean), sums)
            equal += int(((sums.view(np.uint32) == d.view(np.uint32)) & usual).sum())
            judged += int(usual.sum())
    return equal, judged
