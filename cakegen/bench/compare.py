"""Leaf module: what several rows say together, and what changed between two runs. Imports errors, records and stats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cakegen.bench.records import RowRecord
from cakegen.bench.rows import Row
from cakegen.bench.stats import geometric_mean

CLIFF = 1.05
"""No T may be slower than this times the next larger one."""
LEAST_CHANGE = 0.01
"""Changes below 1 % are not told apart from noise."""


@dataclass(frozen=True)
class Change:
    """One row in two runs; a time is None where a run lacks it.

    `ratio` is after / before; `beyond_noise` says that it is further from 1 than both runs' noise and 1 %.
    """

    row: Row
    before_us: float | None
    after_us: float | None
    ratio: float | None
    beyond_noise: bool


def compare_rows(before: Iterable[RowRecord], after: Iterable[RowRecord]) -> tuple[Change, ...]:
    """Changes by row, in the order of the later run; rows that only the earlier run has stand last."""
    earlier = {record.row: record for record in before}
    later = {record.row: record for record in after}
    return tuple(_change(row, earlier.get(row), later.get(row)) for row in dict.fromkeys((*later, *earlier)))


def _change(row: Row, before: RowRecord | None, after: RowRecord | None) -> Change:
    before_us = before.ours_us if before else None
    after_us = after.ours_us if after else None
    if not before or not after or not before_us or not after_us:
        return Change(row, before_us, after_us, None, False)
    ratio = after_us / before_us
    noise = max(LEAST_CHANGE, before.noise or 0.0, after.noise or 0.0)
    return Change(row, before_us, after_us, ratio, abs(ratio - 1) > noise)


@dataclass(frozen=True)
class Cliff:
    """A row that is slower than the next larger T of its stage and TP degree."""

    row: Row
    next_tokens: int
    ratio: float


def find_cliffs(records: Sequence[RowRecord]) -> tuple[Cliff, ...]:
    """Rows slower than `CLIFF` times the next larger T."""
    timed = sorted((r for r in records if r.ours_us), key=lambda r: (r.stage, r.tp, r.tokens))
    cliffs = []
    for this, larger in pairwise(timed):
        if (this.stage, this.tp) == (larger.stage, larger.tp) and this.ours_us and larger.ours_us:
            ratio = this.ours_us / larger.ours_us
            if ratio > CLIFF:
                cliffs.append(Cliff(this.row, larger.tokens, ratio))
    return tuple(cliffs)


@dataclass(frozen=True)
class Mean:
    """Geometric means over some rows: rival / ours, ours / limit; and how many rows win, of how many compared."""

    name: str
    ratio: float | None
    limit_ratio: float | None
    wins: int
    compared: int


def means_of(records: Sequence[RowRecord], decode_max_tokens: int) -> tuple[Mean, ...]:
    """Means of each stage and TP degree, of decode, of prefill, and of all rows."""
    groups: dict[str, list[RowRecord]] = {}
    for record in records:
        groups.setdefault(f"{record.stage} TP {record.tp}", []).append(record)
    groups["decode"] = [r for r in records if r.tokens <= decode_max_tokens]
    groups["prefill"] = [r for r in records if r.tokens > decode_max_tokens]
    groups["all"] = list(records)
    return tuple(_mean(name, group) for name, group in groups.items() if group)


def _mean(name: str, records: Sequence[RowRecord]) -> Mean:
    ratios = [record.ratio for record in records if record.ratio]
    limits = [record.limit_ratio for record in records if record.limit_ratio]
    return Mean(name, geometric_mean(ratios), geometric_mean(limits), sum(ratio >= 1 for ratio in ratios), len(ratios))
