"""What is given back: behind a failure, when a stream ends, when a table is full, and all of it on request."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from cuda.bindings import driver as real
from support.models import tiny_model
from support.runtime.fakes import FakeTensor, Machine
from support.runtime.operands import front_operands
from support.runtime.prepare import on_gpu, prepare_front, prepare_tail

from cakegen.errors import LaunchError
from cakegen.model import DeviceFacts
from cakegen.plan import plan_route
from cakegen.registry import Registry
from cakegen.runtime import LatentMoe, Workspace, control, release_device_memory, runner, workspace
from cakegen.runtime.control import SLOT_SIZES
from cakegen.runtime.device import open_device
from cakegen.runtime.operators import PreparedCalls
from cakegen.runtime.programs import ProgramTable
from cakegen.runtime.routes import RouteTable
from cakegen.runtime.runner import ProgramRunner, plan_partials
from cakegen.runtime.workspace import MOST_FOREIGN, ForeignWorkspace, stream_workspace

MODEL = tiny_model()
REFUSED = real.CUresult.CUDA_ERROR_OUT_OF_MEMORY


def front_partials(tokens: int) -> int:
    facts = DeviceFacts.nominal("sm_90a", 132)
    return plan_partials(plan_route(MODEL, stage="front", tp=2, tokens=tokens, partials=1, device=facts))


CUT = next(tokens for tokens in range(400, 8193, 256) if front_partials(tokens))


@pytest.mark.parametrize("call", ["cuLibraryGetKernel", "cuKernelGetFunction", "cuFuncLoad", "cuFuncSetAttribute"])
def test_failed_load_unloads_what_it_had_loaded(machine: Machine, tiny_registry: Registry, call: str) -> None:
    moe = LatentMoe(tiny_registry)
    machine.driver.failures[call] = REFUSED
    for _ in range(5):
        with pytest.raises(LaunchError, match=f"{call} for .* failed: CUDA_ERROR_OUT_OF_MEMORY"):
            prepare_front(moe)
    assert machine.driver.calls.count("cuLibraryUnload") == 5
    assert machine.driver.libraries == set()
    machine.driver.failures.clear()
    prepare_front(moe)()
    assert len(machine.driver.libraries) == 1


def test_failure_to_unload_does_not_hide_the_failure_to_load(machine: Machine, tiny_registry: Registry) -> None:
    machine.driver.failures |= {"cuFuncLoad": REFUSED, "cuLibraryUnload": real.CUresult.CUDA_ERROR_INVALID_HANDLE}
    with pytest.raises(LaunchError, match=r"^cuFuncLoad for "):
        prepare_front(LatentMoe(tiny_registry))


@pytest.mark.parametrize("call", ["cuMemAlloc", "cuStreamCreate", "cuMemsetD8Async", "cuStreamSynchronize"])
def test_failing_slab_gives_back_its_memory_and_its_stream(
    machine: Machine, tiny_registry: Registry, call: str
) -> None:
    device = open_device(0)
    machine.driver.failures[call] = REFUSED
    for _ in range(3):
        with pytest.raises(LaunchError, match=f"{call} for control words failed: CUDA_ERROR_OUT_OF_MEMORY"):
            control.open_control(device)
    assert (machine.driver.allocated, machine.driver.streams) == (set(), set())
    machine.driver.failures.clear()
    control.open_control(device)
    assert len(machine.driver.allocated) == len(SLOT_SIZES) + 1


def test_failing_slab_of_the_second_size_gives_back_the_first(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, allocate = open_device(0), control._allocate_slab
    second = SLOT_SIZES[1][0]

    def failing(slot_bytes: int, slots: int) -> list[int]:
        if slot_bytes == second:
            raise LaunchError("no memory for the second size")
        return allocate(slot_bytes, slots)

    monkeypatch.setattr(control, "_allocate_slab", failing)
    with pytest.raises(LaunchError, match=r"^no memory for the second size$"):
        control.open_control(device)
    assert machine.driver.allocated == set()


@pytest.mark.parametrize("call", ["cuMemHostGetDevicePointer", ""])
def test_failing_wait_record_gives_back_its_memory(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    if call:
        machine.driver.failures[call] = REFUSED
    else:
        monkeypatch.setenv("CAKEGEN_WAIT_SECONDS", "0")
    with pytest.raises(LaunchError):
        control.open_control(open_device(0))
    assert machine.driver.allocated == set()


def cut_front(moe: LatentMoe, given: Workspace | None = None) -> ProgramRunner:
    tensors: dict[str, Any] = {name: FakeTensor(each) for name, each in front_operands(MODEL, 2, CUT).items()}
    prepared = moe.prepare_front(**tensors, workspace=given)
    assert isinstance(prepared, ProgramRunner)
    return prepared


@pytest.fixture
def partials(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[Any]:
    """The partials that were allocated and are not freed."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    empty = workspace.torch.empty

    def counted(*arguments: Any, **options: Any) -> Any:
        tensor = empty(*arguments, **options)
        alive.add(tensor)
        return tensor

    monkeypatch.setattr(workspace.torch, "empty", counted)
    return alive


