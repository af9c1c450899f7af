"""`cakegen tune`: a table of recorded results, what it prints and refuses, and the run that it asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click.testing
import pytest
import torch
from support.bench.fakes import recorded_row

from cakegen.bench import session
from cakegen.bench.records import ResultFile, RowRecord
from cakegen.cli.main import main
from cakegen.measured import read_table
from cakegen.registry import Registry

EXPORT = "tiny_latent_moe"
HEADER = {"device": "NVIDIA H200", "sm_count": 132, "commit": "c0ffee", "date": "2026-11-29", "export": EXPORT}


def written(path: Path, *rows: RowRecord, end: bool = True) -> Path:
    file = ResultFile(path, HEADER)
    for row in rows:
        file.write("row", row)
    if end:
        file.write("end", {"clocks": {}})
    file.close()
    return path


def tune(*arguments: object) -> click.testing.Result:
    return click.testing.CliRunner().invoke(main, ["tune", "--export", EXPORT, *map(str, arguments)])


def test_recorded_results_become_a_table_and_the_next_says_what_changed(tmp_path: Path) -> None:
    file = tmp_path / "h200.json"
    first = tune("--from", written(tmp_path / "a.jsonl", recorded_row(ours_us=70.0)), "--out", file)
    assert first.exit_code == 0, first.output
    assert "in 0 no stock chain is 3% faster, in 1 one is" in first.stdout
    assert "since" not in first.stdout
    second = tune("--from", written(tmp_path / "b.jsonl", recorded_row(ours_us=60.0)), "--out", file)
    assert second.exit_code == 0, second.output
    assert "since NVIDIA H200, 132 SMs, commit c0ffee, 2026-11-29: 1 rows changed" in second.stdout
    assert "ours 70 -> 60 us, fastest stock chain 66 -> 66 us, faster joined -> ours" in second.stdout
    assert [row.ours_us for row in read_table(file).rows] == [60.0]


@pytest.mark.parametrize("option", ["--from", "--out", "--results"])
def test_tiles_go_with_no_option_of_the_table(tmp_path: Path, option: str) -> None:
    given = tmp_path if option == "--results" else written(tmp_path / "a.jsonl", recorded_row())
    refused = tune("--tiles", tmp_path / "tiles.tsv", option, given)
    assert refused.exit_code == 2
    assert f"{option}" in refused.stderr
    assert "--tiles writes none" in refused.stderr


def test_folder_of_tiles_that_can_not_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    refused = tune("--tiles", tmp_path / "missing" / "tiles.tsv")
    assert refused.exit_code == 1
    assert "tiles.tsv: its folder can't be written" in refused.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a device")
def test_tiles_need_a_device(tmp_path: Path) -> None:
    refused = tune("--tiles", tmp_path / "tiles.tsv")
    assert refused.exit_code == 1
    assert "timing needs a CUDA device" in refused.stderr
    assert not list(tmp_path.iterdir())


def test_run_that_was_cut_off_leaves_the_old_table(tmp_path: Path) -> None:
    file = tmp_path / "h200.json"
    assert tune("--from", written(tmp_path / "a.jsonl", recorded_row()), "--out", file).exit_code == 0
    before = file.read_bytes()
    refused = tune("--from", written(tmp_path / "b.jsonl", recorded_row(ours_us=1.0), end=False), "--out", file)
    assert refused.exit_code == 1
    assert "b.jsonl: the run did not end well" in refused.stderr
    assert file.read_bytes() == before


def test_damaged_old_table_is_replaced_and_said_to_be_damaged(tmp_path: Path) -> None:
    file = tmp_path / "h200.json"
    file.write_text("{")
    result = tune("--from", written(tmp_path / "a.jsonl", recorded_row()), "--out", file)
    assert result.exit_code == 0, result.output
    assert "the old table can't be compared with" in result.stderr
    assert len(read_table(file).rows) == 1


def test_results_of_another_export_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", recorded_row())
    arguments = ["tune", "--from", str(path), "--out", str(tmp_path / "t.json")]
    result = click.testing.CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert "measured export 'tiny_latent_moe'; the table is of 'kimi_k3_latent_moe'" in result.stderr
    assert not (tmp_path / "t.json").exists()


def test_table_of_an_export_goes_into_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cakegen.paths.exports_root", lambda: tmp_path / "exports")
    assert tune("--from", written(tmp_path / "a.jsonl", recorded_row())).exit_code == 0
    (file,) = (tmp_path / "exports").rglob("*.json")
    assert file == tmp_path / "exports" / EXPORT / "measured" / "h200_132.json"


def test_installed_package_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cakegen.paths.is_checkout", lambda: False)
    path = written(tmp_path / "a.jsonl", recorded_row())
    result = tune("--from", path)
    assert result.exit_code == 1
    assert "an installed package is not written; name a file with --out" in result.stderr
    assert tune("--from", path, "--out", tmp_path / "t.json").exit_code == 0


@pytest.mark.parametrize(("rows", "count"), [("full", 240), ("main", 60)])
def test_run_measures_the_benchs_rows_with_its_chains_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: str, count: int
) -> None:
    asked: list[session.Run] = []

    def run_bench(registry: Registry, run: session.Run, folder: Path, say: Callable[[str], None]) -> Path:
        asked.append(run)
        assert registry.export == EXPORT
        return written(folder / "results.jsonl", recorded_row())

    monkeypatch.setattr(session, "run_bench", run_bench)
    file = tmp_path / "t.json"
    result = tune("--rows", rows, "--repeats", 5, "--results", tmp_path / "run", "--out", file)
    assert result.exit_code == 0, result.output
    (run,) = asked
    assert len(run.rows) == count
    assert (run.settings.repeats, run.settings.rivals, run.settings.rotation) == (5, True, False)
    assert not run.chains
    assert not run.host
    assert file.is_file()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, which would be measured")
def test_machine_without_a_gpu_is_refused_and_keeps_its_table(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_text("kept")
    result = tune("--rows", "main", "--results", tmp_path / "run", "--out", file)
    assert result.exit_code == 1
    assert "timing needs a CUDA device" in result.stderr
    assert file.read_text() == "kept"
