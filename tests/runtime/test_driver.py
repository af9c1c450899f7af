"""Driver calls: results checked, attributes exact, contexts restored."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as real
from support.runtime.fakes import FakeDriver, Machine
from support.runtime.operands import tail_operands
from support.runtime.prepare import on_gpu, prepare_tail

from cakegen.errors import LaunchError
from cakegen.registry import LaunchRecord, Registry
from cakegen.runtime import LatentMoe, driver

IDS = real.CUlaunchAttributeID


def record(cluster: int = 1, cooperative: bool = False, programmatic: bool = False) -> LaunchRecord:
    return LaunchRecord((192, 1, 1), (cluster, 1, 1), cooperative, programmatic, False, 200000)


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        (record(), []),
        (record(cluster=2), [IDS.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION]),
        (record(cooperative=True), [IDS.CU_LAUNCH_ATTRIBUTE_COOPERATIVE]),
        (record(programmatic=True), [IDS.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION]),
        (
            record(2, True, True),
            [
                IDS.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                IDS.CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
                IDS.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            ],
        ),
    ],
)
def test_launch_config_holds_exactly_the_records_attributes(
    machine: Machine, launch: LaunchRecord, expected: list[object]
) -> None:
    config = driver.launch_config(launch, (112, 1, 1))
    attributes = {attribute.id: attribute.value for attribute in config.attrs}
    assert list(attributes) == expected
    assert config.numAttrs == len(expected)
    assert (config.gridDimX, config.blockDimX, config.sharedMemBytes) == (112, 192, 200000)
    if launch.cluster[0] == 2:
        cluster = attributes[IDS.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION].clusterDim
        assert (cluster.x, cluster.y, cluster.z) == (2, 1, 1)
    if launch.cooperative:
        assert attributes[IDS.CU_LAUNCH_ATTRIBUTE_COOPERATIVE].cooperative == 1
    if launch.programmatic:
        value = attributes[IDS.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION]
        assert value.programmaticStreamSerializationAllowed == 1


def test_call_names_the_failing_function_and_what_it_was_for(machine: Machine) -> None:
    machine.driver.failures["cuMemAlloc"] = real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(LaunchError, match=r"cuMemAlloc for the slab failed: CUDA_ERROR_OUT_OF_MEMORY \(as the driver"):
        driver.call("cuMemAlloc", 64, what="the slab")


def test_load_kernel_failure_names_driver_and_compiler(machine: Machine) -> None:
    machine.driver.failures["cuLibraryLoadData"] = real.CUresult.CUDA_ERROR_INVALID_IMAGE
    with pytest.raises(
        LaunchError, match=r"(?s)cuLibraryLoadData for k .*CUDA_ERROR_INVALID_IMAGE.*CUDA 13\.0, NVRTC \d"
    ):
        driver.load_kernel(b"cubin", "k", 1024)


def test_load_kernel_failure_names_the_shared_memory(machine: Machine) -> None:
    machine.driver.failures["cuFuncSetAttribute"] = real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(LaunchError, match="999999 bytes of dynamic shared memory"):
        driver.load_kernel(b"cubin", "k", 999999)


@pytest.mark.parametrize(("before", "after"), [(0, 0xC0), (0xC0, 0xC0), (0xC1, 0xC1)])
def test_using_context_restores_another_context_and_keeps_a_first_one(
    machine: Machine, before: int, after: int
) -> None:
    machine.driver.context = before
    with driver.using_context(0xC0):
        assert machine.driver.context == 0xC0
    assert machine.driver.context == after


def test_using_context_restores_after_an_error(machine: Machine) -> None:
    machine.driver.context = 0xC1
    with pytest.raises(RuntimeError), driver.using_context(0xC0):
        raise RuntimeError
    assert machine.driver.context == 0xC1


def test_missing_driver_is_a_launch_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> object:
        raise RuntimeError(f"{name}: libcuda.so.1 not found")

    monkeypatch.setattr(importlib, "import_module", absent)
    driver.bindings.cache_clear()
    try:
        with pytest.raises(LaunchError, match=r"libcuda\.so\.1 not found.*backend='reference'"):
            driver.bindings()
    finally:
        driver.bindings.cache_clear()


@pytest.mark.parametrize("initialised", [True, False])
def test_child_of_a_process_that_used_the_driver_is_told_so(monkeypatch: pytest.MonkeyPatch, initialised: bool) -> None:
    """cuInit fails in such a child for ever; without a word on the fork nobody finds out why."""
    fake = SimpleNamespace(cuInit=lambda flags: (real.CUresult.CUDA_SUCCESS,), CUresult=real.CUresult)
    monkeypatch.setattr(importlib, "import_module", lambda name: fake)
    driver.bindings.cache_clear()
    if initialised:
        driver.bindings()
    reader, writer = multiprocessing.Pipe(duplex=False)

    def ask() -> None:
        try:
            writer.send(str(driver.bindings().cuInit(0)[0].name))
        except LaunchError as error:
            writer.send(str(error))

    child = multiprocessing.get_context("fork").Process(target=ask)
    try:
        child.start()
        answer = reader.recv()
        child.join(30)
    finally:
        driver.bindings.cache_clear()
    assert ("forked from one that had initialised the CUDA driver" in answer) == initialised
    assert initialised or answer == "CUDA_SUCCESS"


def test_bound_launches_have_a_configuration_for_each_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def launcher(config: int, function: int, pointers: int, extra: None) -> int:
        fields = (ctypes.c_uint32 * 7).from_address(config)
        stream, attributes = (ctypes.c_uint64 * 2).from_address(config + 32)
        assert (tuple(fields), function, pointers, extra) == ((94, 1, 1, 160, 1, 1, 2048), 0xF0, 0xA0, None)
        assert ctypes.c_uint32.from_address(config + 48).value == 1
        seen.append((stream, ctypes.c_uint32.from_address(attributes).value))
        return 7

    monkeypatch.setattr(driver, "_kernel_launcher", lambda: launcher)
    monkeypatch.setattr(driver, "bindings", lambda: real)
    config = driver.launch_config(LaunchRecord((160, 1, 1), (2, 1, 1), False, False, False, 2048), (94, 1, 1))
    launches = [driver.bind_launch(config, 0xF0, 0xA0, stream) for stream in (0, 0x2200000033)]
    assert [launch() for launch in launches] == [7, 7]
    cluster = int(IDS.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
    assert seen == [(0, cluster), (0x2200000033, cluster)]


class FakeCuda:
    """torch.cuda with a current device, and a capture on some devices' current streams."""

    def __init__(self, current: int, captured: set[int]) -> None:
        self.current, self.captured = current, captured

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return self.current

    @contextlib.contextmanager
    def device(self, ordinal: int) -> Iterator[None]:
        before, self.current = self.current, ordinal
        yield
        self.current = before

    def is_current_stream_capturing(self) -> bool:
        return self.current in self.captured


