"""Hopper's prefill where the last row tile is ragged: it loads whole boxes, stores its own rows, and changes no bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.emulator.copied_boxes import Box
from support.emulator.shorter_requests import outputs_of
from support.models import changed, hopper, tiny_model

from cakegen.emulator import Fault, Options
from cakegen.emulator.launches.cases import Case, emulate_case
from cakegen.model import Model
from cakegen.plan import GemmForm
from cakegen.plan.records import GEMM_BLOCK_M
from cakegen.registry import Registry

pytestmark = pytest.mark.emulator

BLOCK_M = GEMM_BLOCK_M
FEW = (("n_pads", (8, 64)), ("max_cta_tokens", 64))
TILES = {tile.block_n: tile for tile in hopper(tiny_model()).prefill.tiles}
# The last row tile is rank 0's or rank 1's of its pair, and lacks one row, many, or all but one.
CASES = {
    "front, one row": Case("front", 8, 129, tile=TILES[256]),
    "front, cut": Case("front", 8, 160, tile=TILES[192]),
    "front, taking turns": Case("front", 8, 200, sm_count=6, tile=TILES[128]),
    "tail, fused norm": Case("tail", 8, 300, sm_count=6, rank=7, tile=TILES[224]),
    "tail, all but one row": Case("tail", 16, 255, partials=2, rank=15, tile=TILES[256]),
}
FRONT = Case("front", 8, 300, sm_count=6, tile=TILES[256])
TAIL = Case("tail", 8, 300, 2, 6, 3, tile=TILES[256])


@pytest.mark.parametrize("name", CASES)
def test_ragged_row_tile_loads_boxes_that_lie_inside_of_the_tokens(
    registry: Registry, token_boxes: list[Box], name: str
) -> None:
    registry, case = early_prefill(registry), CASES[name]
    assert emulate_case(registry, case, Options("random", 0, "wide")).problems == ()
    assert {box.name for box in token_boxes} == ({"x"} if case.stage == "front" else {"shared_act", "y_workspace"})
    assert {box.first for box in token_boxes} == {*range(0, case.tokens - BLOCK_M, BLOCK_M), case.tokens - BLOCK_M}
    assert [box for box in token_boxes if box.end > box.extent] == []


def early_prefill(registry: Registry) -> Registry:
    """The same programs for a model whose prefill begins at 65 tokens."""
    model = registry.model
    few = {f"{family}__decode__{field}": value for family in ("hopper", "blackwell") for field, value in FEW}
    return dataclasses.replace(registry, model=changed(model, **few))


@pytest.mark.parametrize("tokens", [65, 127, 128])
@pytest.mark.parametrize("case", [FRONT, TAIL], ids=["front", "tail"])
def test_fewer_tokens_than_a_row_tile_are_one_box(
    registry: Registry, token_boxes: list[Box], case: Case, tokens: int
) -> None:
    registry, case = early_prefill(registry), dataclasses.replace(case, tokens=tokens)
    assert isinstance(case.plan(registry.model).launches[-1].form, GemmForm)
    assert emulate_case(registry, case, Options("random", 0, "wide")).problems == ()
    assert {(box.first, box.extent) for box in token_boxes} == {(0, tokens)}


@pytest.mark.parametrize("case", [FRONT, TAIL], ids=["front", "tail"])
def test_row_has_the_same_bits_whichever_box_it_is_loaded_in(registry: Registry, case: Case) -> None:
    """Three row tiles, of which the last is ragged or not: the plan is the same, and so are the bits."""
    model: Model = registry.model
    whole = dataclasses.replace(case, tokens=3 * BLOCK_M)
    assert case.plan(model).launches[-1] == whole.plan(model).launches[-1]
    ragged, full = outputs_of(registry, whole, case.tokens), outputs_of(registry, whole, whole.tokens)
    for name, rows in ragged.items():
        assert torch.equal(rows, full[name][: case.tokens]), name


@pytest.mark.parametrize("case", [FRONT, TAIL], ids=["front", "tail"])
def test_store_of_another_tiles_rows_is_reported(registry: Registry, planted: Callable[..., Any], case: Case) -> None:
    load = planted("return row >= first && row < end;", "return row < end;")
    if case.stage == "tail":
        case = dataclasses.replace(case, partials=1)  # the norm's program does not hold the text
    with pytest.raises(Fault) as caught:
        emulate_case(registry, case, Options("early", 0, "wide"), load=load)
    assert caught.value.kind == "output"
