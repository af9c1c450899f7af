"""Requests that reach a program, and operands that are the same on every machine."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
import torch

from cakegen.emulator.launches.cases import Case, compare_outputs, find_case, find_cases, make_operands
from cakegen.model import Model
from cakegen.registry import Registry
from cakegen.runtime.reference import reference_outputs


def test_cases_of_several_keys_are_those_of_each(registry: Registry) -> None:
    # programs of the largest requests are found soonest
    keys = [key for key in registry.kernels if key.startswith("decode:tail_") and "_n128_" in key][:3]
    found = find_cases(registry, keys)
    assert len(found) == 3
    assert found == {key: find_case(registry, key) for key in keys}
    for key, case in found.items():
        assert key in [launch.key for launch in case.plan(registry.model).launches]


def test_tile_that_no_request_takes_by_itself_is_taken_all_the_same(registry: Registry) -> None:
    """Three tiles of 224 columns or three of 192 hold 512: the wider are never the cheaper, and are registered."""
    (key,) = (key for key in registry.kernels if key.startswith("tail_gemm:tp8s4n224"))
    case = find_case(registry, key)
    assert case.tile is not None
    assert case.tile.block_n == 224
    assert case.plan(registry.model).launches[-1].key == key
    assert dataclasses.replace(case, tile=None).plan(registry.model).launches[-1].key != key


@pytest.mark.parametrize(
    ("case", "name", "digest"),
    [
        (Case("front", 8, 5), "x", "530a6d0893ba260d"),
        (Case("tail", 8, 5, partials=2), "shared_down_weight", "e5e071d4044e0ef0"),
    ],
    ids=["front", "tail"],
)
def test_operands_have_the_same_bits_on_every_machine(registry: Registry, case: Case, name: str, digest: str) -> None:
    """What a device computed can be compared elsewhere only if its inputs can be made there."""
    value = make_operands(registry.model, case, seed=3)[name]
    bits = value.contiguous().view(torch.int16).numpy().tobytes()
    assert hashlib.sha256(bits).hexdigest()[:16] == digest


def test_operands_have_mean_0_and_products_of_order_1(registry: Registry) -> None:
    operands = make_operands(registry.model, Case("front", 1, 64))
    x, weight = operands["x"].float(), operands["gate_weight"].float()
    assert abs(x.mean()) < 0.02
    assert 0.98 < x.std() < 1.02
    assert 0.9 < (x @ weight.T).std() < 1.1


def answered(model: Model, case: Case) -> dict[str, torch.Tensor]:
    """Operands whose outputs hold what the reference gives, rounded as the contract says."""
    operands = make_operands(model, case)
    results = reference_outputs(case.stage, model.dims, operands, tp=case.tp, rank=case.rank)
    return operands | {spec.name: results[spec.short] for spec in model.dims.stages[case.stage].outputs}


@pytest.mark.parametrize("stage", ["front", "tail"])
def test_right_outputs_take_a_share_of_their_tolerance(registry: Registry, stage: str) -> None:
    case = Case(stage, 8, 2)
    for each in compare_outputs(registry.model, case, answered(registry.model, case)):
        assert each.problem == ""
        assert each.values in (2 * 384, 2 * 512, 2 * 128)
        # a result that is rounded to bf16 is off by a part of 2^-8 at most, 39 % of 1 %
        assert each.share < 0.4
        assert (each.share == 0) == (each.output == "y")


@pytest.mark.parametrize(
    ("stage", "output", "shift", "problem"),
    [
        ("front", "logits", 1e-2, "logits is outside atol = rtol = 0.001: largest error 0.01"),
        ("front", "latent", 0.5, "latent is outside atol = rtol = 0.01: largest error 0."),
        ("front", "shared_act", 0.5, "shared_act is outside atol = rtol = 0.01: largest error 0."),
        ("tail", "out", float("nan"), "out is outside atol = rtol = 0.01: largest error nan"),
        ("tail", "y_workspace", 0.5, "1 of 1024 elements of y differ from the reference's bits"),
    ],
)
def test_one_wrong_value_is_a_problem(registry: Registry, stage: str, output: str, shift: float, problem: str) -> None:
    case = Case(stage, 8, 2)
    operands = answered(registry.model, case)
    operands[output][1, 7] += shift
    problems = [each.problem for each in compare_outputs(registry.model, case, operands) if each.problem]
    # `out` is compared with what follows from the y that was written
    assert problems[0].startswith(problem)
