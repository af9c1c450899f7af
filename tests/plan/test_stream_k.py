"""The trailing wave: published item counts, and what every split must keep."""

from __future__ import annotations

import dataclasses

import pytest
from support.models import blackwell, hopper

from cakegen.model import Model
from cakegen.plan.stream_k import (
    Split,
    hopper_costs,
    max_pieces,
    max_segments,
    plan_halves,
    plan_stream_k,
    plan_waves,
)
from cakegen.rules import CutRules, HopperTile

RESIDENT = 74
WHOLE = (48, 66, 132, 192, 264, 768, 1056, 1536, 2112, 4224)


@pytest.mark.parametrize(("tiles", "items", "whole"), [(24, 48, 0), (96, 118, 74), (384, 398, 370), (528, 538, 518)])
def test_front_splits_its_trailing_tiles_into_halves(kimi: Model, tiles: int, items: int, whole: int) -> None:
    split = plan_halves(tiles, 112, RESIDENT, blackwell(kimi).prefill.halves)
    assert (split.num_items, split.full_items, split.sk_ipc, split.sk_max_seg) == (items, whole, 56, 2)
    assert split.sk_total == (tiles - whole) * 112


@pytest.mark.parametrize("tiles", WHOLE)
def test_front_keeps_whole_tiles(kimi: Model, tiles: int) -> None:
    split = plan_halves(tiles, 112, RESIDENT, blackwell(kimi).prefill.halves)
    assert dict(split.parameters) == {
        "num_items": tiles,
        "full_items": tiles,
        "sk_ipc": 112,
        "sk_max_seg": 1,
        "sk_total": 0,
    }


def test_front_keeps_whole_tiles_where_k_has_no_halves(kimi: Model) -> None:
    assert plan_halves(24, 111, RESIDENT, blackwell(kimi).prefill.halves).sk_total == 0


@pytest.mark.parametrize(
    ("tiles", "reuse", "full", "ipc", "segments", "items"),
    [(28, 1, 0, 76, 2, 56), (112, 4, 74, 79, 3, 148), (224, 8, 148, 157, 2, 222)],
)
def test_tail_cuts_its_trailing_tiles(
    kimi: Model, tiles: int, reuse: int, full: int, ipc: int, segments: int, items: int
) -> None:
    split = plan_stream_k(tiles, 152, reuse, RESIDENT, blackwell(kimi).prefill.stream_k)
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
    split = plan_stream_k(tiles, num_k, reuse, RESIDENT, blackwell(kimi).prefill.stream_k)
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
            plan_stream_k(tiles, 152, 8, resident, blackwell(kimi).prefill.stream_k),
            plan_halves(tiles, 112, resident, blackwell(kimi).prefill.halves),
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


def test_pieces_count_the_tiles_that_an_item_touches() -> None:
    assert max_pieces(24 * 112, 112, 56) == 1
    assert max_pieces(24 * 112, 112, 41) == 2
    assert max_pieces(96 * 112, 112, 163) == 3
    assert max_pieces(112, 112, 112) == 1


def test_tail_takes_the_cheapest_cut(kimi: Model) -> None:
    # free segments make the finest cut the cheapest; dear ones make it the one with fewest segments
    rules = blackwell(kimi).prefill.stream_k
    assert rules is not None
    free, dear = (dataclasses.replace(rules, segment_cost=cost) for cost in (0, 60))
    assert plan_stream_k(28, 152, 1, RESIDENT, free).sk_ipc == 58
    assert plan_stream_k(28, 152, 1, RESIDENT, dear).sk_total == 0


HOPPER_RESIDENT = 66


@pytest.fixture
def cuts(kimi: Model) -> CutRules:
    """Round costs, whatever the export's are."""
    return dataclasses.replace(hopper(kimi).prefill.cut, min_saving=6, wider_min_saving=6)


def tile(tile_groups: int = 2, epilogue_iters: int = 4, segment_cost: int = 4) -> HopperTile:
    return HopperTile(128, 4, tile_groups, 100, epilogue_iters, segment_cost)


def split_waves(tiles: int, num_k: int, resident: int, rules: CutRules, of: HopperTile | None = None) -> Split:
    return plan_waves(tiles, num_k, resident, hopper_costs(rules, of or tile())).split


def test_waves_are_cut_at_the_modelled_cost(cuts: CutRules) -> None:
    # 41 iterations, 4 for each of 2 pieces' ends, 4 for each of 3 further segments; whole: 112 and one end
    split = split_waves(24, 112, HOPPER_RESIDENT, cuts)
    assert (split.num_items, split.sk_ipc, split.sk_max_seg) == (66, 41, 4)
    assert "cost 61 instead of 116, saves 55 (at least 6)" in split.reason


