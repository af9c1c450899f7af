"""Rows do not touch each other, and a graph replay is the same computation on new values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_cases import Case, Checks, FrontCase, TailCase, Weights, token_of_each_route

from cakegen.runtime import LatentMoe
from cakegen.runtime.runner import Runner

DEGREES = (1, 2, 4, 8, 16)
Record = Callable[[str, object], None]


def copies(runner: Runner) -> tuple[torch.Tensor, ...]:
    return tuple(value.clone() for value in runner())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("tp", DEGREES)
def test_front_bad_row_stays_alone(
    moe: LatentMoe, weights: Weights, tp: int, bad: float, record_property: Record
) -> None:
    checks, case = Checks(), FrontCase(moe, weights, tp)
    for tokens in token_of_each_route(case.prepare):
        good = copies(case.prepare(tokens))
        x = weights.x.clone()
        row = tokens // 2
        x[row, 3] = bad
        poisoned = copies(case.prepare(tokens, x=x))
        check_only_row(checks, case, good, poisoned, row, f"tp {tp} T {tokens}", changed=(0, 1))
    record_property("cases", checks.settle())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("partials", [1, 2])
@pytest.mark.parametrize("tp", DEGREES)
def test_tail_bad_row_stays_alone(
    moe: LatentMoe, weights: Weights, tp: int, partials: int, bad: float, record_property: Record
) -> None:
    checks, case = Checks(), TailCase(moe, weights, tp, tp - 1, partials)
    for tokens in token_of_each_route(case.prepare):
        good = copies(case.prepare(tokens))
        row = tokens // 2
        routed, shared_act = case.routed.clone(), case.shared_act.clone()
        routed[partials - 1, row, -1] = bad
        poisoned = copies(case.prepare(tokens, routed=routed))
        label = f"tp {tp} P {partials} T {tokens}"
        check_only_row(checks, case, good, poisoned, row, f"{label} routed", changed=(0, 1))
        shared_act[row, 0] = bad
        poisoned = copies(case.prepare(tokens, shared_act=shared_act))
        check_only_row(checks, case, good, poisoned, row, f"{label} shared_act", changed=(1,))
    record_property("cases", checks.settle())


def check_only_row(
    checks: Checks,
    case: Case,
    good: tuple[torch.Tensor, ...],
    poisoned: tuple[torch.Tensor, ...],
    row: int,
    label: str,
    *,
    changed: tuple[int, ...],
) -> None:
    """All rows but one keep their bits; that one holds a non-finite value in the outputs named by `changed`."""
    for index, (name, before, after) in enumerate(zip(case.names, good, poisoned, strict=True)):
        keep = torch.arange(before.shape[0], device=before.device) != row
        checks.equal(f"{label} {name} other rows", after[keep], before[keep])
        if index in changed:
            checks.zero(f"{label} {name} bad row", after[row].isfinite().all().long())


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
        replay(checks, front, front.prepare(tokens, x=x), [(x, weights.other_x)], mode, f"tp {tp} T {tokens} front")
    for tail in tails:
        partials = tail.routed.shape[0]
        own = {"routed": routed[:partials], "shared_act": shared_act[:, :width]}
        for tokens in token_of_each_route(tail.prepare):
            changes = [(routed, weights.routed.flip(1)), (shared_act, weights.shared_act.flip(0))]
            label = f"tp {tp} P {partials} T {tokens} tail"
            replay(checks, tail, tail.prepare(tokens, **own), changes, mode, label)
    record_property("cases", checks.settle())


def replay(
    checks: Checks,
    case: Case,
    runner: Runner,
    changes: list[tuple[torch.Tensor, torch.Tensor]],
    mode: str,
    label: str,
) -> None:
    """Capture; replay; change the inputs in place; replay twice; compare with plain launches on the same values."""
    before = copies(runner)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        runner()
    originals = [buffer.clone() for buffer, _ in changes]
    case.poison()
    graph.replay()
    for name, value, expected in zip(case.names, runner.outputs, before, strict=True):
        checks.equal(f"{label} {name} replay", value, expected)
    for buffer, values in changes:
        buffer.copy_(values)
    expected_after = copies(runner)
    for turn in (1, 2):
        case.poison()
        graph.replay()
        for name, value, expected in zip(case.names, runner.outputs, expected_after, strict=True):
            checks.equal(f"{label} {name} new values {turn}", value, expected)
    assert not any(torch.equal(*pair) for pair in zip(before, expected_after, strict=True)), f"{label}: stale inputs"
    for (buffer, _), original in zip(changes, originals, strict=True):
        buffer.copy_(original)
