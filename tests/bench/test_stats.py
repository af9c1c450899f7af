"""Medians, spreads and means."""

from __future__ import annotations

import random

import pytest

from cakegen.bench.stats import geometric_mean, summarise
from cakegen.errors import BenchError


def test_summary_of_a_hundred_and_one_steps() -> None:
    samples = [100.0 + step for step in range(101)]
    random.Random(0).shuffle(samples)
    found = summarise(samples)
    assert (found.median_us, found.min_us, found.count) == (150.0, 100.0, 101)
    assert found.spread == pytest.approx((190 - 110) / 150)


def test_one_outlier_moves_neither_median_nor_spread() -> None:
    found = summarise([10.0] * 20 + [1000.0])
    assert (found.median_us, found.spread) == (10.0, 0.0)


def test_median_of_an_even_number_lies_between() -> None:
    assert summarise([1.0, 2.0, 3.0, 10.0]).median_us == 2.5


@pytest.mark.parametrize("samples", [[], [1.0, 0.0], [1.0, -2.0], [float("nan")], [float("inf")]])
def test_impossible_timings_are_refused(samples: list[float]) -> None:
    with pytest.raises(BenchError, match="positive microseconds"):
        summarise(samples)


def test_geometric_mean_of_ratios() -> None:
    assert geometric_mean([2.0, 0.5, 4.0]) == pytest.approx(4.0 ** (1 / 3))
    assert geometric_mean([]) is None
