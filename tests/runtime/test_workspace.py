"""The shared fp32 partials of split prefill GEMMs: growth, streams, and what a runner is bound to."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from typing import Any

import pytest
from cuda.bindings import driver as real
from support.models import tiny_model
from support.runtime.fakes import CONTEXTS, FakeTensor, Machine
from support.runtime.operands import front_operands, tail_operands

from cakegen.errors import LaunchError
from cakegen.model import DeviceFacts
from cakegen.plan import control_words, partials_elems, plan_route
from cakegen.plan.records import GemmForm
from cakegen.registry import Registry
from cakegen.runtime import LatentMoe, Workspace, control
from cakegen.runtime.device import open_device
from cakegen.runtime.runner import ProgramRunner, plan_partials
from cakegen.runtime.workspace import CallWorkspace, stream_workspace

MODEL = tiny_model()
TP = 2


def front_partials(tokens: int) -> int:
    facts = DeviceFacts.nominal("sm_90a", 132)
    return plan_partials(plan_route(MODEL, stage="front", tp=TP, tokens=tokens, partials=1, device=facts))


# token counts whose fronts are cut into few and into more partials, and one that is not cut
_NEED = {tokens: front_partials(tokens) for tokens in range(400, 8193, 256)}
CUT = min(tokens for tokens, need in _NEED.items() if need)
LARGER = max(_NEED, key=lambda tokens: _NEED[tokens])
WHOLE = min(tokens for tokens, need in _NEED.items() if not need)


def prepare_front(moe: LatentMoe, tokens: int = CUT, workspace: Any = None, ordinal: int = 0) -> ProgramRunner:
    operands = front_operands(moe.model, TP, tokens)
    tensors: dict[str, Any] = {name: FakeTensor(tensor, ordinal) for name, tensor in operands.items()}
    runner = moe.prepare_front(**tensors, workspace=workspace)
    assert isinstance(runner, ProgramRunner)
    return runner


def bound(runner: ProgramRunner, launch: int, kind: str) -> dict[str, int]:
    """Values of one kind, as the packed block of a launch holds them."""
    block = runner.launches[launch].block
    read = {"buffer": ctypes.c_uint64, "parameter": ctypes.c_int32}[kind]
    return {
        argument.name: read.from_address(address or 0).value
        for argument, address in zip(block.arguments, block.table, strict=True)
        if argument.kind == kind
    }


def test_examples_are_cut_little_cut_more_and_whole(machine: Machine) -> None:
    assert open_device(0).facts == DeviceFacts.nominal("sm_90a", 132)
    assert 0 == front_partials(WHOLE) < front_partials(CUT) < front_partials(LARGER)


def test_split_front_is_bound_to_the_workspace_and_to_its_counters(machine: Machine, tiny_registry: Registry) -> None:
    workspace = Workspace("cuda:0")
    runner = prepare_front(LatentMoe(tiny_registry), CUT, workspace)
    launch = runner.launches[0].launch
    assert isinstance(launch.form, GemmForm)
    assert workspace.bytes == 4 * partials_elems(launch)
    buffers, parameters = bound(runner, 0, "buffer"), bound(runner, 0, "parameter")
    assert buffers["partials"] == workspace.reserve(0).data_ptr()
    assert runner._words is not None
    assert buffers["counters"] == runner._words.address
    assert runner._words.home is control.opened_control(0)._pools[int(control_words(launch) > 32)].retired  # type: ignore[union-attr]
    pitches = {"logits_pitch": 384, "latent_pitch": 512, "shared_act_pitch": 512}
    assert parameters == {"num_tokens": CUT, **pitches, **dict(launch.parameters)}


def test_prefill_tail_binds_its_norm_and_its_gemm(machine: Machine, tiny_registry: Registry) -> None:
    operands = tail_operands(MODEL, 4, CUT, partials=2)
    runner = LatentMoe(tiny_registry).prepare_tail(
        **{name: FakeTensor(tensor) for name, tensor in operands.items()},  # type: ignore[arg-type]
        tp=4,
        rank=3,
    )
    assert isinstance(runner, ProgramRunner)
    norm, gemm = bound(runner, 0, "parameter"), bound(runner, 1, "parameter")
    stride = CUT * 512
    assert norm == {
        "num_tokens": CUT,
        "num_partials": 2,
        "routed_pitch": 512,
        "routed_partial_stride": stride,
        "y_pitch": 512,
    }
    launch = runner.launches[1].launch
    assert gemm == {"num_tokens": CUT, "out_pitch": 512, "up_col0": 384, **dict(launch.parameters)}
    machine.driver.calls.clear()
    runner()
    assert [launched.grid_ctas for launched in machine.driver.launches] == [
        bound_launch.launch.grid_ctas for bound_launch in runner.launches
    ]
    attributes = [[attribute.id.name for attribute in launch.config.attrs] for launch in runner.launches]
    assert attributes[0] == []
    cluster, programmatic = "CLUSTER_DIMENSION", "PROGRAMMATIC_STREAM_SERIALIZATION"
    assert attributes[1] == [f"CU_LAUNCH_ATTRIBUTE_{name}" for name in (cluster, programmatic)]


@pytest.mark.parametrize("tokens", [128, WHOLE])
def test_uncut_plan_needs_no_workspace(machine: Machine, tiny_registry: Registry, tokens: int) -> None:
    given = Workspace("cuda:0")
    for workspace in (None, given):
        runner = prepare_front(LatentMoe(tiny_registry), tokens, workspace)
        assert runner._workspace is None
        assert bound(runner, 0, "buffer").get("partials", 0) == 0
        assert bound(runner, 0, "buffer").get("counters", 0) == 0
    assert given.bytes == 0


def test_runner_keeps_its_buffer_when_the_workspace_grows(machine: Machine, tiny_registry: Registry) -> None:
    moe, workspace = LatentMoe(tiny_registry), Workspace("cuda:0")
    first = prepare_front(moe, CUT, workspace)
    small = bound(first, 0, "buffer")["partials"]
    second = prepare_front(moe, LARGER, workspace)
    assert bound(second, 0, "buffer")["partials"] == workspace.reserve(0).data_ptr() != small
    assert first._partials is not None
    assert first._partials.data_ptr() == bound(first, 0, "buffer")["partials"] == small
    third = prepare_front(moe, CUT, workspace)
    assert bound(third, 0, "buffer")["partials"] == bound(second, 0, "buffer")["partials"]


@pytest.mark.parametrize("elsewhere", [True, False])
def test_outgrown_memory_stays_where_its_last_launch_was_on_another_stream(
    machine: Machine, tiny_registry: Registry, elsewhere: bool
) -> None:
    """That launch may be in flight, and torch's allocator, which knows the first stream alone, would lend it again."""
    moe, workspace = LatentMoe(tiny_registry), Workspace("cuda:0")
    runner = prepare_front(moe, CUT, workspace)
    assert runner._partials is not None
    outgrown, home = weakref.ref(runner._partials), machine.stream
    machine.stream = 0xB if elsewhere else home
    runner()
    del runner
    machine.stream = home
    prepare_front(moe, LARGER, workspace)
    gc.collect()
    assert (outgrown() is not None) == elsewhere
    assert workspace.bytes == 4 * (front_partials(LARGER) + elsewhere * front_partials(CUT))
    del workspace
    gc.collect()
    assert outgrown() is None


