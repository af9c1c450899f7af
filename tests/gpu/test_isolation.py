"""Decode rows do not touch each other, and a graph replay is the same computation on new values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.gpu.cases import Checks, FrontCase, TailCase, Weights, token_of_each_route
from support.gpu.checks import check_front_bad_row, check_replay, check_tail_bad_row

from cakegen.runtime import LatentMoe

DEGREES = (1, 2, 4, 8, 16)
BAD = (float("nan"), float("inf"))
Record = Callable[[str, object], None]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("tp", DEGREES)
def test_front_bad_row_stays_alone(
    moe: LatentMoe, weights: Weights, tp: int, bad: float, record_property: Record
) -> None:
    checks, case = Checks(), FrontCase(moe, weights, tp)
    for tokens in token_of_each_route(case.prepare):
        check_front_bad_row(checks, case, tokens, tokens // 2, bad, f"tp {tp} T {tokens}")
    record_property("cases", checks.settle())


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("partials", [1, 2])
@pytest.mark.parametrize("tp", DEGREES)
def test_tail_bad_row_stays_alone(
    moe: LatentMoe, weights: Weights, tp: int, partials: int, bad: float, record_property: Record
) -> None:
    checks, case = Checks(), TailCase(moe, weights, tp, tp - 1, partials)
    for tokens in token_of_each_route(case.prepare):
        check_tail_bad_row(checks, case, tokens, tokens // 2, bad, f"tp {tp} P {partials} T {tokens}")
    record_property("cases", checks.settle())


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("tp", [1, 8, 16])
def test_graph_replay_computes_new_values_in_the_same_buffers(
    moe: LatentMoe, weights: Weights, tp: int, mode: str, record_property: Record
) -> None:
    checks = Checks()
    front = FrontCase(moe, weights, tp)
    tails = [TailCase(moe, weights, tp, 0, partials) for partials in (1, 2)]
    x, routed, shared_act = weights.x.clone(), weights.routed.clone(), weights.shared_act.clone()
    width = moe.model.dims.i_local(tp)
    for tokens in token_of_each_route(front.prepare):
        label = f"tp {tp} T {tokens} front"
        check_replay(checks, front, front.prepare(tokens, x=x), [(x, weights.other_x)], mode, label)
    for tail in tails:
        partials = tail.routed.shape[0]
        own = {"routed": routed[:partials], "shared_act": shared_act[:, :width]}
        for tokens in token_of_each_route(tail.prepare):
            changes = [(routed, weights.routed.flip(1)), (shared_act, weights.shared_act.flip(0))]
            label = f"tp {tp} P {partials} T {tokens} tail"
            check_replay(checks, tail, tail.prepare(tokens, **own), changes, mode, label)
    record_property("cases", checks.settle())
