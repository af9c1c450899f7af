"""Requests that reach a program, and operands that are the same on every machine."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
import torch

from cakegen.emulator.launches.cases import Case, find_case, find_cases, make_operands
from cakegen.registry import Registry


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