@pytest.mark.parametrize(
    ("stream_id", "handle", "foreign"),
    [
        pytest.param(0, 0, False, id="the default stream"),
        pytest.param(3, 0x55D0_1230, False, id="one of torch's pools"),
        pytest.param(0x55D0_4560, 0x55D0_4560, True, id="an ExternalStream"),
    ],
)
def test_stream_whose_id_is_its_handle_is_foreign(
    monkeypatch: pytest.MonkeyPatch, stream_id: int, handle: int, foreign: bool
) -> None:
    asked: list[int] = []

    def current_stream(ordinal: int) -> SimpleNamespace:
        asked.append(ordinal)
        return SimpleNamespace(stream_id=stream_id, cuda_stream=handle)

    monkeypatch.setattr(driver, "_torch_cuda", lambda: SimpleNamespace(current_stream=current_stream))
    assert driver.stream_is_foreign(1) == foreign
    assert asked == [1]


def test_capture_is_looked_for_on_the_device_that_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(current=0, captured={1})
    monkeypatch.setattr(driver, "_torch_cuda", lambda: cuda)
    assert [driver.is_capturing(), driver.is_capturing(0), driver.is_capturing(1)] == [False, False, True]
    assert cuda.current == 0


def ask_in_a_child(ask: Callable[[], object]) -> str:
    reader, writer = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        try:
            writer.send(str(ask()))
        except LaunchError as error:
            writer.send(str(error))

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    try:
        assert reader.poll(60), "the child hangs"
        return str(reader.recv())
    finally:
        child.kill()
        child.join(30)


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGetCount"])
def test_child_of_a_process_where_another_library_used_the_driver_is_told_so(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The driver says no more than "not initialised"; in a process that was not forked that is all there is to say."""
    fake = FakeDriver()
    answers: dict[str, Any] = {"cuInit": (real.CUresult.CUDA_SUCCESS,), "cuDeviceGetCount": (real.CUresult(0), 1)}
    answers[call] = (real.CUresult.CUDA_ERROR_NOT_INITIALIZED, *answers[call][1:])
    module = SimpleNamespace(
        **{name: lambda *arguments, answer=answer: answer for name, answer in answers.items()},
        CUresult=real.CUresult,
        cuGetErrorName=fake.cuGetErrorName,
        cuGetErrorString=fake.cuGetErrorString,
    )
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    driver.bindings.cache_clear()
    try:
        text = ask_in_a_child(lambda: driver.call("cuDeviceGetCount"))
        with pytest.raises(LaunchError, match=rf"^{call} failed: CUDA_ERROR_NOT_INITIALIZED .as the driver words it.$"):
            driver.call("cuDeviceGetCount")
    finally:
        driver.bindings.cache_clear()
    assert text.startswith(f"{call} failed: CUDA_ERROR_NOT_INITIALIZED")
    assert ". Most likely this process was forked from one that had initialised the CUDA driver, and" in text


def test_child_of_a_process_where_torch_used_the_driver_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    driver.bindings.cache_clear()
    with pytest.raises(LaunchError, match=r"no CUDA driver can be used here: this process was forked from one that"):
        driver.bindings()


def test_child_that_was_forked_while_the_driver_was_initialised_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []

    def initialise(flags: int) -> tuple[object]:
        if not answers:
            answers.append("")
            answers[0] = ask_in_a_child(driver.bindings)
        return (real.CUresult.CUDA_SUCCESS,)

    fake = SimpleNamespace(cuInit=initialise, CUresult=real.CUresult)
    monkeypatch.setattr(importlib, "import_module", lambda name: fake)
    driver.bindings.cache_clear()
    try:
        driver.bindings()
    finally:
        driver.bindings.cache_clear()
    assert answers[0].startswith("no CUDA driver can be used here: this process was forked from one that had")


def test_runner_of_the_parent_refuses_in_a_child(machine: Machine, tiny_registry: Registry) -> None:
    """Also one whose workspace another thread of the parent was using; and what is prepared asks the driver anew."""
    moe, runner = LatentMoe(tiny_registry), prepare_tail(LatentMoe(tiny_registry))
    operands = on_gpu(tail_operands(moe.model, 2, 64))

    def prepared_again() -> int:
        machine.driver.calls.clear()
        moe.prepare_tail(**operands, tp=2, rank=0)
        return machine.driver.calls.count("cuDevicePrimaryCtxRetain")

    runner()
    wanted = "this runner was prepared before a fork, and this process was forked from one that had initialised the"
    assert ask_in_a_child(runner).startswith(wanted)
    assert ask_in_a_child(runner.rebind).startswith(wanted)
    assert ask_in_a_child(prepared_again) == "1"
    runner()
    assert len(machine.driver.launches) == 2 * len(runner.launches)
