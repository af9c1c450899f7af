"""A clock that rehearses the measuring loop without a GPU, a probe that streams nothing, and recorded rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from support.models import kimi_k3_model

from cakegen.bench.arms import Arm
from cakegen.bench.records import RowRecord, row_record
from cakegen.bench.rows import Row, work_of
from cakegen.bench.stats import Summary
from cakegen.bench.stream_probe import BOX_SHAPES

L2_BYTES = 60 * 2**20


class FakeClock:
    """Runs calls where they are enqueued and answers with scripted times.

    `script` gives the microseconds of a call; by default the n-th timed call takes n. `events` is what happened.
    """

    def __init__(self, script: Callable[[Any, int], float] | None = None, l2_bytes: int = L2_BYTES) -> None:
        self.l2_bytes = l2_bytes
        self.events: list[Any] = []
        self._script = script or (lambda call, number: float(number))
        self._times: list[float] = []
        self._number = 0

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        call()
        return call

    def hold(self, microseconds: float) -> None:
        self.events.append(("hold", microseconds))

    def flush(self) -> None:
        self.events.append("flush")

    def flush_dirty(self) -> None:
        self.events.append("dirty")

    def timed(self, call: Callable[[], object]) -> None:
        call()
        self._number += 1
        self.events.append(call)
        self._times.append(self._script(call, self._number))

    def settle(self) -> list[float]:
        times, self._times = self._times, []
        return times


class FakeProbe:
    """The stream probe's arms, which note what they were asked to stream."""

    def __init__(self) -> None:
        self.streamed: list[list[tuple[int, ...]]] = []

    def arm(self, shape: object, matrices: Sequence[torch.Tensor]) -> Arm:
        self.streamed.append([tuple(matrix.shape) for matrix in matrices])
        return Arm(lambda: None, {})

    def arms(self, matrices: Sequence[torch.Tensor]) -> dict[str, Arm]:
        return {shape.name: self.arm(shape, matrices) for shape in BOX_SHAPES}

    def floor(self, matrix: torch.Tensor) -> Arm:
        return Arm(lambda: None, {})


def summary(median_us: float, spread: float = 0.01) -> Summary:
    return Summary(median_us, median_us * 0.99, spread, 41)


def recorded_row(
    stage: str = "front",
    tp: int = 1,
    tokens: int = 1,
    ours_us: float = 60.0,
    rival_us: float = 66.0,
    limit_us: float = 58.5,
) -> RowRecord:
    """A timed row of the published model."""
    row = Row(stage, tp, tokens)
    arms = {
        "ours": summary(ours_us),
        "ours again": summary(ours_us * 1.005),
        "rival separate": summary(rival_us + 1),
        "rival joined": summary(rival_us),
        "stream 128x128": summary(limit_us),
        "stream 64x64": summary(limit_us + 2),
        "floor": summary(3.2),
    }
    work = work_of(kimi_k3_model().dims, row)
    rotations = {"ours": summary(ours_us - 0.3), "rival joined": summary(rival_us - 0.3)}
    return row_record(row, work, arms, keys=("decode:x",), rotations=rotations)
