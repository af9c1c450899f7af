"""A case under both extreme schedules and one seed, for tests of the emulator."""

from __future__ import annotations

import torch

from cakegen.emulator import Options
from cakegen.emulator.launches.cases import Case, emulate_case
from cakegen.registry import Registry


def same_under_all_schedules(registry: Registry, case: Case, arithmetic: str = "wide", seed: int = 0) -> None:
    """Outputs are within the contract, and have the same bits each time."""
    schedules = (("early", 0), ("late", 0), ("random", seed))
    reports = [emulate_case(registry, case, Options(*each, arithmetic)) for each in schedules]
    assert [report.problems for report in reports] == [()] * len(reports)
    for report in reports[1:]:
        for name, value in report.outputs.items():
            assert torch.equal(value, reports[0].outputs[name]), f"{name} depends on the schedule"
