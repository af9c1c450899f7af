"""Prefill plans of the product's model on SM100."""

from __future__ import annotations

import dataclasses

import pytest

from cakegen.errors import PlanError
from cakegen.model import DeviceFacts, Model
from cakegen.plan import GemmForm, Launch, plan_route

KEYS = {
    "front:i6144",
    "front:i6144e1",
    "front:i768",
    "front:i768e1",
    "tail_norm:e0",
    "tail_norm:e1",
    "tail_gemm:tp1e0f0t1",
    "tail_gemm:tp1e1f1t1",
    "tail_gemm:tp1e1f1s6t1",
    "tail_gemm:tp8e0f0t1",
    "tail_gemm:tp8e1f0t1",
    "tail_gemm:tp8e0f0s9n128",
}


def launches(model: Model, device: DeviceFacts, stage: str, tp: int, tokens: int) -> tuple[Launch, ...]:
    return plan_route(model, stage=stage, tp=tp, tokens=tokens, partials=1, device=device).launches


def test_every_prefill_request_gives_one_of_the_12_keys(kimi: Model, b200: DeviceFacts) -> None:
    reached = {
        launch.key
        for stage in ("front", "tail")
        for tp in (1, 8)
        for tokens in range(129, 16385)
        for launch in launches(kimi, b200, stage, tp, tokens)
    }
    assert reached == KEYS


@pytest.mark.parametrize(
    ("tp", "tokens", "keys"),
    [
        (1, 129, ["tail_gemm:tp1e1f1s6t1"]),
        (1, 256, ["tail_gemm:tp1e1f1s6t1"]),
        (1, 257, ["tail_gemm:tp1e1f1t1"]),
        (1, 512, ["tail_gemm:tp1e1f1t1"]),
        (1, 513, ["tail_norm:e1", "tail_gemm:tp1e0f0t1"]),
        (8, 129, ["tail_norm:e1", "tail_gemm:tp8e1f0t1"]),
        (8, 257, ["tail_norm:e0", "tail_gemm:tp8e1f0t1"]),
        (8, 511, ["tail_norm:e0", "tail_gemm:tp8e1f0t1"]),
        (8, 512, ["tail_norm:e1", "tail_gemm:tp8e0f0s9n128"]),
        (8, 513, ["tail_norm:e1", "tail_gemm:tp8e0f0t1"]),
        (8, 16384, ["tail_norm:e1", "tail_gemm:tp8e0f0t1"]),
    ],
)
def test_tail_gives_published_keys(kimi: Model, b200: DeviceFacts, tp: int, tokens: int, keys: list[str]) -> None:
    assert [launch.key for launch in launches(kimi, b200, "tail", tp, tokens)] == keys


@pytest.mark.parametrize(("tokens", "key"), [(129, "front:i768e1"), (512, "front:i768e1"), (513, "front:i768")])
def test_front_streams_weights_evict_first_up_to_two_pair_rows(
    kimi: Model, b200: DeviceFacts, tokens: int, key: str
) -> None:
    assert [launch.key for launch in launches(kimi, b200, "front", 8, tokens)] == [key]


def test_front_launch_has_its_parameters_and_constants(kimi: Model, b200: DeviceFacts) -> None:
    # 2 m tiles are one pair row of 4 + 14 + 6 = 24 tiles
    (launch,) = launches(kimi, b200, "front", 8, 129)
    assert launch.grid_ctas == (96, 1, 1)
    assert dict(launch.parameters) == {
        "m_tiles": 2,
        "num_items": 48,
        "full_items": 0,
        "sk_ipc": 56,
        "sk_max_seg": 2,
        "sk_total": 24 * 112,
    }
    assert isinstance(launch.form, GemmForm)
    assert launch.form.constants == (("I_LOCAL", 768), ("N_TILES", 24), ("S_TILES", 6))


def test_tail_launches_have_their_grids_and_constants(kimi: Model, b200: DeviceFacts) -> None:
    norm, gemm = launches(kimi, b200, "tail", 1, 1000)
    assert (norm.grid_ctas, gemm.grid_ctas) == ((250, 1, 1), (2 * 148, 1, 1))
    assert dict(gemm.parameters)["m_tiles"] == 8
    assert isinstance(gemm.form, GemmForm)
    assert gemm.form.constants == (("K1_ITERS", 56), ("K2_ITERS", 96), ("NUM_K_ITERS", 152))


@pytest.mark.parametrize(("tokens", "tiles"), [(4096, 448), (8192, 896)])
def test_tail_keeps_whole_tiles_at_152_sms(kimi: Model, tokens: int, tiles: int) -> None:
    gemm = launches(kimi, DeviceFacts.nominal("sm_100a", 152), "tail", 1, tokens)[-1]
    parameters = dict(gemm.parameters)
    assert (parameters["num_items"], parameters["sk_total"]) == (tiles, 0)


def test_one_text_serves_both_sm100_architectures(kimi: Model) -> None:
    for stage in ("front", "tail"):
        plans = [
            launches(kimi, DeviceFacts.nominal(arch, 148), stage, 8, tokens)
            for tokens in (16, 300)
            for arch in ("sm_100a", "sm_103a")
        ]
        assert plans[0] == plans[1]
        assert plans[2] == plans[3]


def test_every_prefill_decision_names_its_rule(kimi: Model, b200: DeviceFacts) -> None:
    plan = plan_route(kimi, stage="tail", tp=8, tokens=300, partials=1, device=b200)
    gemm = plan.launches[-1]
    chosen = {"block_n", "num_stages", "staged_store", "evict_first", "fused_norm"}
    expected = chosen | {name for name, _ in gemm.parameters} | {"grid_ctas", "norm.early_trigger"}
    assert {rule.field for rule in plan.rules} == expected
    values = {**dict(gemm.parameters), **{name: getattr(gemm.form, name) for name in chosen}}
    for rule in plan.rules:
        assert rule.reason
        assert values.get(rule.field, rule.value) == rule.value


def test_prefill_refuses_a_device_without_pairs(kimi: Model, b200: DeviceFacts) -> None:
    lone = dataclasses.replace(b200, resident_pairs=0)
    with pytest.raises(PlanError, match=r"0 resident pairs \(148 SMs\); it needs at least 1"):
        launches(kimi, lone, "front", 8, 129)
