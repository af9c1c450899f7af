"""Runners on a fake machine: their streams and contexts, their control words, and what they keep alive."""

from __future__ import annotations

import gc
import weakref

import pytest
from cuda.bindings import driver as real
from models import tiny_model
from runtime_fakes import CONTEXTS, Machine
from runtime_operands import front_operands
from runtime_prepare import on_gpu, prepare_front, prepare_tail

from cakegen.errors import LaunchError
from cakegen.registry import Registry
from cakegen.runtime import LatentMoe, control
from cakegen.runtime.runner import ProgramRunner

MODEL = tiny_model()


def test_runner_on_a_second_device_restores_the_first_context(machine: Machine, tiny_registry: Registry) -> None:
    runner = prepare_front(LatentMoe(tiny_registry), ordinal=1)
    machine.driver.set_context(CONTEXTS[0])
    runner()
    assert machine.driver.launches[0].context == CONTEXTS[1]
    assert machine.driver.context == CONTEXTS[0]


def test_runner_on_another_stream_waits_for_the_last_one(machine: Machine, tiny_registry: Registry) -> None:
    runner = prepare_tail(LatentMoe(tiny_registry))
    runner()
    runner()
    assert machine.driver.order == []
    machine.stream = 0x5EB
    runner()
    assert machine.driver.order == [("record", 0x5EA), ("wait", 0x5EB)]
    assert machine.driver.launches[-1].stream == 0x5EB
    runner()
    assert len(machine.driver.order) == 2


def test_runner_whose_last_stream_was_destroyed_waits_for_the_context(
    machine: Machine, tiny_registry: Registry
) -> None:
    runner = prepare_tail(LatentMoe(tiny_registry))
    runner()
    machine.stream = 0x5EB
    machine.driver.failures["cuStreamIsCapturing"] = real.CUresult.CUDA_ERROR_INVALID_HANDLE
    calls = len(machine.driver.calls)
    runner()
    assert machine.driver.calls[calls:].count("cuCtxSynchronize") == 1
    assert machine.driver.order == []
    assert [launch.stream for launch in machine.driver.launches] == [0x5EA, 0x5EB]
    runner()
    assert machine.driver.calls[calls:].count("cuCtxSynchronize") == 1
    # where the context itself is lost, the error is the context's
    machine.stream = 0x5EC
    machine.driver.failures["cuCtxSynchronize"] = real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(LaunchError, match=r"cuCtxSynchronize for stream 0x5eb, which was destroyed .* failed"):
        runner()
    assert len(machine.driver.launches) == 3


def test_runner_whose_order_was_refused_waits_at_the_next_call(machine: Machine, tiny_registry: Registry) -> None:
    runner = prepare_tail(LatentMoe(tiny_registry))
    runner()
    machine.stream = 0x5EB
    machine.driver.failures["cuEventCreate"] = real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(LaunchError, match="cuEventCreate failed: CUDA_ERROR_OUT_OF_MEMORY"):
        runner()
    machine.driver.failures.clear()
    runner()
    assert machine.driver.order == [("record", 0x5EA), ("wait", 0x5EB)]
    assert [launch.stream for launch in machine.driver.launches] == [0x5EA, 0x5EB]


def test_refusal_for_a_capture_is_not_taken_for_a_destroyed_stream(machine: Machine, tiny_registry: Registry) -> None:
    """The default stream can't be asked while a stream that waits for it is captured: the capture must survive that."""
    runner = prepare_tail(LatentMoe(tiny_registry))
    runner()
    machine.stream = 0x5EB
    machine.driver.captured_streams = {0xCA}
    machine.driver.failures["cuStreamIsCapturing"] = real.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    with pytest.raises(LaunchError, match=r"stream 0x5ea failed: CUDA_ERROR_STREAM_CAPTURE_IMPLICIT .* on one stream"):
        runner()
    assert machine.driver.broken_captures == set()
    machine.driver.failures.clear()
    runner()
    assert machine.driver.order == [("record", 0x5EA), ("wait", 0x5EB)]


def test_captures_take_no_part_in_the_order_of_streams(machine: Machine, tiny_registry: Registry) -> None:
    runner = prepare_tail(LatentMoe(tiny_registry))
    runner()
    machine.stream, machine.capturing = 0x5EB, True
    runner()
    assert machine.driver.order == []
    machine.capturing = False
    # what ran eagerly on 0x5EA, now captured by another thread, must not draw this stream into its capture
    machine.driver.captured_streams = {0x5EA}
    runner()
    assert machine.driver.order == []
    assert len(machine.driver.launches) == 3


def test_released_runner_keeps_no_tensor_and_still_launches(machine: Machine, tiny_registry: Registry) -> None:
    operands = on_gpu(front_operands(MODEL, 2, 5))
    kept = [weakref.ref(tensor) for tensor in operands.values()]
    runner = LatentMoe(tiny_registry).prepare_front(**operands)
    assert isinstance(runner, ProgramRunner)
    runner.release_operands()
    operands.clear()
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)
    assert runner() == ()
    assert len(machine.driver.launches) == 1


def test_dead_runner_gives_its_control_words_back(machine: Machine, tiny_registry: Registry) -> None:
    runner = prepare_tail(LatentMoe(tiny_registry))
    owner = control.opened_control(0)
    assert owner is not None
    assert runner._words is not None
    address = runner._words.address
    machine.stream = 0x5EB
    runner()
    del runner
    gc.collect()
    (small,), large = ([(each.address, each.streams) for each in pool.retired] for pool in owner._pools)
    assert (small, large) == ((address, (0x5EA, 0x5EB)), [])


def test_two_runners_never_share_control_words(machine: Machine, tiny_registry: Registry) -> None:
    moe = LatentMoe(tiny_registry)
    first, second = prepare_tail(moe), prepare_tail(moe)
    assert first._words.address != second._words.address


def test_runner_keeps_its_operands_alive(machine: Machine, tiny_registry: Registry) -> None:
    operands = on_gpu(front_operands(MODEL, 2, 5))
    runner = LatentMoe(tiny_registry).prepare_front(**operands)
    held = {id(tensor) for tensor in runner._tensors}
    assert held == {id(tensor) for tensor in operands.values()}
