"""The trailing wave: published item counts, and what every split must keep."""

from __future__ import annotations

import dataclasses

import pytest

from cakegen.model import Model
from cakegen.plan.stream_k import Split, max_segments, plan_halves, plan_stream_k

RESIDENT = 74
WHOLE = (48, 66, 132, 192, 264, 768, 1056, 1536, 2112, 4224)


@pytest.mark.parametrize(("tiles", "items", "whole"), [(24, 48, 0), (96, 118, 74), (384, 398, 370), (528, 538, 518)])
def test_front_splits_its_trailing_tiles_into_halves(kimi: Model, tiles: int, items: int, whole: int) -> None:
    split = plan_halves(tiles, 112, RESIDENT, kimi.prefill)
    assert (split.num_items, split.full_items, split.sk_ipc, split.sk_max_seg) == (items, whole, 56, 2)
    assert split.sk_total == (tiles - whole) * 112


@pytest.mark.parametrize("tiles", WHOLE)
def test_front_keeps_whole_tiles(kimi: Model, tiles: int) -> None:
    split = plan_halves(tiles, 112, RESIDENT, kimi.prefill)
    assert dict(split.parameters) == {
        "num_items": tiles,
        "full_items": tiles,
        "sk_ipc": 112,
        "sk_max_seg": 1,
        "sk_total": 0,
    }


def test_front_keeps_whole_tiles_where_k_has_no_halves(kimi: Model) -> None:
    assert plan_halves(24, 111, RESIDENT, kimi.prefill).sk_total == 0


@pytest.mark.parametrize(
    ("tiles", "reuse", "full", "ipc", "segments", "items"),
    [(28, 1, 0, 76, 2, 56), (112, 4, 74, 79, 3, 148), (224, 8, 148, 157, 2, 222)],
)
def test_tail_cuts_its_trailing_tiles(
    kimi: Model, tiles: int, reuse: int, full: int, ipc: int, segments: int, items: int
) -> None:
    split = plan_stream_k(tiles, 152, reuse, RESIDENT, kimi.prefill)
    expected = (items, full, ipc, segments, (tiles - full) * 152)
    assert (split.num_items, split.full_items, split.sk_ipc, split.sk_max_seg, split.sk_total) == expected


@pytest.mark.parametrize(
    ("tiles", "num_k", "reuse", "reason"),
    [
        (56, 152, 2, "no full wave"),
        (60, 152, 2, "no full wave"),
        (148, 152, 8, "full waves"),
        (28, 63, 1, "63 K iterations, under 64"),
        (74 + 41, 152, 4, "41 tiles exceed 55 %"),
        (60, 152, 1, "saves 7, under 32"),
    ],
)
def test_tail_keeps_whole_tiles(kimi: Model, tiles: int, num_k: int, reuse: int, reason: str) -> None:
    split = plan_stream_k(tiles, num_k, reuse, RESIDENT, kimi.prefill)
    assert (split.num_items, split.full_items, split.sk_ipc) == (tiles, tiles, num_k)
    assert reason in split.reason


def segments_by_walking(split: Split, tiles: int, num_k: int) -> list[int]:
    """Segments of each cut tile, counted item by item."""
    cut = tiles - split.full_items
    counts = [0] * cut
    for begin in range(0, split.sk_total, split.sk_ipc):
        end = min(split.sk_total, begin + split.sk_ipc)
        for tile in range(begin // num_k, (end - 1) // num_k + 1):
            counts[tile] += 1
    return counts


@pytest.mark.parametrize("resident", [4, 39, 66, 74, 76])
def test_items_of_every_split_cover_k_once(kimi: Model, resident: int) -> None:
    for tiles in range(1, 260):
        for split in (
            plan_stream_k(tiles, 152, 8, resident, kimi.prefill),
            plan_halves(tiles, 112, resident, kimi.prefill),
        ):
            num_k = 152 if split.sk_ipc not in (56, 112) else 112
            if not split.sk_total:
                assert split.num_items == split.full_items == tiles
                continue
            assert split.sk_total == (tiles - split.full_items) * num_k
            assert split.num_items == split.full_items + -(-split.sk_total // split.sk_ipc)
            walked = segments_by_walking(split, tiles, num_k)
            assert max(walked) == split.sk_max_seg <= 4


def test_segments_count_the_items_that_share_a_tile() -> None:
    assert max_segments(28, 152, 76) == 2
    assert max_segments(38, 152, 79) == 3
    assert max_segments(3, 152, 152) == 1


def test_tail_takes_the_cheapest_cut(kimi: Model) -> None:
    # free segments make the finest cut the cheapest; dear ones make it the one with fewest segments
    free = dataclasses.replace(kimi.prefill, stream_k_segment_cost=0)
    dear = dataclasses.replace(kimi.prefill, stream_k_segment_cost=60)
    assert plan_stream_k(28, 152, 1, RESIDENT, free).sk_ipc == 58
    assert plan_stream_k(28, 152, 1, RESIDENT, dear).sk_total == 0
