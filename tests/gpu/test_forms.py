"""Forms that this device does not plan by itself, adversarial timing, and models nobody chose.

`device_facts` of a smaller device reach the forms for few multiprocessors. A build with -DCAKEGEN_CHAOS sleeps, by a
seed, before waits, arrivals, copies and stores.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.gpu.cases import (
    BF16_TOLERANCE,
    TOKENS,
    Checks,
    FrontCase,
    TailCase,
    Weights,
    keys_of,
    make_weights,
    rendered_tree,
    run_twice,
    token_of_each_route,
)
from support.random_models import random_model

from cakegen.model import DeviceFacts
from cakegen.runtime import LatentMoe

DEGREES = (1, 2, 4, 8, 16)
SEEDS = range(1, 21)
Record = Callable[[str, object], None]


def check_routes(checks: Checks, moe: LatentMoe, weights: Weights, tp: int, label: str) -> set[str]:
    """Both stages at the edges of every route of one TP degree; returns the keys that ran."""
    keys: set[str] = set()
    front = FrontCase(moe, weights, tp, tp - 1)
    exact = front.expected()
    for tokens in {1, *token_of_each_route(front.prepare)}:
        runner = front.prepare(tokens)
        keys.update(keys_of(runner))
        values = run_twice(checks, front, runner, tokens, f"{label} T {tokens}")
        for name, value, expected, tolerance in zip(front.names, values, exact, front.tolerances, strict=True):
            checks.close(f"{label} T {tokens} {name}", value, expected[:tokens], tolerance)
    for partials in sorted({1, min(2, moe.model.max_partials)}):
        tail = TailCase(moe, weights, tp, tp - 1, partials)
        y, out = tail.expected()
        for tokens in {1, *token_of_each_route(tail.prepare)}:
            runner = tail.prepare(tokens)
            keys.update(keys_of(runner))
            where = f"{label} P {partials} T {tokens}"
            values = run_twice(checks, tail, runner, tokens, where)
            checks.equal(f"{where} y", values[0], y[:tokens])
            checks.close(f"{where} out", values[1], out[:tokens], BF16_TOLERANCE)
    return keys


@pytest.mark.parametrize("sm_count", [3, 6, 48, 78, 96, 114])
def test_forms_of_smaller_devices_match(
    moe: LatentMoe, weights: Weights, device: torch.device, sm_count: int, record_property: Record
) -> None:
    target = moe.model.target("sm_90a")
    assert target is not None
    if sm_count not in target.sm_counts:
        pytest.skip(f"{moe.model.name} is not exported for {sm_count} SMs")
    small = LatentMoe(moe.registry, device_facts=DeviceFacts.nominal("sm_90a", sm_count))
    checks, keys = Checks(), set()
    for tp in DEGREES:
        small.warm_up(device, tp, partials=(1, 2))
        keys |= check_routes(checks, small, weights, tp, f"{sm_count} SMs tp {tp}")
    if sm_count == 3:
        assert any(key.startswith("tail_norm:") for key in keys), "the two-launch tail was not reached"
    record_property("keys", len(keys))
    record_property("cases", checks.settle())


@pytest.mark.parametrize("tp", DEGREES)
def test_chaos_seeds_do_not_change_a_bit(
    moe: LatentMoe, weights: Weights, device: torch.device, tp: int, record_property: Record
) -> None:
    chaotic = LatentMoe(moe.registry, compile_flags=("-DCAKEGEN_CHAOS",))
    chaotic.warm_up(device, tp, partials=(1, 2))
    record = moe.wait_record(device)
    checks = Checks()
    cases = [FrontCase(moe, weights, tp), *(TailCase(moe, weights, tp, tp - 1, partials) for partials in (1, 2))]
    for case in cases:
        for tokens in token_of_each_route(case.prepare):
            calm = tuple(value.clone() for value in case.prepare(tokens)())
            runner = case.prepare(tokens, moe=chaotic)
            for seed in SEEDS:
                # a launch reads the seed when it runs, so the one before it must have ended
                torch.cuda.synchronize()
                record.write_chaos_seed(seed)
                case.poison()
                for name, value, expected in zip(case.names, runner(), calm, strict=True):
                    checks.equal(f"tp {tp} T {tokens} {name} seed {seed}", value, expected)
    torch.cuda.synchronize()
    record.write_chaos_seed(0)
    record_property("cases", checks.settle())


@pytest.mark.parametrize("seed", range(20))
def test_random_model_matches(seed: int, device: torch.device, tmp_path: Path, record_property: Record) -> None:
    model = random_model(seed)
    registry = rendered_tree(model, tmp_path)
    weights = make_weights(model, device, seed)
    checks = Checks()
    target = model.target("sm_90a")
    assert target is not None
    for sm_count in target.sm_counts:
        moe = LatentMoe(registry, device_facts=DeviceFacts.nominal("sm_90a", sm_count))
        for tp in target.tp_degrees:
            moe.warm_up(
                device, tp, tokens=(1, 5, 9, 17, 40, 100, TOKENS), partials=sorted({1, min(2, model.max_partials)})
            )
            for tokens in (1, 5, 9, 17, 40, 100, TOKENS):
                check_random(checks, moe, weights, tp, tokens, f"seed {seed} {sm_count} SMs tp {tp} T {tokens}")
    record_property("cases", checks.settle())


def check_random(checks: Checks, moe: LatentMoe, weights: Weights, tp: int, tokens: int, label: str) -> None:
    """One token count of both stages."""
    front = FrontCase(moe, weights, tp)
    values = run_twice(checks, front, front.prepare(tokens), tokens, label)
    for name, value, expected, tolerance in zip(front.names, values, front.expected(), front.tolerances, strict=True):
        checks.close(f"{label} {name}", value, expected[:tokens], tolerance)
    for partials in sorted({1, min(2, moe.model.max_partials)}):
        tail = TailCase(moe, weights, tp, tp - 1, partials)
        y, out = tail.expected()
        values = run_twice(checks, tail, tail.prepare(tokens), tokens, f"{label} P {partials}")
        checks.equal(f"{label} P {partials} y", values[0], y[:tokens])
        checks.close(f"{label} P {partials} out", values[1], out[:tokens], BF16_TOLERANCE)
