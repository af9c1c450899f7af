"""What rows say together, and what changed between two runs."""

from __future__ import annotations

import pytest
from support.bench.fakes import recorded_row

from cakegen.bench.compare import compare_rows, find_cliffs, means_of
from cakegen.bench.rows import Row


def test_changes_beyond_noise_are_told_from_those_within() -> None:
    before = [recorded_row(tokens=t, ours_us=100.0) for t in (1, 2, 4)]
    after = [
        recorded_row(tokens=1, ours_us=90.0),
        recorded_row(tokens=2, ours_us=100.5),
        recorded_row(tokens=4, ours_us=103),
    ]
    changes = compare_rows(before, after)
    assert [change.ratio for change in changes] == [pytest.approx(0.9), pytest.approx(1.005), pytest.approx(1.03)]
    assert [change.beyond_noise for change in changes] == [True, False, True]


def test_rows_of_one_run_only_have_no_change() -> None:
    changes = compare_rows([recorded_row(tokens=1)], [recorded_row(tokens=2)])
    assert [(change.row.tokens, change.before_us, change.after_us, change.ratio) for change in changes] == [
        (2, None, 60.0, None),
        (1, 60.0, None, None),
    ]


def test_cliff_is_a_row_slower_than_the_next_larger() -> None:
    rows = [
        recorded_row(tokens=8, ours_us=62.0),
        recorded_row(tokens=4, ours_us=61.0),
        recorded_row(tokens=2, ours_us=66.0),
        recorded_row(tokens=16, ours_us=60.0),
        # another TP degree is no neighbour
        recorded_row(tp=8, tokens=32, ours_us=20.0),
    ]
    cliffs = find_cliffs(rows)
    assert [(cliff.row, cliff.next_tokens) for cliff in cliffs] == [(Row("front", 1, 2), 4)]
    assert cliffs[0].ratio == pytest.approx(66 / 61)


def test_means_are_geometric_and_by_group() -> None:
    rows = [
        recorded_row(tokens=1, ours_us=50.0, rival_us=100.0),
        recorded_row(tokens=2, ours_us=100.0, rival_us=50.0),
        recorded_row("tail", 8, 256, ours_us=10.0, rival_us=40.0),
    ]
    means = {mean.name: mean for mean in means_of(rows, 128)}
    assert list(means) == ["front TP 1", "tail TP 8", "decode", "prefill", "all"]
    assert means["front TP 1"].ratio == pytest.approx(1.0)
    assert (means["front TP 1"].wins, means["front TP 1"].compared) == (1, 2)
    assert means["prefill"].ratio == pytest.approx(4.0)
    assert means["all"].ratio == pytest.approx(4.0 ** (1 / 3))
