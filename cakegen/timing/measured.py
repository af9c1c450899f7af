"""Predictions beside what was measured: errors of rows, and how well plans are put in order."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cakegen.emulator.launches.cases import Case
from cakegen.errors import PlanError, SpecError
from cakegen.plan.records import DecodeForm
from cakegen.registry import Registry
from cakegen.timing.figures import DeviceFigures
from cakegen.timing.predict import Prediction

COLUMNS = ("stage", "tp", "tokens", "measured_us", "predicted_us", "error", "roofline_us", "roofline_error", "bound")


@dataclass(frozen=True)
class MeasuredRow:
    """One row of a file of `cakegen bench`: what was timed, and microseconds.

    Parameters
    ----------
    keys
        That were timed.
    bytes, flops
        That any program of the row reads and computes.
    """

    stage: str
    tp: int
    tokens: int
    microseconds: float
    keys: tuple[str, ...]
    bytes: int
    flops: int

    def case(self, figures: DeviceFigures) -> Case:
        """Its request."""
        return Case(self.stage, self.tp, self.tokens, sm_count=figures.sm_count, arch=figures.arch)

    def roofline_us(self, figures: DeviceFigures) -> float:
        """The longer of bytes at HBM's rate and operations at the tensor cores' rate, and a launch."""
        operations = 2 * figures.product_rate.value * figures.clock.value * figures.sm_count
        return (figures.launch.value + max(self.bytes / figures.memory_rate.value, self.flops / operations)) / 1e3


@dataclass(frozen=True)
class Compared:
    """A row, what was predicted, and what the roofline says, in microseconds."""

    row: MeasuredRow
    predicted_us: float
    bound: str
    roofline_us: float

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted_us / self.row.microseconds - 1

    @property
    def roofline_error(self) -> float:
        """The same of the roofline."""
        return self.roofline_us / self.row.microseconds - 1

    def cells(self) -> tuple[str, ...]:
        """As in `COLUMNS`."""
        row = self.row
        times = f"{row.microseconds:.2f}", f"{self.predicted_us:.2f}", f"{self.error:+.3f}"
        return (
            *(row.stage, str(row.tp), str(row.tokens), *times),
            *(f"{self.roofline_us:.2f}", f"{self.roofline_error:+.3f}", self.bound),
        )


def read_rows(path: Path) -> list[MeasuredRow]:
    """The timed rows of a file of `cakegen bench`.

    Raises
    ------
    SpecError
        It holds none, or is no such file.
    """
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        timed = [each for each in records if each["kind"] == "row" and each["status"] == "timed"]
        rows = [
            MeasuredRow(
                *(each["stage"], each["tp"], each["tokens"], each["ours_us"], tuple(each["keys"])),
                *(each["bytes"], each["flops"]),
            )
            for each in timed
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise SpecError(f"{path}: is no file of `cakegen bench --json` ({type(error).__name__}: {error})") from None
    if not rows:
        raise SpecError(f"{path}: holds no timed row; `cakegen bench` writes such a file")
    return rows


def same_programs(
    registry: Registry, rows: Iterable[MeasuredRow], figures: DeviceFigures, *, decode_only: bool
) -> Iterator[MeasuredRow]:
    """Rows whose request is planned today as it was when it was timed."""
    for row in rows:
        try:
            launches = row.case(figures).plan(registry.model).launches
        except PlanError:
            continue
        is_decode = isinstance(launches[-1].form, DecodeForm)
        if tuple(launch.key for launch in launches) == row.keys and (is_decode or not decode_only):
            yield row


def compare(row: MeasuredRow, prediction: Prediction, figures: DeviceFigures) -> Compared:
    """A row beside its prediction."""
    return Compared(row, prediction.microseconds, prediction.bound, row.roofline_us(figures))


def summary(errors: Sequence[float]) -> str:
    """Median, the error that nine in ten keep below, and the largest, of absolute errors."""
    sizes = sorted(abs(error) for error in errors)
    ninth = sizes[-(-9 * len(sizes) // 10) - 1]
    return f"median {statistics.median(sizes):.1%}, 90 % within {ninth:.1%}, at most {sizes[-1]:.1%}"


def ranked_right(rows: Sequence[Compared], apart: float = 0.08) -> tuple[int, int]:
    """(pairs in the right order, pairs) of rows of one stage and T whose measured times differ by more than `apart`."""
    right = pairs = 0
    for at, first in enumerate(rows):
        for second in rows[:at]:
            if (first.row.stage, first.row.tokens) != (second.row.stage, second.row.tokens):
                continue
            if abs(first.row.microseconds / second.row.microseconds - 1) <= apart:
                continue
            pairs += 1
            measured = first.row.microseconds < second.row.microseconds
            right += measured == (first.predicted_us < second.predicted_us)
    return right, pairs