def on_foreign(machine: Machine, handle: int) -> None:
    machine.stream, machine.foreign = handle, machine.foreign | {handle}


def test_foreign_streams_that_end_leave_a_bounded_number_of_workspaces(
    machine: Machine, tiny_registry: Registry, partials: weakref.WeakSet[Any]
) -> None:
    """One after another, each with a runner that dies with it."""
    moe = LatentMoe(tiny_registry)
    for number in range(100):
        on_foreign(machine, 0xF000 + number)
        cut_front(moe)()
        machine.driver.destroyed.add(machine.stream)
        gc.collect()
    assert len(machine.driver.launches) == 100
    assert len(partials) <= 2 * MOST_FOREIGN + 1
    assert len(machine.driver.events) <= 2 * MOST_FOREIGN + 1


def test_partials_of_a_foreign_stream_are_not_lent_while_its_last_launch_runs(
    machine: Machine, tiny_registry: Registry
) -> None:
    moe, addresses = LatentMoe(tiny_registry), []

    def run(handle: int) -> int:
        on_foreign(machine, handle)
        prepared = cut_front(moe)
        prepared()
        return int(prepared._buffers["partials"])

    for number in range(MOST_FOREIGN + 2):
        machine.driver.busy.add(0xF000 + number)
        addresses.append(run(0xF000 + number))
        machine.driver.destroyed.add(0xF000 + number)
        gc.collect()
    assert len(set(addresses)) == MOST_FOREIGN + 2
    machine.driver.busy.clear()
    assert run(0xFF00) in addresses


def test_runner_holds_the_workspace_of_its_foreign_stream(machine: Machine, tiny_registry: Registry) -> None:
    moe = LatentMoe(tiny_registry)
    on_foreign(machine, 0xF000)
    first = cut_front(moe)
    held = stream_workspace(0)
    for number in range(1, 2 * MOST_FOREIGN + 2):
        on_foreign(machine, 0xF000 + number)
        cut_front(moe)()
    machine.stream = 0xF000
    assert stream_workspace(0) is held is first._workspace
    assert cut_front(moe)._buffers["partials"] == first._buffers["partials"]


def test_memory_of_a_graph_on_a_foreign_stream_stays(machine: Machine, tiny_registry: Registry) -> None:
    moe = LatentMoe(tiny_registry)
    on_foreign(machine, 0xF000)
    captured = cut_front(moe)
    address = captured._buffers["partials"]
    machine.capturing = True
    captured()
    machine.capturing = False
    del captured
    for number in range(1, 3 * MOST_FOREIGN):
        on_foreign(machine, 0xF000 + number)
        assert cut_front(moe)._buffers["partials"] != address
        gc.collect()


def test_workspace_of_torchs_own_stream_is_kept(machine: Machine) -> None:
    first = stream_workspace(0)
    assert not isinstance(first, ForeignWorkspace)
    for number in range(3 * MOST_FOREIGN):
        on_foreign(machine, 0xF000 + number)
        stream_workspace(0)
    machine.stream = 0x5EA
    assert stream_workspace(0) is first