def test_memory_of_a_graph_stays_with_its_workspace(machine: Machine, tiny_registry: Registry) -> None:
    """The graph writes there at each replay, also when its runner is gone and the workspace has grown."""
    moe, workspace = LatentMoe(tiny_registry), Workspace("cuda:0")
    runner = prepare_front(moe, CUT, workspace)
    machine.capturing = True
    runner()
    runner()
    machine.capturing = False
    assert workspace.bytes == 4 * front_partials(CUT)
    assert runner._partials is not None
    captured = weakref.ref(runner._partials)
    del runner
    prepare_front(moe, LARGER, workspace)
    gc.collect()
    assert captured() is not None
    assert workspace.bytes == 4 * (front_partials(CUT) + front_partials(LARGER))


def test_reserve_never_shrinks_and_grows_outside_a_capture_only(machine: Machine) -> None:
    workspace = Workspace("cuda:0")
    grown = workspace.reserve(100)
    machine.capturing = True
    assert workspace.reserve(100) is workspace.reserve(1) is grown
    with pytest.raises(LaunchError, match=r"workspace of cuda:0: 404 bytes of fp32 partials are needed, 400 are there"):
        workspace.reserve(101)
    machine.capturing = False
    assert workspace.reserve(101).numel() == 101
    assert workspace.bytes == 404


