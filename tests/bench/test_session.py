"""A run into a folder: the file's parts, its progress, and what a failure leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bench.fakes import FakeClock, recorded_row

from cakegen.bench import session
from cakegen.bench.measure import Bench, Settings
from cakegen.bench.records import RowRecord, read_results
from cakegen.bench.rehearsal import Opened
from cakegen.bench.rows import Row
from cakegen.registry import load_registry

REGISTRY = load_registry("tiny_latent_moe")
ROWS = (Row("front", 1, 1), Row("front", 1, 2))


class ActiveClock(FakeClock):
    def __init__(self, device: torch.device) -> None:
        super().__init__()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        yield


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAKEGEN_COMMIT", "c0ffee")
    monkeypatch.setattr(session, "CudaClock", ActiveClock)
    monkeypatch.setattr(session, "read_provenance", lambda device: {"device": str(device), "commit": "c0ffee"})
    monkeypatch.setattr(session, "read_clocks", lambda device: {"clocks.sm": "1980"})


def test_run_writes_header_rows_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(bench: Bench, run: session.Run, say: Any) -> Iterator[tuple[str, RowRecord | dict[str, Any]]]:
        yield "protocol", {"clean_us": 58.5}
        yield "row", recorded_row(tokens=1)
        yield "row", recorded_row(tokens=2)

    monkeypatch.setattr(session, "measure_all", measured)
    said: list[str] = []
    path = session.run_bench(REGISTRY, session.Run(ROWS), tmp_path / "run", said.append)
    results = read_results(path)
    assert results.header["commit"] == "c0ffee"
    assert results.header["export"] == "tiny_latent_moe"
    assert "buffer of 4 times the L2 is read" in results.header["protocol"]
    assert results.header["settings"]["seed"] == 0
    assert [record.tokens for record in results.rows] == [1, 2]
    assert results.others == {"protocol": [{"clean_us": 58.5}], "end": [{"clocks": {"clocks.sm": "1980"}}]}
    assert said[0] == "protocol: clean_us 58.50"
    assert [line[:5] for line in said[1:]] == ["[1/2]", "[2/2]"]


@pytest.mark.parametrize("rivals", [True, False])
def test_header_names_the_libraries_that_run_and_why_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rivals: bool
) -> None:
    found = {"deepgemm": "deep-gemm 2.5", "quack": "does not run: no module"}
    seen: list[Any] = []

    def opened(names: tuple[str, ...], device: torch.device, *, search: bool) -> Opened:
        seen.append((names, search))
        return Opened((), found)

    monkeypatch.setattr(session, "open_libraries", opened)
    monkeypatch.setattr(session, "measure_all", lambda bench, run, say: iter(()))
    settings = Settings(rivals=rivals, libraries=tuple(found), search=True)
    path = session.run_bench(REGISTRY, session.Run(ROWS, settings), tmp_path, lambda _: None)
    assert read_results(path).header["libraries"] == (found if rivals else {})
    assert seen == ([(("deepgemm", "quack"), True)] if rivals else [])


def test_failure_keeps_what_was_measured_and_leaves_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(bench: Bench, run: session.Run, say: Any) -> Iterator[tuple[str, RowRecord]]:
        yield "row", recorded_row(tokens=1)
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(session, "measure_all", measured)
    with pytest.raises(RuntimeError, match="launch failure"):
        session.run_bench(REGISTRY, session.Run(ROWS), tmp_path, lambda _: None)
    results = read_results(tmp_path / session.RESULTS_FILE)
    assert len(results.rows) == 1
    assert results.others["end"] == [{"problem": "RuntimeError: CUDA error: unspecified launch failure", "wait": None}]


def test_machine_without_a_driver_notes_why_there_is_no_probe() -> None:
    bench = Bench(session.LatentMoe(REGISTRY), torch.device("cuda", 7), FakeClock(), None)
    session._open_probe(bench)
    assert bench.probe is None
    assert "driver" in bench.notes["stream"] or "cuda:7" in bench.notes["stream"]
