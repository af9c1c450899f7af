"""Runners on a fake machine: their streams and contexts, their control words, and what they keep alive."""

from __future__ import annotations

import gc
import weakref

import pytest
from cuda.bindings import driver as real
from support.models import tiny_model
from support.runtime.fakes import CONTEXTS, Machine
from support.runtime.operands import front_operands
from support.runtime.prepare import on_gpu, prepare_front, prepare_tail

from cakegen.errors import LaunchError
from cakegen.registry import Registry
from cakegen.runtime import LatentMoe, control
from cakegen.runtime.runner import ProgramRunner

MODEL = tiny_model()
FOREIGN = 0xF0E0
"""A stream of another library."""


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


def test_calls_on_torchs_own_stream_ask_the_driver_for_their_launches_alone(
    machine: Machine, tiny_registry: Registry
) -> None:
    runner = prepare_tail(LatentMoe(tiny_registry))
    runner()
    machine.driver.calls.clear()
    runner()
    assert machine.driver.calls == ["cuLaunchKernelEx"] * len(runner.launches)


def test_runner_goes_on_when_a_foreign_stream_was_destroyed_behind_it(
    machine: Machine, tiny_registry: Registry
) -> None:
    """The next call waits on the device for the event behind the last, and names the dead handle no more."""
    machine.foreign = {FOREIGN}
    runner = prepare_tail(LatentMoe(tiny_registry))
    machine.stream = FOREIGN
    runner()
    runner()
    assert machine.driver.order == [("wait", FOREIGN), ("record", FOREIGN)] * 2
    machine.driver.destroyed = {FOREIGN}
    machine.stream = 0x5EA
    machine.driver.calls.clear()
    machine.driver.awaited.clear()
    runner()
    assert machine.driver.order[4:] == [("wait", 0x5EA)]
    assert machine.driver.awaited == [FOREIGN]
    assert machine.driver.calls.index("cuStreamWaitEvent") < machine.driver.calls.index("cuLaunchKernelEx")
    runner()
    assert len(machine.driver.order) == 5


def test_foreign_stream_with_the_handle_of_one_that_was_destroyed_waits_for_its_calls(
    machine: Machine, tiny_registry: Registry
) -> None:
    """A driver gives a handle again before the work of its first stream is complete."""
    machine.stream, machine.foreign = FOREIGN, {FOREIGN}
    runner = prepare_tail(LatentMoe(tiny_registry))
    runner()
    machine.driver.awaited.clear()
    machine.driver.calls.clear()
    runner()
    assert machine.driver.awaited == [FOREIGN]
    calls = [name for name in machine.driver.calls if name != "cuStreamIsCapturing"]
    assert calls == ["cuStreamWaitEvent", *["cuLaunchKernelEx"] * len(runner.launches), "cuEventRecord"]


def test_runner_bound_in_another_context_marks_its_foreign_stream(machine: Machine, tiny_registry: Registry) -> None:
    machine.stream, machine.foreign = FOREIGN, {FOREIGN}
    runner = prepare_front(LatentMoe(tiny_registry), ordinal=1)
    for context in (CONTEXTS[0], 0):
        machine.driver.set_context(context)
        runner()
    assert machine.driver.order == [("wait", FOREIGN), ("record", FOREIGN)] * 2
    assert [launch.context for launch in machine.driver.launches] == [CONTEXTS[1]] * 2


def test_nothing_is_recorded_in_a_capture_of_a_foreign_stream(machine: Machine, tiny_registry: Registry) -> None:
    """Nothing outside the graph could wait for an event that was recorded in a capture."""
    machine.stream, machine.foreign = FOREIGN, {FOREIGN}
    runner = prepare_tail(LatentMoe(tiny_registry))
    runner()
    machine.capturing, machine.driver.captured_streams = True, {FOREIGN}
    runner()
    assert len(machine.driver.launches) == 2 * len(runner.launches)
    assert machine.driver.order == [("wait", FOREIGN), ("record", FOREIGN)]
    assert machine.driver.broken_captures == set()


def test_failed_mark_of_a_foreign_stream_is_named(machine: Machine, tiny_registry: Registry) -> None:
    machine.stream, machine.foreign = FOREIGN, {FOREIGN}
    runner = prepare_tail(LatentMoe(tiny_registry))
    machine.driver.failures["cuEventRecord"] = real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(LaunchError, match=r"cuEventRecord for stream 0xf0e0 failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        runner()


def test_failed_wait_on_a_foreign_stream_is_named(machine: Machine, tiny_registry: Registry) -> None:
    machine.stream, machine.foreign = FOREIGN, {FOREIGN}
    runner = prepare_tail(LatentMoe(tiny_registry))
    machine.driver.failures["cuStreamWaitEvent"] = real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(LaunchError, match=r"cuStreamWaitEvent for stream 0xf0e0 failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        runner()
    assert machine.driver.launches == []


def test_failed_launch_on_a_foreign_stream_leaves_what_it_waited_for_to_the_next(
    machine: Machine, tiny_registry: Registry
) -> None:
    machine.foreign = {FOREIGN}
    runner = prepare_tail(LatentMoe(tiny_registry))
    runner()
    machine.stream = FOREIGN
    machine.driver.failures["cuLaunchKernelEx"] = real.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    with pytest.raises(LaunchError, match="cuLaunchKernelEx failed: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        runner()
    assert machine.driver.order == [("record", 0x5EA), ("wait", FOREIGN), ("wait", FOREIGN), ("record", FOREIGN)]
    machine.driver.failures.clear()
    machine.driver.awaited.clear()
    machine.stream = 0x5EA
    runner()
    assert machine.driver.awaited == [FOREIGN]


def test_runners_of_a_foreign_stream_share_one_event_which_goes_with_the_last_of_them(
    machine: Machine, tiny_registry: Registry
) -> None:
    machine.stream, machine.foreign = FOREIGN, {FOREIGN}
    first, second = (prepare_front(LatentMoe(tiny_registry)) for _ in range(2))
    assert len(machine.driver.events) == 1
    del first
    gc.collect()
    assert len(machine.driver.events) == 1
    del second
    gc.collect()
    assert machine.driver.events == {}


def test_lost_context_is_named_by_the_question_that_met_it(machine: Machine, tiny_registry: Registry) -> None:
    runner = prepare_tail(LatentMoe(tiny_registry))
    runner()
    machine.stream = 0x5EB
    machine.driver.failures["cuStreamIsCapturing"] = real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(LaunchError, match=r"cuStreamIsCapturing for stream 0x5ea failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        runner()
    assert len(machine.driver.launches) == len(runner.launches)


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


def test_default_stream_is_refused_while_a_stream_that_waits_for_it_is_captured(
    machine: Machine, tiny_registry: Registry
) -> None:
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
    (small,), large = (
        [(each.address, tuple(stream.handle for stream in each.streams)) for each in pool.retired]
        for pool in owner._pools
    )
    assert (small, large) == ((address, (0x5EA, 0x5EB)), [])


def test_two_runners_never_share_control_words(machine: Machine, tiny_registry: Registry) -> None:
    moe = LatentMoe(tiny_registry)
    first, second = prepare_tail(moe), prepare_tail(moe)
    assert first._words.address != second._words.address


def test_runner_keeps_its_operands_alive(machine: Machine, tiny_registry: Registry) -> None:
    operands = on_gpu(front_operands(MODEL, 2, 5))
    runner = LatentMoe(tiny_registry).prepare_front(**operands)
    held = {id(tensor) for tensor in runner._request.tensors.values()}
    assert held == {id(tensor) for tensor in operands.values()}
