"""Hopper's prefill of an uneven number of row tiles plans no CTA without tokens, but for an uneven last column."""

from __future__ import annotations

import pytest
from support.models import kimi_k3_model, short_decode, with_tile
from support.plan.pair_tiles import count_pair_tiles

from cakegen.model import DeviceFacts, Model
from cakegen.plan import GemmForm, Plan, plan_route

# Columns of tiles at TP 8, by their width.
FRONT_COLUMNS = {256: 24, 224: 27, 192: 32, 240: 26, 176: 36, 144: 43, 128: 47}
TAIL_COLUMNS = {256: 28, 224: 32, 192: 38, 240: 30, 176: 41, 144: 50, 128: 56}


@pytest.fixture
def kimi() -> Model:
    """As prefill, what decode could serve too."""
    return short_decode(kimi_k3_model())


def plan_of(model: Model, device: DeviceFacts, stage: str, tokens: int) -> Plan:
    return plan_route(model, stage=stage, tp=8, tokens=tokens, partials=1, device=device)


def rule_of(plan: Plan, field: str) -> tuple[object, str]:
    (rule,) = (rule for rule in plan.rules if rule.field == field)
    return rule.value, rule.reason


@pytest.mark.parametrize("stage", ["front", "tail"])
def test_every_token_count_has_the_tiles_that_it_needs(kimi: Model, h200: DeviceFacts, stage: str) -> None:
    for tokens in range(193, 1101):
        plan = plan_of(kimi, h200, stage, tokens)
        gemm = plan.launches[-1]
        assert isinstance(gemm.form, GemmForm)
        columns = (FRONT_COLUMNS if stage == "front" else TAIL_COLUMNS)[gemm.form.block_n]
        tiles, parameters = count_pair_tiles(tokens, columns), dict(gemm.parameters)
        assert rule_of(plan, "tiles")[0] == tiles
        assert parameters["full_items"] + parameters["sk_total"] // gemm.form.num_k == tiles
        assert parameters["m_tiles"] == len(range(0, tokens, 128))


def test_rule_of_the_tiles_has_its_arithmetic(kimi: Model, h200: DeviceFacts) -> None:
    wide = with_tile(kimi, 224)
    assert rule_of(plan_of(wide, h200, "front", 512), "tiles") == (54, "2 pair rows * 27 columns of tiles")
    odd = "1 pair rows * 27 columns of tiles + ceil(27 / 2) of the lone row tile"
    assert rule_of(plan_of(wide, h200, "front", 384), "tiles") == (27 + 14, odd)


@pytest.mark.parametrize("stage", ["front", "tail"])
@pytest.mark.parametrize("block_n", FRONT_COLUMNS)
def test_lone_row_tile_costs_less_than_a_pair_row(kimi: Model, h200: DeviceFacts, stage: str, block_n: int) -> None:
    """In K iterations of all pairs, T = 257 to 384 against 385 to 512: three quarters, a last column aside."""
    model = with_tile(kimi, block_n)

    def iterations(tokens: int) -> int:
        gemm = plan_of(model, h200, stage, tokens).launches[-1]
        assert isinstance(gemm.form, GemmForm)
        parameters = dict(gemm.parameters)
        return parameters["full_items"] * gemm.form.num_k + parameters["sk_total"]

    columns = (FRONT_COLUMNS if stage == "front" else TAIL_COLUMNS)[block_n]
    for few, many in ((257, 385), (384, 512)):
        assert iterations(few) * 4 * columns == iterations(many) * (3 * columns + columns % 2)
