"""Requests: which are refused, and that a plan is remembered and pure."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
from support.call_counts import calls_of
from support.models import kimi_k3_model

from cakegen.errors import PlanError
from cakegen.model import DeviceFacts, Model
from cakegen.plan import plan_route

REQUEST: dict[str, Any] = {"stage": "tail", "tp": 8, "tokens": 16, "partials": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage": "middle"}, "stage 'middle' is unknown; stages: front, tail"),
        ({"tp": 3}, "TP 3 is not exported for sm_90a; it is for TP 1, 2, 4, 8, 16"),
        ({"tp": 0}, "TP 0 is not exported"),
        ({"tokens": 0}, r"T = 0 is outside 1 … 16384"),
        ({"tokens": 16385}, r"T = 16385 is outside 1 … 16384. .*raise requests.max_tokens"),
        ({"partials": 0}, r"P = 0 is outside 1 … 64"),
        ({"partials": 65}, r"P = 65 is outside 1 … 64"),
    ],
)
def test_plan_refuses_request_outside_the_export(
    kimi: Model, h200: DeviceFacts, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        plan_route(kimi, **{**REQUEST, **change}, device=h200)


def test_plan_refuses_tp_that_only_another_architecture_has(kimi: Model, b200: DeviceFacts) -> None:
    fewer = dataclasses.replace(kimi.targets[1], tp_degrees=(1, 8))
    model = dataclasses.replace(kimi, targets=(kimi.targets[0], fewer))
    with pytest.raises(PlanError, match="TP 16 is not exported for sm_100a; it is for TP 1, 8"):
        plan_route(model, **{**REQUEST, "tp": 16}, device=b200)


@pytest.mark.parametrize(("arch", "message"), [("sm_80", "'sm_80' is not supported"), ("sm_103a", "is not exported")])
def test_plan_refuses_architecture_outside_the_export(kimi: Model, arch: str, message: str) -> None:
    hopper_only = dataclasses.replace(kimi, targets=kimi.targets[:1])
    with pytest.raises(PlanError, match=message):
        plan_route(hopper_only, **REQUEST, device=DeviceFacts(arch, 132, 66, 232448))


def test_plan_refuses_a_device_without_sms(kimi: Model) -> None:
    with pytest.raises(PlanError, match="0 SMs"):
        plan_route(kimi, **REQUEST, device=DeviceFacts("sm_90a", 0, 0, 232448))


def test_front_ignores_partials(kimi: Model, h200: DeviceFacts) -> None:
    one = plan_route(kimi, stage="front", tp=8, tokens=16, partials=1, device=h200)
    many = plan_route(kimi, stage="front", tp=8, tokens=16, partials=1000, device=h200)
    assert one is many
    assert one.partials == 1


def test_equal_requests_share_one_plan(kimi: Model, h200: DeviceFacts) -> None:
    again = plan_route(kimi_k3_model(), **REQUEST, device=DeviceFacts.nominal("sm_90a", 132))
    assert plan_route(kimi, **REQUEST, device=h200) is again


def test_plan_depends_on_nothing_but_its_arguments(kimi: Model, h200: DeviceFacts) -> None:
    from cakegen.plan import route

    remembered = plan_route(kimi, **REQUEST, device=h200)
    route._plan.cache_clear()
    fresh = plan_route(kimi, **REQUEST, device=h200)
    assert fresh == remembered
    assert fresh is not remembered


def test_planning_takes_as_many_calls_whatever_the_number_of_tokens() -> None:
    """Nothing in it counts tokens or tiles one by one: 16384 tokens are planned as fast as 1024."""
    device = DeviceFacts.nominal("sm_90a", 130)
    plan = partial(plan_route, kimi_k3_model(), stage="tail", tp=2, partials=1, device=device)

    def most_calls(counts: range) -> int:
        return max(calls_of(partial(plan, tokens=tokens)) for tokens in counts)

    assert most_calls(range(12_000, 16_385, 97)) < 2 * most_calls(range(513, 1025, 37)) < 10_000
