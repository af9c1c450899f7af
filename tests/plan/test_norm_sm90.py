"""The norm of a Hopper prefill tail: where it runs, what it costs, and which rows come before the first tile."""

from __future__ import annotations

import pytest
from support.models import changed, hopper, kimi_k3_model, short_decode, with_tile

from cakegen.model import DeviceFacts, Model
from cakegen.plan import GemmForm, NormForm, Plan, plan_route
from cakegen.plan.norm_sm90 import can_fuse_norm, norm_cost_iters, norm_first_rows

# (TP, T) of one partial -> columns of a tile, num_items, full_items, sk_ipc, sk_max_seg, cut tiles, grid in CTAs, rows
# normalised first (None: the norm is a launch of its own); 66 pairs
EXAMPLES = {
    (1, 256): (224, 64, 0, 76, 2, 32, 128, 0),
    (1, 512): (224, 64, 64, 152, 1, 0, 128, 0),
    (1, 768): (192, 130, 66, 114, 2, 48, 132, 0),
    (1, 1024): (224, 128, 128, 152, 1, 0, 132, 0),
    (1, 2048): (224, 256, 256, 152, 1, 0, 132, 0),
    (1, 4096): (256, 448, 448, 152, 1, 0, 132, 0),
    (1, 8192): (256, 924, 858, 88, 3, 38, 132, 0),
    (8, 256): (128, 56, 56, 19, 1, 0, 112, None),
    (8, 512): (224, 64, 64, 19, 1, 0, 128, 512),
    (8, 1024): (224, 128, 128, 19, 1, 0, 132, 628),
    (8, 2048): (128, 448, 448, 19, 1, 0, 132, None),
    (8, 4096): (256, 448, 448, 19, 1, 0, 132, 1652),
    (8, 16384): (256, 1792, 1792, 19, 1, 0, 132, 1652),
    (16, 256): (144, 50, 50, 10, 1, 0, 100, 256),
    (16, 512): (224, 64, 64, 10, 1, 0, 128, 512),
}


@pytest.fixture
def kimi() -> Model:
    """As prefill, what decode could serve too."""
    return short_decode(kimi_k3_model())


def plan_tail(model: Model, device: DeviceFacts, tp: int, tokens: int, partials: int) -> Plan:
    return plan_route(model, stage="tail", tp=tp, tokens=tokens, partials=partials, device=device)


def rule_of(plan: Plan, field: str) -> tuple[object, str]:
    (rule,) = (rule for rule in plan.rules if rule.field == field)
    return rule.value, rule.reason


@pytest.mark.parametrize("request_shape", EXAMPLES, ids=str)
def test_plan_of_one_partial_gives_the_pinned_items(
    kimi: Model, h200: DeviceFacts, request_shape: tuple[int, int]
) -> None:
    gemm = plan_tail(kimi, h200, *request_shape, partials=1).launches[-1]
    assert isinstance(gemm.form, GemmForm)
    parameters = dict(gemm.parameters)
    cut = parameters["sk_total"] // gemm.form.num_k
    items = tuple(parameters[name] for name in ("num_items", "full_items", "sk_ipc", "sk_max_seg"))
    first_rows = parameters.get("norm_first_rows")
    assert (gemm.form.block_n, *items, cut, gemm.grid_ctas[0], first_rows) == EXAMPLES[request_shape]
    assert gemm.form.fused_norm == ("norm_first_rows" in parameters)


def test_norm_is_fused_for_one_partial_and_shared_tiles_only(kimi: Model, h200: DeviceFacts) -> None:
    for tile in hopper(kimi).prefill.tiles:
        shared = tile.block_n > 128
        assert can_fuse_norm(tile, 300, 1) is shared
        assert not can_fuse_norm(tile, 300, 2)
        # 1023 pair rows of 256 tokens and one more word fill the 1024
        assert can_fuse_norm(tile, 1023 * 256, 1) is shared
        assert not can_fuse_norm(tile, 1023 * 256 + 1, 1)
        for partials in (1, 2):
            plan = plan_tail(with_tile(kimi, tile.block_n), h200, 8, 700, partials)
            gemm = plan.launches[-1].form
            assert isinstance(gemm, GemmForm)
            assert gemm.fused_norm is (shared and partials == 1)
            assert rule_of(plan, "fused_norm")[0] is gemm.fused_norm
            others = [launch.form for launch in plan.launches[:-1]]
            assert others == ([] if gemm.fused_norm else [NormForm(rows_per_cta=4, early_trigger=True)])


