"""Plots from recorded rows."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from support.bench.fakes import recorded_row

from cakegen.bench.plots import write_plots
from cakegen.bench.records import RowRecord
from cakegen.errors import BenchError


@pytest.fixture
def rows() -> list[RowRecord]:
    decode = [
        recorded_row(stage, tp, t, 60.0 + t, 66.0) for stage in ("front", "tail") for tp in (1, 8) for t in (1, 8)
    ]
    prefill = dataclasses.replace(recorded_row(tokens=256), limit="gemm")
    unserved = dataclasses.replace(recorded_row(tokens=512), status="unserved", ours_us=None, ratio=None)
    return [*decode, prefill, unserved]


def test_three_plots_are_written(rows: list[RowRecord], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    paths = write_plots(rows, "a GPU", tmp_path / "plots")
    assert [path.name for path in paths] == ["ratio.png", "limit.png", "roofline.png"]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5000


def test_missing_matplotlib_is_said(rows: list[RowRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchError, match="plots need matplotlib"):
        write_plots(rows, "a GPU", tmp_path)


def test_nothing_timed_is_nothing_to_plot(tmp_path: Path) -> None:
    unserved = dataclasses.replace(recorded_row(), status="unserved", ours_us=None)
    with pytest.raises(BenchError, match="nothing to plot"):
        write_plots([unserved], "a GPU", tmp_path)
