"""Measured tables: what a request's nearest rows say, the files, and the tables that the exports ship."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from cakegen import paths
from cakegen.errors import BenchError
from cakegen.measured import (
    MARGIN,
    MeasuredRow,
    MeasuredTable,
    judge_request,
    measured_folder,
    read_table,
    render_table,
    tables_of,
)

KEYS = ("tail_norm:e1@sm_90a", "tail_gemm:tp1@sm_90a")
PROVENANCE = {"commit": "0123456789abcdef", "date": "2026-11-29T19:48:59+00:00", "torch": "2.11.0"}


def row(tokens: int, ours_us: float, *, stage: str = "tail", tp: int = 1, **chains_us: float) -> MeasuredRow:
    return MeasuredRow(stage, tp, tokens, KEYS, ours_us, chains_us or {"joined": 100.0})


def table(*rows: MeasuredRow, device: str = "NVIDIA H200", sm_count: int = 132) -> MeasuredTable:
    return MeasuredTable(device, sm_count, PROVENANCE, rows)


LADDER = table(
    row(128, 100.0),
    row(256, 120.0),
    row(512, 110.0),
    row(1024, 102.9),
    row(2048, 103.0),
)


@pytest.mark.parametrize(
    ("tokens", "faster", "measured"),
    [
        (128, "ours", [128]),
        (129, "ours", [128, 256]),
        (256, "joined", [256]),
        (257, "joined", [256, 512]),
        (511, "joined", [256, 512]),
        (512, "joined", [512]),
        (513, "ours", [512, 1024]),
        (1024, "ours", [1024]),
        (2047, "ours", [1024, 2048]),
        (2048, "joined", [2048]),
    ],
)
def test_chain_is_faster_only_where_both_neighbours_say_so(tokens: int, faster: str, measured: list[int]) -> None:
    verdict = judge_request(LADDER, stage="tail", tp=1, tokens=tokens)
    assert verdict.faster == faster
    assert [row.tokens for row in verdict.rows] == measured


@pytest.mark.parametrize(
    ("stage", "tp", "tokens", "reason"),
    [
        ("front", 1, 256, "no row of front TP 1"),
        ("tail", 8, 256, "no row of tail TP 8"),
        ("tail", 1, 127, "no row of tail TP 1 at or below T 127"),
        ("tail", 1, 2049, "no row of tail TP 1 at or above T 2049"),
    ],
)
def test_request_outside_of_the_table_is_ours(stage: str, tp: int, tokens: int, reason: str) -> None:
    verdict = judge_request(LADDER, stage=stage, tp=tp, tokens=tokens)
    assert (verdict.faster, verdict.reason) == ("ours", reason)


def test_neighbours_must_agree_on_one_chain() -> None:
    apart = table(row(256, 120.0, joined=100.0, separate=119.0), row(512, 120.0, joined=119.0, separate=100.0))
    assert judge_request(apart, stage="tail", tp=1, tokens=300).faster == "ours"
    shared = table(row(256, 120.0, joined=100.0, separate=110.0), row(512, 120.0, joined=119.0, separate=105.0))
    verdict = judge_request(shared, stage="tail", tp=1, tokens=300)
    assert (verdict.faster, verdict.reason) == (
        "separate",
        "at least 3% faster in each; ours / separate is 1.091 at T 256, 1.143 at T 512",
    )


def test_chain_that_one_neighbour_lacks_is_not_taken() -> None:
    lacking = table(row(256, 120.0, joined=100.0), row(512, 120.0, separate=100.0))
    assert judge_request(lacking, stage="tail", tp=1, tokens=300).faster == "ours"


def test_file_is_named_after_the_device_and_survives_writing(tmp_path: Path) -> None:
    assert LADDER.file_name == "h200_132.json"
    assert table(device="NVIDIA H100 80GB HBM3").file_name == "h100_80gb_hbm3_132.json"
    file = tmp_path / LADDER.file_name
    file.write_text(render_table(LADDER))
    assert read_table(file) == LADDER
    lines = [line for line in file.read_text().splitlines() if '"tokens"' in line]
    assert [json.loads(line.rstrip(","))["tokens"] for line in lines] == [128, 256, 512, 1024, 2048]


def test_table_covers_its_sm_count_and_architecture() -> None:
    assert LADDER.covers(132, "@sm_90a")
    assert not LADDER.covers(114, "@sm_90a")
    assert not LADDER.covers(132, "")
    plain = dataclasses.replace(LADDER, rows=(dataclasses.replace(LADDER.rows[0], keys=("front:i768",)),))
    assert plain.covers(132, "")
    assert not plain.covers(132, "@sm_90a")


DAMAGES = {
    "schema": lambda values: values.update(schema=2),
    "commit": lambda values: values["provenance"].pop("commit"),
    "word": lambda values: values["provenance"].update(torch=2),
    "device": lambda values: values.update(device=None),
    "count": lambda values: values.update(sm_count=0),
    "true": lambda values: values["rows"][0].update(tp=True),
    "time": lambda values: values["rows"][0].update(ours_us=float("nan")),
    "zero": lambda values: values["rows"][0]["chains_us"].update(joined=0),
    "chains": lambda values: values["rows"][0].update(chains_us={}),
    "field": lambda values: values["rows"][0].pop("tokens"),
    "rows": lambda values: values.update(rows=7),
    "order": lambda values: values["rows"].reverse(),
    "twice": lambda values: values["rows"].insert(0, values["rows"][0]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_refused_with_its_name(tmp_path: Path, damage: str) -> None:
    values = json.loads(render_table(LADDER))
    DAMAGES[damage](values)
    file = tmp_path / "h200_132.json"
    file.write_text(json.dumps(values))
    with pytest.raises(BenchError, match=r"h200_132\.json: .*cakegen tune"):
        read_table(file)


@pytest.mark.parametrize(("text", "message"), [("{", "no JSON"), ("[]", "must be an object of schema 1")])
def test_file_of_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(BenchError, match=message):
        read_table(file)
    with pytest.raises(BenchError, match=r"none\.json: No such file"):
        read_table(tmp_path / "none.json")


def test_export_without_tables_has_none() -> None:
    assert tables_of("tiny_latent_moe") == ()


@pytest.mark.parametrize("file", sorted(paths.exports_root().glob("*/measured/*.json")), ids=lambda file: file.name)
def test_shipped_table_is_whole_and_named_after_its_device(file: Path) -> None:
    shipped = read_table(file)
    assert file.name == shipped.file_name
    assert file.parent == measured_folder(shipped.provenance["export"])
    assert shipped in tables_of(shipped.provenance["export"])
    assert file.read_text() == render_table(shipped)
    assert {(row.stage, row.tp) for row in shipped.rows} >= {(s, t) for s in ("front", "tail") for t in (1, 8)}
    # what loses by the margin where it was measured is what a look-up at that T says
    for row in shipped.rows:
        verdict = judge_request(shipped, stage=row.stage, tp=row.tp, tokens=row.tokens)
        assert (verdict.faster != "ours") == (row.ours_us >= MARGIN * min(row.chains_us.values()))
