"""Calls inside a graph capture, on a fake machine: warm ones work, cold ones are refused before the driver."""

from __future__ import annotations

import pytest
from support.runtime.fakes import Machine
from support.runtime.prepare import prepare_front, prepare_tail

from cakegen.errors import LaunchError
from cakegen.registry import Registry
from cakegen.runtime import LatentMoe


@pytest.mark.parametrize("capturing", [False, True])
def test_no_tokens_launch_nothing_and_ask_no_driver(machine: Machine, tiny_registry: Registry, capturing: bool) -> None:
    machine.capturing = capturing
    moe = LatentMoe(tiny_registry)
    logits, latent, shared_act = prepare_front(moe, tokens=0)()
    assert (logits.shape, latent.shape, shared_act.shape) == ((0, 384), (0, 512), (0, 512))
    prepare_tail(moe, tokens=0)()
    assert machine.driver.calls == []


def test_cold_prepare_in_a_capture_is_refused_before_the_driver(machine: Machine, tiny_registry: Registry) -> None:
    machine.capturing = True
    with pytest.raises(
        LaunchError, match="front: cuda:0 was not used before, and the current stream is being captured"
    ):
        prepare_front(LatentMoe(tiny_registry))
    assert machine.driver.calls == []
    assert machine.compiler.compiled == []


def test_cold_program_in_a_capture_is_refused_before_the_driver(machine: Machine, tiny_registry: Registry) -> None:
    moe = LatentMoe(tiny_registry)
    prepare_front(moe)
    machine.capturing = True
    machine.driver.calls.clear()
    with pytest.raises(LaunchError, match=r"tail: decode:.* not loaded on cuda:0.*Add before the capture") as error:
        prepare_tail(moe, partials=2)
    assert machine.driver.calls == []
    machine.capturing = False
    # the line that the error gives is the whole remedy
    line = str(error.value).partition("before the capture: ")[2].partition(", where moe is")[0]
    eval(line, {"moe": moe})
    machine.capturing = True
    prepare_tail(moe, partials=2)()


def test_warm_prepare_and_run_work_inside_a_capture(machine: Machine, tiny_registry: Registry) -> None:
    moe = LatentMoe(tiny_registry)
    keys = moe.warm_up("cuda:0", 2, tokens=(5, 64), partials=(1, 2))
    assert sorted(keys) == sorted(set(machine.compiler.compiled))
    machine.capturing = True
    compiled = len(machine.compiler.compiled)
    prepare_front(moe)()
    runner = prepare_tail(moe, partials=2)
    runner()
    assert len(machine.compiler.compiled) == compiled
    assert runner._words is None or runner._words.captured


def test_route_planned_again_is_warm_in_a_capture(machine: Machine, tiny_registry: Registry) -> None:
    machine.driver.resident_clusters = 1
    moe = LatentMoe(tiny_registry)
    first = prepare_tail(moe)
    machine.capturing = True
    machine.driver.calls.clear()
    assert prepare_tail(moe).plan == first.plan
    assert not [call for call in machine.driver.calls if call.startswith(("cuLibrary", "cuOccupancy"))]
