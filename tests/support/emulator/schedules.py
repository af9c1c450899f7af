"""Which schedules a test of the emulator runs: a case under both extremes and one seed, a planted fault under one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from cakegen.emulator import Options
from cakegen.emulator.launches.cases import Case, emulate_case
from cakegen.registry import Registry


def same_under_all_schedules(
    registry: Registry,
    case: Case,
    arithmetic: str = "wide",
    extremes: Sequence[str] = ("early", "late"),
    seed: int = 0,
) -> None:
    """Outputs are within the contract, and have the same bits each time."""
    schedules = (*((extreme, 0) for extreme in extremes), ("random", seed))
    reports = [emulate_case(registry, case, Options(*each, arithmetic)) for each in schedules]
    assert [report.problems for report in reports] == [()] * len(reports)
    for report in reports[1:]:
        for name, value in report.outputs.items():
            assert torch.equal(value, reports[0].outputs[name]), f"{name} depends on the schedule"


def proof_and_others(name: str, schedules: Sequence[Any]) -> Iterator[Any]:
    """A planted fault with each of its schedules: the first proves that it is caught, the others are `thorough`."""
    yield pytest.param(name, schedules[0])
    for schedule in schedules[1:]:
        yield pytest.param(name, schedule, marks=pytest.mark.thorough)


def spelled(value: object) -> str:
    """Part of a test's name, without blanks."""
    words = "-".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return words.replace(" ", "_")