def test_runner_forgets_idle_streams(
    machine: Machine, tiny_registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that makes a stream a request keeps one runner: what it remembers of the streams is bounded."""
    monkeypatch.setattr(runner, "MOST_STREAMS", 4)
    prepared = prepare_tail(LatentMoe(tiny_registry))
    machine.driver.busy = {0xF003}
    for number in range(50):
        on_foreign(machine, 0xF000 + number)
        prepared()
        machine.driver.destroyed.add(machine.stream)
    assert len(prepared._bound) <= 5
    assert set(prepared._bound) == set(prepared._known)
    assert 0xF003 in prepared._known
    del prepared
    gc.collect()
    words = control.opened_control(0)._pools[0].retired[0]  # type: ignore[union-attr]
    assert 0xF003 in {stream.handle for stream in words.streams}


def test_routes_are_bounded_and_the_oldest_goes_first(machine: Machine, tiny_registry: Registry) -> None:
    table = RouteTable(tiny_registry, ProgramTable(tiny_registry), None, most=8)
    device = open_device(0)
    routes = [table.load(device, "front", 2, tokens, 1) for tokens in range(1, 9)]
    assert table.load(device, "front", 2, 1, 1) is routes[0]
    table.load(device, "front", 2, 9, 1)
    assert len(table) == 8
    assert table.load(device, "front", 2, 1, 1) is routes[0]
    again = table.load(device, "front", 2, 2, 1)
    assert again is not routes[1]
    assert again == routes[1]


def test_release_gives_everything_back_and_what_is_prepared_later_works(
    machine: Machine, tiny_registry: Registry, partials: weakref.WeakSet[Any]
) -> None:
    moe = LatentMoe(tiny_registry)
    old, cut = prepare_tail(moe), cut_front(moe)
    on_foreign(machine, 0xF000)
    foreign = cut_front(moe)
    machine.stream = 0x5EA
    for each in (old, cut):
        each()
    record = moe.wait_record("cuda:0")
    record.write_chaos_seed(9)
    release_device_memory()
    assert (machine.driver.allocated, machine.driver.libraries) == (set(), set())
    assert machine.driver.calls.count("cuCtxSynchronize") == 1
    gc.collect()
    assert len(partials) == 0
    assert record.words[1] == 9
    for each in (old, cut, foreign):
        for use in (each, each.rebind):
            with pytest.raises(
                LaunchError, match=r"^release_device_memory was called after this runner was prepared; pre"
            ):
                use()
    launched = len(machine.driver.launches)
    prepare_tail(moe)()
    assert len(machine.driver.launches) > launched
    del old, cut, foreign
    gc.collect()
    prepare_tail(moe)()


def test_release_waits_for_the_device_before_it_frees(machine: Machine, tiny_registry: Registry) -> None:
    prepare_tail(LatentMoe(tiny_registry))()
    machine.driver.calls.clear()
    release_device_memory()
    freeing = [machine.driver.calls.index(name) for name in ("cuLibraryUnload", "cuMemFree", "cuMemFreeHost")]
    assert machine.driver.calls.index("cuCtxSynchronize") < min(freeing)


def test_release_in_a_capture_is_refused_and_frees_nothing(machine: Machine, tiny_registry: Registry) -> None:
    prepared = prepare_tail(LatentMoe(tiny_registry))
    machine.capturing = True
    with pytest.raises(LaunchError, match="release_device_memory waits for the device and unloads programs, and the"):
        release_device_memory()
    machine.capturing = False
    prepared()


def test_release_forgets_the_calls_of_the_operators(machine: Machine, tiny_registry: Registry) -> None:
    moe, calls = LatentMoe(tiny_registry), PreparedCalls()
    operands = on_gpu(front_operands(MODEL, 2, 5))
    inputs = tuple(operands.values())[:4]
    options = {name: operands[name] for name in ("logits", "latent", "shared_act")}
    calls.run(moe.prepare_front, inputs, options)
    assert len(calls) == 1
    release_device_memory()
    assert len(calls) == 0
    calls.run(moe.prepare_front, inputs, options)
    assert len(machine.driver.launches) == 2


def test_release_without_a_device_does_nothing(machine: Machine) -> None:
    release_device_memory()
    assert machine.driver.calls == []