def test_rule_of_the_norm_says_what_it_lacks(kimi: Model, h200: DeviceFacts) -> None:
    def reason(block_n: int, partials: int) -> str:
        return rule_of(plan_tail(with_tile(kimi, block_n), h200, 8, 700, partials), "fused_norm")[1]

    assert reason(224, 1).startswith("P = 1 (needs 1: ")
    assert "warpgroups share its tiles (needs them shared" in reason(224, 1)
    assert reason(224, 3).startswith("P = 3 (needs 1: sums of several take more registers)")
    assert "warpgroups take turns with its tiles (needs them shared" in reason(128, 1)


@pytest.mark.parametrize(
    ("down", "tokens", "rows"),
    [
        (0, 5000, 2048),
        (12, 2048, 1652),  # 2048 - 12 * 33
        (48, 5000, 464),
        (63, 5000, 0),
        (12, 641, 245),
        (12, 640, 640),  # few rows, few iterations
        (47, 640, 640),
        (48, 640, 0),
        (24, 700, 0),
    ],
)
def test_rows_come_first_unless_iterations_hide_them(kimi: Model, down: int, tokens: int, rows: int) -> None:
    """16 row tiles of 128 are the first ones of all pairs; an iteration hides 33 rows."""
    assert norm_first_rows(down, tokens, hopper(kimi).prefill) == rows


@pytest.mark.parametrize(
    ("block_n", "down", "tokens", "partials", "iters"),
    [
        (256, 12, 129, 1, 5),  # 4 + ceil(129 / 140)
        (256, 12, 2048, 1, 16),  # 4 + ceil(1652 / 140)
        (224, 12, 16384, 1, 16),  # of the first 2048 rows only
        (192, 96, 16384, 1, 0),  # hidden
        (256, 12, 129, 2, 4),  # 3 + ceil(129 / 170)
        (256, 96, 16384, 2, 100),  # 3 + ceil(16384 / 170), however many iterations there are
        (128, 96, 170, 1, 4),  # turns: in a launch of its own
        (128, 96, 171, 1, 5),
    ],
)
def test_norm_costs_what_the_export_says(
    kimi: Model, block_n: int, down: int, tokens: int, partials: int, iters: int
) -> None:
    (tile,) = (tile for tile in hopper(kimi).prefill.tiles if tile.block_n == block_n)
    assert norm_cost_iters(tile, down, tokens, partials, hopper(kimi).prefill) == iters


def test_norms_cost_takes_another_tile(kimi: Model, h200: DeviceFacts) -> None:
    """TP 8, 256 tokens: tiles in turns are the cheapest, unless a launch of the norm costs much."""
    cheap, dear = (changed(kimi, hopper__prefill__norm__launch_iters=iters) for iters in (0, 40))
    for model, block_n in ((cheap, 128), (dear, 144)):
        form = plan_tail(model, h200, 8, 256, 1).launches[-1].form
        assert isinstance(form, GemmForm)
        assert form.block_n == block_n
    # both of two partials pay for it
    assert plan_tail(dear, h200, 8, 256, 2).launches == plan_tail(cheap, h200, 8, 256, 2).launches


def test_rule_of_the_first_rows_has_its_arithmetic(kimi: Model, h200: DeviceFacts) -> None:
    some, none = plan_tail(kimi, h200, 8, 1024, 1), plan_tail(kimi, h200, 1, 512, 1)
    value, reason = rule_of(some, "norm_first_rows")
    assert (value, reason) == (
        628,
        "1024 rows of the first 16 row tiles of 128 - 12 shared-down iterations * 33 normalised beside them, at least"
        " 0; all of fewer than 641 with fewer than 48 iterations",
    )
    value, reason = rule_of(none, "norm_first_rows")
    assert (value, reason[:34]) == (0, "512 rows of the first 16 row tiles")