def test_warm_split_prepare_in_a_capture_works_once_its_workspace_is_large_enough(
    machine: Machine, tiny_registry: Registry
) -> None:
    moe, workspace = LatentMoe(tiny_registry), Workspace("cuda:0")
    prepare_front(moe, LARGER, workspace)
    prepare_front(moe, CUT, Workspace("cuda:0"))  # its programs
    machine.capturing = True
    runner = prepare_front(moe, CUT, workspace)
    runner()
    assert runner._words is not None
    assert runner._words.captured
    with pytest.raises(LaunchError, match="being captured, where nothing can be allocated"):
        prepare_front(moe, CUT, Workspace("cuda:0"))


def test_both_remedies_of_a_cold_workspace_in_a_capture_work(machine: Machine, tiny_registry: Registry) -> None:
    """A capture has a stream of its own, and with it a workspace that no runner before it has grown."""
    moe = LatentMoe(tiny_registry)
    before = prepare_front(moe, CUT)
    machine.stream, machine.capturing = 0xCA, True
    remedy = (
        rf"Prepare the runner before the capture.*or pass a Workspace on which reserve\({front_partials(CUT)}\) was"
    )
    with pytest.raises(LaunchError, match=remedy):
        prepare_front(moe, CUT)
    before()
    machine.capturing = False
    workspace = Workspace("cuda:0")
    workspace.reserve(front_partials(CUT))
    machine.capturing = True
    prepare_front(moe, CUT, workspace)()
    assert [launched.stream for launched in machine.driver.launches] == [0xCA, 0xCA]


def test_enter_refuses_a_second_busy_stream_and_takes_an_idle_one(machine: Machine, tiny_registry: Registry) -> None:
    runner = prepare_front(LatentMoe(tiny_registry), CUT, Workspace("cuda:0"))
    machine.stream, machine.driver.busy = 0xA, {0xA}
    runner()
    runner()
    machine.stream = 0xB
    with pytest.raises(LaunchError, match=r"stream 0xa still uses its fp32 partials, and stream 0xb would overwrite"):
        runner()
    assert [launched.stream for launched in machine.driver.launches] == [0xA, 0xA]
    machine.driver.busy = {0xB}
    runner()
    machine.stream = 0xA
    with pytest.raises(LaunchError, match="stream 0xb still uses"):
        runner()


def test_same_stream_asks_the_driver_nothing(machine: Machine) -> None:
    workspace = Workspace("cuda:0")
    machine.driver.busy = {0xA}
    workspace.enter(0xA, CONTEXTS[0])
    machine.driver.calls.clear()
    workspace.enter(0xA, CONTEXTS[0])
    assert machine.driver.calls == []


def test_workspace_of_a_call_allocates_in_a_capture_too(machine: Machine) -> None:
    workspace = CallWorkspace(0)
    assert (workspace.address, workspace.bytes) == (0, 0)
    machine.capturing = True
    assert workspace.reserve(8).data_ptr() == workspace.address != 0
    assert workspace.reserve(4).numel() == 8
    assert workspace.bytes == 32


def test_capture_is_not_checked_and_leaves_the_stream_as_it_was(machine: Machine) -> None:
    workspace = Workspace("cuda:0")
    machine.driver.busy = {0xA}
    workspace.enter(0xA, CONTEXTS[0])
    machine.capturing = True
    machine.driver.calls.clear()
    workspace.enter(0xC, CONTEXTS[0])
    assert machine.driver.calls == []
    machine.capturing = False
    workspace.enter(0xA, CONTEXTS[0])
    with pytest.raises(LaunchError, match="stream 0xa still uses"):
        workspace.enter(0xC, CONTEXTS[0])


def test_idle_stream_is_recognised_while_another_thread_captures(machine: Machine) -> None:
    workspace = Workspace("cuda:0")
    workspace.enter(0xA, CONTEXTS[0])
    machine.driver.captured_elsewhere = True
    mode = machine.driver.capture_mode
    workspace.enter(0xB, CONTEXTS[0])
    assert machine.driver.capture_mode == mode


def test_stream_that_another_thread_captures_now_is_busy_and_its_capture_survives(machine: Machine) -> None:
    workspace = Workspace("cuda:0")
    workspace.enter(0xA, CONTEXTS[0])
    machine.driver.captured_streams = {0xA}
    with pytest.raises(LaunchError, match="stream 0xa still uses"):
        workspace.enter(0xB, CONTEXTS[0])
    assert machine.driver.broken_captures == set()


