"""Rows as JSON lines: what is in them, what survives, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.bench.fakes import recorded_row, summary
from support.models import kimi_k3_model

from cakegen.bench.records import ResultFile, read_results, row_record
from cakegen.bench.rows import Row, work_of
from cakegen.errors import BenchError

REQUIRED = {"stage", "tp", "tokens", "ours_us", "rival", "rival_us", "ratio", "limit_us", "spread"}


def test_record_compares_with_the_fastest_rival_and_the_fastest_probe() -> None:
    record = recorded_row(ours_us=60.0, rival_us=66.0, limit_us=58.5)
    assert (record.rival, record.rival_us, record.ratio) == ("joined", 66.0, pytest.approx(1.1))
    assert (record.limit, record.limit_us, record.limit_ratio) == ("stream 128x128", 58.5, pytest.approx(60 / 58.5))
    assert record.noise == pytest.approx(0.005)
    assert (record.rotation_us, record.rival_rotation_us, record.floor_us) == (59.7, 65.7, 3.2)
    assert record.tb_per_s == pytest.approx(record.bytes / 60e-6 / 1e12)
    assert record.tflop_per_s == pytest.approx(record.flops / 60e-6 / 1e12)
    assert not record.loses
    assert recorded_row(ours_us=70.0).loses


def test_record_without_ours_keeps_the_rival_and_the_limit() -> None:
    row = Row("front", 1, 256)
    arms = {"rival joined": summary(107.0), "gemm": summary(95.0)}
    work = work_of(kimi_k3_model().dims, row)
    record = row_record(row, work, arms, status="unserved", problem="no program", unavailable={"stream": "no NVRTC"})
    assert (record.ours_us, record.ratio, record.noise, record.tb_per_s) == (None, None, None, None)
    assert (record.rival_us, record.limit, record.limit_us) == (107.0, "gemm", 95.0)
    assert not record.loses


def test_rows_survive_the_file_and_hold_the_required_fields(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    file = ResultFile(path, {"device": "GPU", "commit": "abc"})
    rows = [recorded_row(), recorded_row("tail", 8, 16, 10.123456789, 15.0, 8.5)]
    file.write("row", rows[0])
    file.write("chain", {"tp": 8, "ours_us": 35.0})
    file.write("row", rows[1])
    file.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["header", "row", "chain", "row"]
    assert set(lines[1]) >= REQUIRED
    assert lines[3]["ours_us"] == 10.1235
    results = read_results(path)
    assert results.header["device"] == "GPU"
    assert [record.row for record in results.rows] == [record.row for record in rows]
    assert results.rows[0].ratio == pytest.approx(rows[0].ratio)
    assert results.rows[0].keys == ("decode:x",)
    assert results.others == {"chain": [{"tp": 8, "ours_us": 35.0}]}


def test_every_line_is_on_disk_before_the_next_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.jsonl"
    file = ResultFile(path, {})
    file.write("row", recorded_row())
    assert len(read_results(path).rows) == 1
    file.close()


def test_results_are_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    ResultFile(path, {"device": "first"}).close()
    with pytest.raises(BenchError, match="holds results already"):
        ResultFile(path, {"device": "second"})
    assert read_results(path).header["device"] == "first"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must begin with a header"),
        ('{"kind": "row"}\n', "must begin with a header"),
        ('{"kind": "header", "schema": 99}\n', "must begin with a header of schema 1"),
        ('{"kind": "header", "schema": 1}\n{"kind": "row", "stage": "front"}\n', "line 2: not a row"),
        ('{"kind": "header", "schema": 1}\n{"kind": "row", \n', "line 2: no JSON"),
        ('{"kind": "header", "schema": 1}\n[1]\n', "line 2: needs an object"),
    ],
)
def test_files_that_are_no_results_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    with pytest.raises(BenchError, match=message):
        read_results(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"nothing\.jsonl"):
        read_results(tmp_path / "nothing.jsonl")
