"""`cakegen bench`: what it prints of recorded results, and what it refuses. Nothing is measured here."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.bench.fakes import recorded_row

import cakegen
from cakegen.bench import session
from cakegen.bench.libraries import LIBRARIES
from cakegen.bench.measure import Settings
from cakegen.bench.records import ResultFile, RowRecord
from cakegen.cli.main import main

ROOT = Path(cakegen.__file__).resolve().parents[1]
HEADER: dict[str, object] = {
    "device": "Some GPU",
    "driver": "driver 1",
    "torch": "2.11.0",
    "commit": "0123456789abcdef",
    "date": "2026",
}


def written(path: Path, *rows: RowRecord, chain: dict[str, object] | None = None) -> Path:
    file = ResultFile(path, HEADER)
    for row in rows:
        file.write("row", row)
    if chain is not None:
        file.write("chain", chain)
    file.close()
    return path


def test_recorded_results_are_shown_with_provenance_rows_and_means(tmp_path: Path) -> None:
    rows = (recorded_row(tokens=1), recorded_row(tokens=2, ours_us=70.0))
    path = written(tmp_path / "results.jsonl", *rows, chain={"tp": 8, "ours_us": 35.0})
    result = CliRunner().invoke(main, ["bench", "--from", str(path)])
    assert result.exit_code == 0, result.output
    assert "Some GPU, driver 1, torch 2.11.0, commit 0123456789ab, 2026" in result.stdout
    assert "LOSES" in result.stdout
    assert "geometric mean" in result.stdout
    assert "chain: tp 8, ours_us 35.00" in result.stdout


def test_libraries_are_named_below_the_title(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HEADER, "libraries", {"quack": "quack-kernels 0.6.5", "deepgemm": "does not run: no module"})
    path = written(tmp_path / "results.jsonl", recorded_row())
    result = CliRunner().invoke(main, ["bench", "--from", str(path)])
    assert result.stdout.splitlines()[1:3] == [
        "library quack: quack-kernels 0.6.5",
        "library deepgemm: does not run: no module",
    ]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], (tuple(LIBRARIES), False)),
        (["--no-libraries"], ((), False)),
        (["--library", "quack", "--search"], (("quack",), True)),
    ],
)
def test_options_choose_the_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], wanted: tuple[tuple[str, ...], bool]
) -> None:
    asked: list[Settings] = []

    def run_bench(registry: object, run: session.Run, folder: Path, say: object) -> Path:
        asked.append(run.settings)
        return written(tmp_path / "results.jsonl", recorded_row())

    monkeypatch.setattr(session, "run_bench", run_bench)
    result = CliRunner().invoke(main, ["bench", "--out", str(tmp_path / "shown"), *options])
    assert result.exit_code == 0, result.output
    assert [(settings.libraries, settings.search) for settings in asked] == [wanted]


def test_folder_gets_the_table(tmp_path: Path) -> None:
    path = written(tmp_path / "results.jsonl", recorded_row())
    result = CliRunner().invoke(main, ["bench", "--from", str(path), "--out", str(tmp_path / "shown")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "shown" / "table.txt").read_text() == result.stdout


def test_against_prints_the_change_of_each_row(tmp_path: Path) -> None:
    before = written(tmp_path / "before.jsonl", recorded_row(tokens=1, ours_us=60.0), recorded_row(tokens=2))
    after = written(tmp_path / "after.jsonl", recorded_row(tokens=1, ours_us=54.0), recorded_row(tokens=2))
    result = CliRunner().invoke(main, ["bench", "--from", str(after), "--against", str(before)])
    assert result.exit_code == 0, result.output
    assert "-10.0 %  FASTER" in result.stdout


def test_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_bytes(b"\xff\xfe")
    result = CliRunner().invoke(main, ["bench", "--from", str(file)])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"cakegen: {file}: 'utf-8' codec can't decode byte 0xff")


@pytest.mark.parametrize("wrong", ["row", "chain"])
def test_wrong_result_is_exit_status_1(tmp_path: Path, wrong: str) -> None:
    row = dataclasses.replace(recorded_row(), status="wrong" if wrong == "row" else "timed", problem="y differs")
    chain = {"tp": 8, "status": "wrong" if wrong == "chain" else "timed"}
    path = written(tmp_path / "results.jsonl", row, chain=chain)
    assert CliRunner().invoke(main, ["bench", "--from", str(path)]).exit_code == 1


def test_file_that_can_not_be_compared_with_is_refused_before_measuring(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["bench", "--against", str(tmp_path / "none.jsonl"), "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "none.jsonl" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, which would be measured")
def test_machine_without_a_gpu_is_refused_in_words(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["bench", "--rows", "decode", "--out", str(tmp_path / "run")])
    assert result.exit_code == 1
    assert "timing needs a CUDA device" in result.stderr
    assert not (tmp_path / "run").exists()


def test_bench_needs_no_pydantic(tmp_path: Path) -> None:
    path = written(tmp_path / "results.jsonl", recorded_row())
    script = (
        "import sys\n"
        "sys.modules['pydantic'] = None\n"
        "import cakegen.bench.session\n"
        "from cakegen.cli.main import main\n"
        f"main(['bench', '--from', {str(path)!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "Some GPU" in done.stdout


def test_recorded_results_need_no_torch(tmp_path: Path) -> None:
    path = written(tmp_path / "results.jsonl", recorded_row())
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from cakegen.cli.main import main\n"
        f"main(['bench', '--from', {str(path)!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
