"""Leaf module: what is reported of many timings. Imports errors only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cakegen.errors import BenchError


@dataclass(frozen=True)
class Summary:
    """Timings of one arm in one row.

    Parameters
    ----------
    median_us, min_us
        Microseconds of a call.
    spread
        (90th - 10th percentile) / median: how far apart four fifths of the calls lie.
    count
        Timed calls.
    """

    median_us: float
    min_us: float
    spread: float
    count: int


def summarise(samples_us: Sequence[float]) -> Summary:
    """Median, minimum and spread of timings in microseconds.

    Raises
    ------
    BenchError
        There is none, or one is not a positive number: the clock or the graph is broken.
    """
    if not samples_us or not all(sample > 0 and math.isfinite(sample) for sample in samples_us):
        raise BenchError(f"timings must be positive microseconds, at least one; got {list(samples_us)[:8]}")
    ordered = sorted(samples_us)
    median = _quantile(ordered, 0.5)
    spread = (_quantile(ordered, 0.9) - _quantile(ordered, 0.1)) / median
    return Summary(median, ordered[0], spread, len(ordered))


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    """Linear between the two nearest ranks."""
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean of positive numbers; None of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None
