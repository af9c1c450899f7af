"""Tables from recorded results: what goes in, what is refused, the write, and what changed."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from support.bench.fakes import recorded_row

import cakegen
from cakegen.bench import tune
from cakegen.bench.records import Results, RowRecord, read_results
from cakegen.bench.tune import describe_changes, describe_table, table_of, write_table
from cakegen.errors import BenchError
from cakegen.measured import read_table, tables_of

RECORDED = Path(cakegen.__file__).resolve().parents[1] / "benchmarks" / "h200" / "results.jsonl"
HEADER = {
    "device": "NVIDIA H200",
    "sm_count": 132,
    "commit": "c0ffee",
    "date": "2026-11-29T00:00:00+00:00",
    "export": "kimi_k3_latent_moe",
    "clocks": {"driver_version": "580.1"},
}
END: dict[str, list[dict[str, Any]]] = {"end": [{"clocks": {}}]}


def results(*rows: RowRecord, header: dict[str, Any] = HEADER, others: Any = END) -> Results:
    return Results(header, rows, others)


def test_table_holds_timed_rows_in_order_with_every_chain() -> None:
    unserved = dataclasses.replace(recorded_row("tail", 1, 4), status="unserved")
    rows = (recorded_row("tail", 8, 16), recorded_row("front", 1, 2, ours_us=70.0), unserved, recorded_row())
    table = table_of(results(*rows), "x.jsonl")
    assert [row.key for row in table.rows] == [("front", 1, 1), ("front", 1, 2), ("tail", 8, 16)]
    assert table.rows[1].ours_us == 70.0
    assert table.rows[1].chains_us == {"separate": 67.0, "joined": 66.0}
    assert table.rows[1].keys == ("decode:x",)
    assert table.title == "NVIDIA H200, 132 SMs, commit c0ffee, 2026-11-29"
    assert table.provenance["driver_version"] == "580.1"
    assert table.provenance["nvrtc"] == "unknown"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"others": {}}, "x: the run did not end well (it lacks its last line); a table is of a whole run"),
        ({"others": {"end": [{"problem": "OSError: lost"}]}}, "x: the run did not end well (OSError: lost)"),
        ({"rows": (dataclasses.replace(recorded_row(), status="wrong"),)}, "x: wrong results in front TP 1 T 1"),
        ({"rows": (dataclasses.replace(recorded_row(), status="unserved"),)}, "x: no row was timed beside a stock"),
        ({"rows": (dataclasses.replace(recorded_row(), arms={}),)}, "x: no row was timed beside a stock"),
        ({"rows": (recorded_row(), recorded_row())}, "x: a row stands there twice"),
        ({"header": {**HEADER, "sm_count": None}}, "no device with its SM count; got 'NVIDIA H200' and None"),
    ],
)
def test_run_that_makes_no_table_is_refused_in_words(changed: dict[str, Any], message: str) -> None:
    given = {"header": HEADER, "rows": (recorded_row(),), "others": END} | changed
    with pytest.raises(BenchError) as caught:
        table_of(Results(**given), "x")
    assert message in str(caught.value)


def test_written_table_reads_as_it_was_and_leaves_nothing_beside(tmp_path: Path) -> None:
    table = table_of(results(recorded_row()), "x")
    file = tmp_path / "measured" / table.file_name
    write_table(table, file)
    write_table(table, file)
    assert read_table(file) == table
    assert list(file.parent.iterdir()) == [file]


def test_interrupted_write_leaves_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "t.json"
    write_table(table_of(results(recorded_row(ours_us=50.0)), "x"), file)
    before = file.read_bytes()

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tune.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_table(table_of(results(recorded_row(ours_us=60.0)), "x"), file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_file_that_can_not_be_written_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(BenchError, match=r"t\.json: can't be written .*--out"):
        write_table(table_of(results(recorded_row()), "x"), tmp_path / "taken" / "t.json")
    assert os.listdir(tmp_path) == ["taken"]


def test_rows_that_a_chain_wins_by_the_margin_are_listed() -> None:
    rows = [recorded_row(tokens=t, ours_us=us) for t, us in ((1, 66.0), (2, 67.9), (4, 68.0))]
    lines = list(describe_table(table_of(results(*rows), "x")))
    assert lines == [
        "3 rows: in 2 no stock chain is 3% faster, in 1 one is",
        "  separate: 0 of 3",
        "  joined: 1 of 3",
        "  front TP 1 T 4: ours 68 us, joined 66 us: ours takes 1.030 times as long",
    ]


def test_changes_are_rows_that_moved_turned_came_or_went() -> None:
    before = [recorded_row(tokens=t) for t in (1, 2, 4, 8, 16)]
    after = [
        recorded_row(tokens=1, ours_us=60.5),
        recorded_row(tokens=2, ours_us=70.0),
        recorded_row(tokens=4, rival_us=80.0),
        recorded_row(tokens=8, ours_us=54.0),
        recorded_row(tokens=32),
    ]
    lines = list(describe_changes(table_of(results(*before), "x"), table_of(results(*after), "x")))
    assert lines == [
        "  front TP 1 T 2: ours 60 -> 70 us, fastest stock chain 66 -> 66 us, faster ours -> joined",
        "  front TP 1 T 4: ours 60 -> 60 us, fastest stock chain 66 -> 80 us, faster ours -> ours",
        "  front TP 1 T 8: ours 60 -> 54 us, fastest stock chain 66 -> 66 us, faster ours -> ours",
        "  front TP 1 T 16: gone",
        "  front TP 1 T 32: added, ours 60 us",
    ]


def test_shipped_table_is_made_of_the_recorded_results() -> None:
    """`cakegen tune --from benchmarks/h200/results.jsonl` writes it."""
    table = table_of(read_results(RECORDED), RECORDED.name)
    assert table in tables_of("kimi_k3_latent_moe")