def test_second_thread_is_not_let_in_between_the_check_and_the_launch(
    machine: Machine, tiny_registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, outcome, launch = Workspace("cuda:0"), [], machine.driver.launch
    runner = prepare_front(LatentMoe(tiny_registry), CUT, workspace)

    def enter() -> None:
        try:
            workspace.enter(0xB, CONTEXTS[0])
            outcome.append("let in")
        except LaunchError:
            outcome.append("refused")

    second = threading.Thread(target=enter)

    def slow(*arguments: Any) -> Any:
        """The stream is idle until the launch is there."""
        second.start()
        second.join(0.2)
        machine.driver.busy = {0xA}
        return launch(*arguments)

    monkeypatch.setattr(machine.driver, "launch", slow)
    machine.stream = 0xA
    runner()
    second.join(10)
    assert outcome == ["refused"]


def test_workspace_of_a_destroyed_stream_is_free_once_its_event_is_complete(
    machine: Machine, tiny_registry: Registry
) -> None:
    runner = prepare_front(LatentMoe(tiny_registry), CUT, Workspace("cuda:0"))
    home, machine.stream, machine.foreign = machine.stream, 0xF0, {0xF0}
    runner()
    machine.driver.busy, machine.driver.destroyed = {0xF0}, {0xF0}
    machine.stream = home
    for elsewhere in (False, True):
        machine.driver.captured_elsewhere = elsewhere
        with pytest.raises(LaunchError, match="stream 0xf0 still uses its fp32 partials"):
            runner()
    machine.driver.busy = set()
    runner()
    assert [launched.stream for launched in machine.driver.launches] == [0xF0, home]


@pytest.mark.parametrize(("foreign", "question"), [(False, "cuStreamQuery"), (True, "cuEventQuery")])
def test_lost_context_is_named_by_the_question_that_met_it(machine: Machine, foreign: bool, question: str) -> None:
    workspace = Workspace("cuda:0")
    machine.stream, machine.foreign = 0xA, {0xA} if foreign else set()
    workspace.enter(0xA, CONTEXTS[0])
    machine.driver.failures[question] = real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(LaunchError, match=f"{question} for stream 0xa failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        workspace.enter(0xB, CONTEXTS[0])


def test_two_runners_of_one_workspace_on_two_streams_are_refused(machine: Machine, tiny_registry: Registry) -> None:
    moe, workspace = LatentMoe(tiny_registry), Workspace("cuda:0")
    first, second = prepare_front(moe, CUT, workspace), prepare_front(moe, LARGER, workspace)
    apart = prepare_front(moe, CUT, Workspace("cuda:0"))
    machine.stream, machine.driver.busy = 0xA, {0xA}
    first()
    machine.stream = 0xB
    with pytest.raises(LaunchError, match="Make a Workspace for each stream"):
        second()
    apart()
    assert [launched.stream for launched in machine.driver.launches] == [0xA, 0xB]


def test_default_workspace_is_one_for_each_device_and_stream(machine: Machine, tiny_registry: Registry) -> None:
    moe = LatentMoe(tiny_registry)
    here, again = prepare_front(moe), prepare_front(moe, LARGER)
    assert here._workspace is again._workspace is stream_workspace(0)
    machine.stream = 0xB
    elsewhere = prepare_front(moe)
    assert elsewhere._workspace is stream_workspace(0) is not here._workspace
    second = prepare_front(moe, ordinal=1)
    assert second._workspace is stream_workspace(1) is not elsewhere._workspace
    assert second._workspace is not None
    assert str(second._workspace.device) == "cuda:1"


def test_other_objects_and_other_devices_are_refused(machine: Machine, tiny_registry: Registry) -> None:
    moe = LatentMoe(tiny_registry)
    with pytest.raises(LaunchError, match="front: workspace must be a Workspace or None; got dict"):
        prepare_front(moe, workspace={})
    with pytest.raises(LaunchError, match="the workspace is on cuda:1, operands on cuda:0; make one"):
        prepare_front(moe, workspace=Workspace(1))
    with pytest.raises(LaunchError, match="Workspace: needs a CUDA device; got cpu"):
        Workspace("cpu")


def test_device_without_an_index_is_the_current_one(machine: Machine) -> None:
    assert Workspace("cuda").device == Workspace(0).device == Workspace("cuda:0").device
