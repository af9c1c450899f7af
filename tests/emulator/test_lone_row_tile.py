"""Hopper's prefill of an uneven number of row tiles: a pair takes the last one for two columns of tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.emulator.schedules import same_under_all_schedules
from support.emulator.shorter_requests import outputs_of
from support.models import hopper, tiny_model
from support.plan.pair_tiles import count_pair_tiles

from cakegen.emulator import Fault, Options
from cakegen.emulator.launches.cases import Case, emulate_case
from cakegen.plan import GemmForm
from cakegen.registry import Registry

pytestmark = pytest.mark.emulator

TILES = {tile.block_n: tile for tile in hopper(tiny_model()).prefill.tiles}
# Case, columns of tiles, whether tiles are cut. Of an uneven number of columns the last has the lone row tile alone.
CASES = {
    "front, whole tiles": (Case("front", 16, 300, 1, 6, tile=TILES[224]), 6, False),
    "front, cut, a last column": (Case("front", 8, 384, 1, 6, tile=TILES[256]), 5, True),
    "front, turns": (Case("front", 16, 257, 1, 6, tile=TILES[128]), 8, False),
    "front, turns, cut, a last column": (Case("front", 8, 384, 1, 6, tile=TILES[128]), 9, True),
    "front, several tiles a cluster": (Case("front", 8, 640, 1, 4, tile=TILES[192]), 7, False),
    "tail, norm of its own, cut": (Case("tail", 4, 640, 2, 6, 2, tile=TILES[128]), 4, True),
    "tail, norm of its own, a last column": (Case("tail", 16, 300, 2, 6, 15, tile=TILES[192]), 3, False),
    "tail, fused norm": (Case("tail", 2, 384, 1, 6, 1, tile=TILES[256]), 2, False),
    "tail, fused norm, cut, a last column": (Case("tail", 8, 300, 1, 6, 7, tile=TILES[224]), 3, True),
    "tail, behind a full raster group": (Case("tail", 16, 2100, 2, 6, 3, tile=TILES[256]), 2, False),
}


def gemm_form(registry: Registry, case: Case) -> tuple[GemmForm, dict[str, int]]:
    gemm = case.plan(registry.model).launches[-1]
    assert isinstance(gemm.form, GemmForm)
    return gemm.form, dict(gemm.parameters)


@pytest.mark.parametrize("extremes", [(), pytest.param(("early", "late"), marks=pytest.mark.thorough)], ids=len)
@pytest.mark.parametrize("name", CASES)
def test_uneven_number_of_row_tiles_gives_one_value_under_every_schedule(
    registry: Registry, name: str, extremes: tuple[str, ...]
) -> None:
    case, n_tiles, is_cut = CASES[name]
    form, parameters = gemm_form(registry, case)
    tiles = count_pair_tiles(case.tokens, n_tiles)
    assert parameters["m_tiles"] % 2 == 1
    assert parameters["full_items"] + parameters["sk_total"] // form.num_k == tiles
    assert (parameters["sk_total"] > 0) == is_cut
    same_under_all_schedules(registry, case, extremes=extremes)


@pytest.mark.parametrize("tokens", [257, 384])
@pytest.mark.parametrize(
    "case",
    [
        Case("front", 16, 512, 1, 6, tile=TILES[192]),
        Case("front", 16, 512, 1, 8, tile=TILES[128]),
        Case("tail", 16, 512, 1, 6, 15, tile=TILES[224]),
        Case("tail", 16, 512, 2, 6, 15, tile=TILES[128]),
    ],
    ids=str,
)
def test_row_has_the_bits_of_an_even_request(registry: Registry, case: Case, tokens: int) -> None:
    """Where neither cuts its tiles, a row's sums are taken in the same order."""
    few = dataclasses.replace(case, tokens=tokens)
    for each in (case, few):
        assert gemm_form(registry, each)[1]["sk_total"] == 0
    many, alone = outputs_of(registry, case, case.tokens), outputs_of(registry, case, tokens)
    for name, rows in alone.items():
        assert torch.equal(rows, many[name][:tokens]), name


FRONT = CASES["front, cut, a last column"][0]
FUSED = CASES["tail, fused norm"][0]
LOAD = "tma_load_3d_multicast(to.tokens, map, at.column, rows.loaded, at.chunk, to.full, 3);"
WEIGHTS = "tma_load_3d(to.weights + half * Cfg::kHalfBBytes"
PLANTED: dict[str, tuple[Case, str, str, set[str]]] = {
    "both load the even K blocks": (FRONT, "if (k % 2 == rank)", "if (k % 2 == 0)", {"barrier", "deadlock", "race"}),
    "tokens for one CTA": (FRONT, LOAD, LOAD.replace(", 3)", ", static_cast<u16>(1 << rank))"), {"deadlock"}),
    "each CTA with rows of its own": (FRONT, "(shares_tokens ? 0 : rank)", "rank", {"barrier", "deadlock", "race"}),
    "both with one column": (FRONT, "(shares_tokens ? rank : 0)", "0", {"race", "output"}),
    "the halves of the weights swapped": (FRONT, WEIGHTS, WEIGHTS.replace("half *", "(1 - half) *"), {"wrong values"}),
    "one column for two": (FRONT, "!paired && columns == 2", "false", {"output"}),
    "the partner's reads not waited for": (
        FRONT,
        "mbarrier_arrive_cluster_after_reads(mapa(empty, rank ^ 1));",
        "mbarrier_arrive(empty);",
        {"race"},
    ),
    "one CTA waits for the rows that both copy": (
        FUSED,
        "if (rows.any() && k >= Cfg::kDownBlocks)",
        "if (rank == 0 && rows.any() && k >= Cfg::kDownBlocks)",
        {"race", "unwritten-read", "proxy"},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_of_the_lone_row_tile_is_reported(
    registry: Registry, planted: Callable[..., Any], name: str
) -> None:
    case, old, new, kinds = PLANTED[name]
    load = planted(old, new)
    try:
        found = "wrong values" if emulate_case(registry, case, Options("random", 0, "wide"), load=load).problems else ""
    except Fault as fault:
        found = fault.kind
    assert found in kinds
