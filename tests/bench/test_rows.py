"""Which rows a table holds, and the work of a row."""

from __future__ import annotations

import pytest
from support.models import kimi_k3_model

from cakegen.bench.rows import Row, grouped_rows, select_rows, work_of
from cakegen.errors import BenchError

DIMS = kimi_k3_model().dims


def test_main_table_is_the_sixty_rows() -> None:
    rows = select_rows("main", 128)
    assert len(rows) == len(set(rows)) == 60
    assert {row.tp for row in rows} == {1, 8}
    assert [row.tokens for row in rows if (row.stage, row.tp) == ("tail", 8)] == [2**power for power in range(15)]


def test_decode_and_prefill_split_the_main_table_at_the_limit() -> None:
    decode, prefill = select_rows("decode", 128), select_rows("prefill", 128)
    assert len(decode) == 32
    assert max(row.tokens for row in decode) == 128
    assert min(row.tokens for row in prefill) == 256
    assert set(decode) | set(prefill) == set(select_rows("main", 128))


def test_full_table_adds_ragged_tokens_and_more_degrees() -> None:
    rows = select_rows("full", 128)
    assert set(select_rows("main", 128)) < set(rows)
    assert {row.tp for row in rows} == {1, 2, 4, 8, 16}
    assert {24, 48, 96, 130, 192, 384, 768, 1536, 3000} < {row.tokens for row in rows}
    assert len(rows) == 2 * 5 * 24


def test_named_axes_stand_for_the_tables_own() -> None:
    rows = select_rows("decode", 128, stages=("tail",), tps=(4,), tokens=(100, 7))
    assert rows == (Row("tail", 4, 7), Row("tail", 4, 100))


@pytest.mark.parametrize(
    ("table", "options"), [("all", {}), ("main", {"stages": ("middle",)}), ("main", {"tokens": (0,)}), ("decode", {})]
)
def test_impossible_selections_are_refused(table: str, options: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(BenchError):
        select_rows(table, 0 if table == "decode" else 128, **options)  # type: ignore[arg-type]


def test_groups_share_operands_and_begin_with_the_largest_call() -> None:
    groups = list(grouped_rows(select_rows("main", 128)))
    assert sorted(row for group in groups for row in map(str, group)) == sorted(map(str, select_rows("main", 128)))
    for group in groups:
        assert len({(row.stage, row.tp) for row in group}) == 1
        assert group[0].tokens == max(row.tokens for row in group)
    assert [row.tokens for row in groups[0]] == [16, 8, 4, 2, 1]
    assert [row.tokens for row in groups[1]] == [128, 64, 32]


def test_weight_bytes_are_those_of_the_measured_streams() -> None:
    """240.4 MB at 4.364 TB/s are the 55.1 us of the front, 17.4 MB the 4.0 us of the tail at TP 8."""
    assert work_of(DIMS, Row("front", 1, 1)).weight_bytes / 4.364e6 == pytest.approx(55.1, abs=0.1)
    assert work_of(DIMS, Row("front", 8, 1)).weight_bytes / 4.364e6 == pytest.approx(19.8, abs=0.1)
    assert work_of(DIMS, Row("tail", 1, 1)).weight_bytes / 4.364e6 == pytest.approx(32.0, abs=0.1)
    assert work_of(DIMS, Row("tail", 8, 1)).weight_bytes / 4.364e6 == pytest.approx(4.0, abs=0.1)


def test_work_counts_every_operand_once() -> None:
    front = work_of(DIMS, Row("front", 8, 3))
    assert front.flops == 2 * 3 * 7168 * (896 + 3584 + 2 * 768)
    assert front.token_bytes == 3 * (7168 * 2 + 896 * 4 + 3584 * 2 + 768 * 2)
    tail = work_of(DIMS, Row("tail", 8, 3), partials=2)
    assert tail.flops == 2 * 3 * 7168 * (448 + 768)
    assert tail.token_bytes == 3 * 2 * (2 * 3584 + 768 + 3584 + 7168)
    assert tail.bytes == tail.weight_bytes + tail.token_bytes


def test_degrees_that_an_export_lacks_are_left_out_of_a_table_but_not_of_what_is_named() -> None:
    assert {row.tp for row in select_rows("main", 128, served=(1, 4))} == {1}
    assert {row.tp for row in select_rows("full", 128, served=(2, 4))} == {2, 4}
    assert {row.tp for row in select_rows("main", 128, served=(1, 4), tps=(8,))} == {8}
    with pytest.raises(
        BenchError, match=r"rows 'main' are of TP \[1, 8\]; the export has TP \[4\]. Name some with --tp"
    ):
        select_rows("main", 128, served=(4,))
