"""The launch path on fake Blackwell parts: the same checks as on Hopper, by the device's own facts and programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.models import tiny_model
from support.runtime.fakes import FakeTensor, Machine
from support.runtime.operands import front_operands, tail_operands

from cakegen.errors import LaunchError
from cakegen.registry import Registry
from cakegen.runtime import LatentMoe

MODEL = tiny_model()
PARTS = {"sm_100a": ((10, 0), 148), "sm_103a": ((10, 3), 152)}


def on_gpu(operands: dict[str, Any]) -> dict[str, Any]:
    return {name: FakeTensor(tensor, 0) for name, tensor in operands.items()}


def become(machine: Machine, arch: str) -> None:
    machine.driver.capability, machine.driver.sm_count = PARTS[arch]
    machine.driver.resident_clusters = machine.driver.sm_count // 2


@pytest.mark.parametrize("arch", PARTS)
def test_programs_of_the_device_are_launched(machine: Machine, tiny_registry: Registry, arch: str) -> None:
    become(machine, arch)
    moe = LatentMoe(tiny_registry)
    front = moe.prepare_front(**on_gpu(front_operands(MODEL, 8, 128)))
    tail = moe.prepare_tail(**on_gpu(tail_operands(MODEL, 8, 128, 2)), tp=8, rank=3)
    front()
    tail()
    for runner, launched in zip((front, tail), machine.driver.launches, strict=True):
        (planned,) = runner.plan.launches
        program = tiny_registry.program(planned.key)
        assert "@" not in planned.key
        assert arch in program.arches
        assert (launched.symbol, launched.grid_ctas) == (program.kernel_symbol, planned.grid_ctas)
        assert planned.form.n_pad == 128


def test_tokens_choose_the_tile_that_holds_them(machine: Machine, tiny_registry: Registry) -> None:
    become(machine, "sm_100a")
    moe = LatentMoe(tiny_registry)
    for tokens, n_pad in ((8, 8), (9, 16), (17, 32), (64, 64), (65, 128)):
        runner = moe.prepare_front(**on_gpu(front_operands(MODEL, 8, tokens)))
        assert runner.plan.launches[0].form.n_pad == n_pad


def test_grid_that_waits_for_itself_but_is_not_resident_is_planned_again(
    machine: Machine, tiny_registry: Registry
) -> None:
    become(machine, "sm_103a")
    machine.driver.resident_clusters = 1
    moe = LatentMoe(tiny_registry)
    runner = moe.prepare_tail(**on_gpu(tail_operands(MODEL, 8, 64)), tp=8, rank=0)
    waiting = [launch.form for launch in runner.plan.launches if launch.form.needs_residency]
    assert [form.cluster_ctas for form in waiting] == [1]


@pytest.mark.parametrize("arch", PARTS)
def test_prefill_is_launched_a_pair_an_item(machine: Machine, tiny_registry: Registry, arch: str) -> None:
    """A front; a tail that normalises itself, whose whole grid is resident; a norm, and the GEMM behind it."""
    become(machine, arch)
    moe = LatentMoe(tiny_registry)
    runners = [
        moe.prepare_front(**on_gpu(front_operands(MODEL, 8, 129))),
        moe.prepare_tail(**on_gpu(tail_operands(MODEL, 1, 129)), tp=1, rank=0),
        moe.prepare_tail(**on_gpu(tail_operands(MODEL, 8, 129, 2)), tp=8, rank=3),
    ]
    for runner in runners:
        runner()
    planned = [launch for runner in runners for launch in runner.plan.launches]
    records = [tiny_registry.program(launch.key) for launch in planned]
    assert [record.role for record in records] == ["front_gemm", "tail_gemm", "tail_norm", "tail_gemm"]
    attributes = [(record.launch.cooperative, record.launch.programmatic) for record in records]
    assert attributes == [(False, False), (True, False), (False, False), (False, True)]
    assert [launched.grid_ctas for launched in machine.driver.launches] == [launch.grid_ctas for launch in planned]
    for launch, record in zip(planned, records, strict=True):
        if record.role != "tail_norm":
            assert launch.grid_ctas[0] == 2 * dict(launch.parameters)["num_items"]


def test_tail_that_normalises_itself_is_planned_again_where_it_is_not_resident(
    machine: Machine, tiny_registry: Registry
) -> None:
    """The driver counts fewer pairs than half of the SMs; two tiles are then no wave, and the norm runs apart."""
    become(machine, "sm_100a")
    machine.driver.resident_clusters = 1
    runner = LatentMoe(tiny_registry).prepare_tail(**on_gpu(tail_operands(MODEL, 1, 129)), tp=1, rank=0)
    assert [tiny_registry.program(launch.key).role for launch in runner.plan.launches] == ["tail_norm", "tail_gemm"]
    assert runner.plan.device.resident_pairs == 1


def test_prefill_without_programs_is_refused_with_its_key(machine: Machine, tiny_registry: Registry) -> None:
    become(machine, "sm_100a")
    decode = {key: name for key, name in tiny_registry.kernels.items() if key.startswith("decode:")}
    moe = LatentMoe(dataclasses.replace(tiny_registry, kernels=decode))
    assert moe.program_available("cuda:0", "front", 8, 128)
    assert not moe.program_available("cuda:0", "front", 8, 129)
    with pytest.raises(LaunchError, match=r"148 SMs, 74 resident pairs\) needs front:"):
        moe.prepare_front(**on_gpu(front_operands(MODEL, 8, 129)))
