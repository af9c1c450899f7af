"""The sweep's tables: what is known is not run again, a kill loses no row, schedules may run apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from support.emulator import sweep as emulator_sweep
from support.emulator.sweep import COLUMNS, Sweep, cases_of, identity, read_rows, rows_of, run_missing, run_split

from cakegen.emulator.launches.cases import Case, CaseReport
from cakegen.registry import Registry

Schedules = Sequence[tuple[str, int]]
Outcome = tuple[str, CaseReport | None]
SWEEP = Sweep("tiny_latent_moe", "sm_100a", 1, False)
NAMES = ["early:0", "late:0", "random:0"]

pytestmark = pytest.mark.emulator


@pytest.fixture
def runs(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The schedules that were run; each run of one key is clean and gives one bit pattern."""
    seen: list[str] = []
    key = emulator_sweep.program_keys(registry, SWEEP.arch)[0]
    monkeypatch.setattr(emulator_sweep, "program_keys", lambda registry, arch, match="": [key])
    monkeypatch.setattr(emulator_sweep, "run_case", recorder(seen, lambda name: 1.0))
    return seen


def recorder(seen: list[str], value_of: Callable[[str], float]) -> Callable[[Registry, Case, Schedules], Outcome]:
    def run_case(registry: Registry, case: Case, schedules: Schedules) -> Outcome:
        names = [f"{name}:{seed}" for name, seed in schedules]
        seen.extend(names)
        return "clean", CaseReport((), {"out": 0.5}, (), {"out": torch.full((2, 3), value_of(names[0]))})

    return run_case


def test_sweep_leaves_out_what_is_known_and_reports_what_is_wrong(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulator_sweep, "run_case", lambda registry, case, schedules: ("late 0: race", None))
    (row,) = rows_of([SWEEP], set())
    assert (row["verdict"], row["schedules"]) == ("late 0: race", " ".join(NAMES))
    assert list(rows_of([SWEEP], {identity(row)})) == []


def test_row_that_is_not_clean_is_run_again_and_replaced(
    tmp_path: Path, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "t.tsv"
    with monkeypatch.context() as patch:
        patch.setattr(emulator_sweep, "run_case", lambda registry, case, schedules: ("late 0: race", None))
        run_missing(table, [SWEEP], 1, COLUMNS)
    run_missing(table, [SWEEP], 1, COLUMNS)
    assert [row["verdict"] for row in read_rows(table)] == ["clean"]
    run_missing(table, [SWEEP], 1, COLUMNS)
    assert runs == NAMES, "once, since it is known then"


def test_row_of_schedules_that_ran_apart_is_that_of_one_run(tmp_path: Path, runs: list[str]) -> None:
    run_split(tmp_path / "apart.tsv", SWEEP, 1)
    run_missing(tmp_path / "whole.tsv", [SWEEP], 1, COLUMNS)
    apart, whole = (read_rows(tmp_path / name) for name in ("apart.tsv", "whole.tsv"))
    assert [{**row, "seconds": ""} for row in apart] == [{**row, "seconds": ""} for row in whole]
    run_split(tmp_path / "apart.tsv", SWEEP, 1)
    assert runs == [*NAMES, *NAMES]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["apart.tsv", "whole.tsv"]


def test_split_sweep_goes_on_where_it_was_killed(
    tmp_path: Path, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(name: str) -> float:
        if name == NAMES[2]:
            raise KeyboardInterrupt
        return 1.0

    table = tmp_path / "t.tsv"
    with monkeypatch.context() as patch:
        patch.setattr(emulator_sweep, "run_case", recorder([], killed))
        with pytest.raises(KeyboardInterrupt):
            run_split(table, SWEEP, 1)
    assert not table.exists()
    run_split(table, SWEEP, 1)
    assert runs == [NAMES[2]]
    assert [(row["verdict"], row["schedules"]) for row in read_rows(table)] == [("clean", " ".join(NAMES))]


def test_schedule_with_other_bits_is_reported(tmp_path: Path, runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator_sweep, "run_case", recorder([], lambda name: 2.0 if name == "late:0" else 1.0))
    (row,) = run_split(tmp_path / "t.tsv", SWEEP, 1)
    assert row["verdict"] == "late:0: other bits"


def test_edges_of_blackwell_prefill_are_the_ends_of_row_tiles(registry: Registry) -> None:
    """One request an end that reaches the key, with SM counts, ranks and partials in turn."""
    sweep = Sweep("tiny_latent_moe", "sm_100a", 1, True, "tail_gemm:tp4e1f0t1$")
    ((key, (found, *edges)),) = cases_of(registry, sweep).items()
    tokens = [case.tokens for case in edges]
    assert tokens == sorted(set(tokens))
    assert {129, 256, 257, 385, 512, 513} <= set(tokens)
    assert {case.partials for case in edges} == {1, 2, 3}
    assert {case.rank for case in edges} == {0, 1, 2, 3}
    assert len({case.sm_count for case in edges}) > 2
    assert found not in edges
    for case in edges:
        assert key in [launch.key for launch in case.plan(registry.model).launches]


def test_parts_are_all_sm_counts_that_reach_a_key(registry: Registry) -> None:
    sweep = Sweep("tiny_latent_moe", "sm_100a", 0, False, "tail_gemm:tp8", parts=True)
    counts = {key: [case.sm_count for case in cases] for key, cases in cases_of(registry, sweep).items()}
    # narrow tiles at 512 tokens: 8 items are one wave from 16 SMs on
    assert counts["tail_gemm:tp8e0f0s9n128"] == [3, 6, 8, 10]
    assert counts["tail_gemm:tp8e1f0s9n128"] == [148, 152]