def test_waves_stay_whole_where_a_cut_saves_too_little(cuts: CutRules) -> None:
    split = split_waves(192, 112, HOPPER_RESIDENT, cuts)
    assert (split.num_items, split.sk_total) == (192, 0)
    assert split.reason == "the cheapest cut costs 346 of 348 iterations: saves 2, under 6"
    # its 60 trailing tiles and a wave more save 2
    cheaper = dataclasses.replace(cuts, wider_min_saving=2)
    assert split_waves(192, 112, HOPPER_RESIDENT, cheaper).sk_total == (60 + HOPPER_RESIDENT) * 112


def test_full_waves_stay_whole(cuts: CutRules) -> None:
    split = split_waves(132, 112, HOPPER_RESIDENT, cuts)
    assert (split.num_items, split.sk_total) == (132, 0)
    assert split.reason == "132 tiles are 2 full waves of 66"


def test_wider_cut_must_pay_for_its_workspace(cuts: CutRules) -> None:
    # 96 tiles: 30 trailing ones as halves cost 180, all 96 together 179
    narrow = split_waves(96, 112, HOPPER_RESIDENT, cuts)
    assert (narrow.full_items, narrow.sk_ipc) == (66, 56)
    cheapest = dataclasses.replace(cuts, wider_min_saving=1)
    wide = split_waves(96, 112, HOPPER_RESIDENT, cheapest)
    assert (wide.full_items, wide.sk_ipc) == (0, 163)


def test_end_of_a_piece_makes_crossing_items_dearer(cuts: CutRules) -> None:
    # 41 + 2 ends + 3 segments against 56 + 1 end + 1 segment: aligned halves are cheaper from ends of 8 iterations on
    for ends, ipc in ((7, 41), (8, 56), (20, 56)):
        assert split_waves(24, 112, HOPPER_RESIDENT, cuts, tile(epilogue_iters=ends)).sk_ipc == ipc


def test_no_cut_keeps_too_many_segments(cuts: CutRules) -> None:
    one = dataclasses.replace(cuts, max_segments=1, min_ipc=200)
    split = split_waves(1, 112, HOPPER_RESIDENT, one)
    assert (split.num_items, split.sk_total) == (1, 0)
    assert split.reason == "no cut of [1] tiles keeps 1 segments a tile"


def test_hidden_ends_cost_the_last_alone(cuts: CutRules) -> None:
    shared = hopper_costs(cuts, tile())
    turns = hopper_costs(cuts, tile(tile_groups=1, epilogue_iters=5, segment_cost=6))
    # 7 waves of 19 iterations and an end each, or one in all
    assert plan_waves(448, 19, HOPPER_RESIDENT, shared).cost == 7 * (19 + 4)
    assert plan_waves(448, 19, HOPPER_RESIDENT, turns).cost == 7 * 19 + 5
    # 41 iterations in 2 pieces, 3 further segments
    assert plan_waves(24, 112, HOPPER_RESIDENT, turns).cost == 41 + 5 + 3 * 6


def test_each_tile_has_its_own_costs(kimi: Model) -> None:
    rules = dataclasses.replace(hopper(kimi).prefill.cut, min_saving=5, wider_min_saving=6)
    shared, turns = (hopper_costs(rules, each) for each in (tile(2, 1, 3), tile(1, 2, 4)))
    assert (shared.epilogue, shared.epilogues_hidden, shared.segment) == (1, False, 3)
    assert (turns.epilogue, turns.epilogues_hidden, turns.segment) == (2, True, 4)
    assert {(costs.min_saving, costs.wider_min_saving) for costs in (shared, turns)} == {(5, 6)}


@pytest.mark.parametrize("resident", [1, 4, 39, 66])
def test_items_of_every_cut_wave_cover_k_once(cuts: CutRules, resident: int) -> None:
    for tiles in range(1, 200):
        for num_k in (10, 19, 112):
            split = split_waves(tiles, num_k, resident, cuts)
            if not split.sk_total:
                assert split.num_items == split.full_items == tiles
                continue
            assert split.sk_total == (tiles - split.full_items) * num_k
            assert split.full_items % resident == 0
            assert split.num_items == split.full_items + -(-split.sk_total // split.sk_ipc)
            assert split.num_items - split.full_items <= resident
            assert max(segments_by_walking(split, tiles, num_k)) == split.sk_max_seg <= 4
