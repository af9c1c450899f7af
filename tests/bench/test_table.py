"""Results as text."""

from __future__ import annotations

import dataclasses

from support.bench.fakes import recorded_row

from cakegen.bench.compare import compare_rows, find_cliffs, means_of
from cakegen.bench.table import LOSES, render_changes, render_line, render_means, render_others, render_rows


def test_losing_rows_are_shown_and_marked() -> None:
    text = render_rows([recorded_row(tokens=2, ours_us=80.0), recorded_row(tokens=1)])
    head, first, second = text.splitlines()
    assert head.split()[:3] == ["stage", "TP", "T"]
    assert first.split()[:3] == ["front", "1", "1"]
    assert LOSES not in first
    assert second.endswith(LOSES)
    assert LOSES in render_line(recorded_row(ours_us=80.0))


def test_row_that_was_not_timed_says_why_in_one_short_line() -> None:
    record = dataclasses.replace(recorded_row(), status="wrong", problem="logits:\n" + "x" * 500, ours_us=None)
    for text in (render_rows([record]).splitlines()[1], render_line(record)):
        assert "wrong: logits: xxx" in text
        assert len(text) < 300


def test_columns_line_up() -> None:
    text = render_rows([recorded_row(), recorded_row("tail", 8, 16384, 12345.6, 15000.0, 9000.0)])
    starts = {line.index(word) for line, word in zip(text.splitlines(), ("ratio", " 1.10", " 1.22"), strict=True)}
    assert len(starts) == 1


def test_means_and_cliffs_are_printed() -> None:
    rows = [recorded_row(tokens=1, ours_us=66.0), recorded_row(tokens=2, ours_us=60.0)]
    text = render_means(means_of(rows, 128), find_cliffs(rows))
    assert "1 of 2" not in text
    assert "2 of 2" in text
    assert "cliff: front TP 1 T 1 takes 1.10 of the time of T 2" in text


def test_changes_are_printed_with_their_verdict() -> None:
    before = [recorded_row(tokens=t, ours_us=100.0) for t in (1, 2, 4)]
    after = [recorded_row(tokens=t, ours_us=us) for t, us in ((1, 90.0), (2, 100.2), (8, 1.0))]
    lines = render_changes(compare_rows(before, after)).splitlines()
    assert lines[1].endswith("-10.0 %  FASTER")
    assert lines[2].endswith("+0.2 %")
    assert lines[3].endswith("only in one run")


def test_other_objects_are_printed_by_field() -> None:
    text = render_others({"chain": [{"tp": 8, "ours_us": 31.25, "layer_us": {"ours": 31.25}}], "end": [{"clocks": {}}]})
    assert text == "chain: tp 8, ours_us 31.25, layer_us[ours] 31.25"
