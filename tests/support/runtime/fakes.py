"""A driver that records instead of launching, tensors that claim to be on a GPU, and registries made from plans.

The fake shares the bindings' real classes (configurations, attributes, enumerations), which need no libcuda.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from cuda.bindings import driver as real

from cakegen.emit.reach import reached_keys
from cakegen.model import Model
from cakegen.registry import Program, Registry

OK = real.CUresult.CUDA_SUCCESS
NOT_READY = real.CUresult.CUDA_ERROR_NOT_READY
CONTEXTS = {0: 0xC0, 1: 0xC1}
_EVENTS = itertools.count(0xE0)


@dataclasses.dataclass
class Launched:
    """One recorded launch, with what was current at the time."""

    symbol: str
    stream: int
    context: int
    grid_ctas: tuple[int, int, int]
    pointers: int


@dataclasses.dataclass
class FakeEvent:
    """An event with the stream that it was last recorded on, -1 before; what it recorded is busy as that stream is."""

    context: int
    stream: int = -1


class FakeDriver:
    """The calls that the runtime makes, with the bindings' signatures."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.launches: list[Launched] = []
        self.failures: dict[str, Any] = {}
        self.context = 0
        self.sm_count = 132
        self.device_count = 1
        self.resident_clusters = 66
        self.busy: set[int] = set()
        self.captured_streams: set[int] = set()
        self.destroyed: set[int] = set()
        self.broken_captures: set[int] = set()
        self.synchronised: list[int] = []
        self.order: list[tuple[str, int]] = []
        self.events: dict[int, FakeEvent] = {}
        self.awaited: list[int] = []
        self.captured_elsewhere = False
        self.capture_mode = real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        self.capability = (9, 0)
        self.allocated: set[int] = set()
        self.libraries: set[str] = set()
        self.streams: set[int] = set()
        self._next = 0x7F00_0000_0000
        self._keep: list[Any] = []
        self._loads = itertools.count()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(real, name)
        answer = _ANSWERS[name]

        def function(*arguments: Any) -> Any:
            self.calls.append(name)
            if name in self.failures:
                return (self.failures[name],) if name in _WITHOUT_VALUE else (self.failures[name], None)
            return answer(self, *arguments)

        return function

    def allocate(self, size: int) -> int:
        self._next += -(-size // 512) * 512
        self.allocated.add(self._next)
        return self._next

    def free(self, address: int) -> tuple[Any]:
        self.allocated.remove(address)
        return (OK,)

    def host_allocate(self, size: int) -> int:
        buffer = ctypes.create_string_buffer(size)
        self._keep.append(buffer)
        self.allocated.add(ctypes.addressof(buffer))
        return ctypes.addressof(buffer)

    def load_library(self) -> tuple[Any, str]:
        library = f"library {next(self._loads)}"
        self.libraries.add(library)
        return OK, library

    def unload_library(self, library: str) -> tuple[Any]:
        self.libraries.remove(library)
        return (OK,)

    def set_context(self, context: int) -> tuple[Any]:
        self.context = int(context)
        return (OK,)

    def exchange_mode(self, mode: Any) -> tuple[Any, Any]:
        previous, self.capture_mode = self.capture_mode, mode
        return OK, previous

    def alive(self, stream: int) -> int:
        """A stream that a call names; no call is defined on one that was destroyed, and hardware crashes there."""
        assert stream not in self.destroyed, f"{self.calls[-1]} on stream {stream:#x}, which was destroyed"
        return stream

    def create_stream(self) -> tuple[Any, int]:
        self.destroyed.discard(0x51)
        self.streams.add(0x51)
        return OK, 0x51

    def destroy_stream(self, stream: int) -> tuple[Any]:
        self.destroyed.add(self.alive(stream))
        self.streams.discard(stream)
        return (OK,)

    def forbids_queries(self) -> bool:
        relaxed = self.capture_mode == real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        return self.captured_elsewhere and not relaxed

    def query(self, stream: int) -> tuple[Any]:
        if self.forbids_queries():
            return (real.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
        if self.alive(stream) in self.captured_streams:
            self.broken_captures.add(stream)
            return (real.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
        return (NOT_READY if stream in self.busy else OK,)

    def capture_status(self, stream: int) -> tuple[Any, Any]:
        kinds = real.CUstreamCaptureStatus
        captured = self.alive(stream) in self.captured_streams
        return OK, kinds.CU_STREAM_CAPTURE_STATUS_ACTIVE if captured else kinds.CU_STREAM_CAPTURE_STATUS_NONE

    def synchronise(self, stream: int) -> tuple[Any]:
        self.synchronised.append(self.alive(stream))
        if stream in self.captured_streams:
            self.broken_captures.add(stream)
            return (real.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
        return (OK,)

    def create_event(self) -> tuple[Any, int]:
        event = next(_EVENTS)
        self.events[event] = FakeEvent(self.context)
        return OK, event

    def destroy_event(self, event: int) -> tuple[Any]:
        self.events.pop(event, None)  # a finaliser may come late, with the event of a test before this one
        return (OK,)

    def record(self, event: int, stream: int) -> tuple[Any]:
        if self.events[event].context != self.context:
            return (real.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        self.order.append(("record", self.alive(stream)))
        self.events[event].stream = stream
        return (OK,)

    def wait(self, stream: int, event: int) -> tuple[Any]:
        self.order.append(("wait", self.alive(stream)))
        self.awaited.append(self.events[event].stream)
        return (OK,)

    def query_event(self, event: int) -> tuple[Any]:
        if self.forbids_queries():
            return (real.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
        return (NOT_READY if self.events[event].stream in self.busy else OK,)

    def synchronise_event(self, event: int) -> tuple[Any]:
        self.busy.discard(self.events[event].stream)
        return (OK,)

    def attribute(self, kind: Any) -> int:
        return {
            "COMPUTE_CAPABILITY_MAJOR": self.capability[0],
            "COMPUTE_CAPABILITY_MINOR": self.capability[1],
            "MULTIPROCESSOR_COUNT": self.sm_count,
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
        }[kind.name.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    def bind_launch(self, config: Any, function: Any, pointers: int, stream: int) -> Any:
        def launch() -> int:
            config.hStream = stream
            return int(self.cuLaunchKernelEx(config, function, pointers, 0)[0])

        return launch

    def launch(self, config: Any, function: Any, pointers: int, extra: int) -> tuple[Any]:
        if function.context != self.context:
            return (real.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        self.launches.append(Launched(function, self.alive(int(config.hStream)), self.context, grid, pointers))
        return (OK,)


class Function(str):
    """A loaded kernel by its symbol; it belongs to the context that was current."""

    context: int

    def __new__(cls, symbol: str, context: int) -> Function:
        function = super().__new__(cls, symbol)
        function.context = context
        return function


_ANSWERS: dict[str, Any] = {
    "cuDeviceGetCount": lambda fake: (OK, fake.device_count),
    "cuDeviceGet": lambda fake, ordinal: (OK, ordinal),
    "cuDeviceGetName": lambda fake, size, handle: (OK, b"Fake H200\0\0"),
    "cuDeviceGetAttribute": lambda fake, kind, handle: (OK, fake.attribute(kind)),
    "cuDevicePrimaryCtxRetain": lambda fake, handle: (OK, CONTEXTS[handle]),
    "cuCtxGetCurrent": lambda fake: (OK, fake.context),
    "cuCtxSetCurrent": lambda fake, context: fake.set_context(context),
    "cuThreadExchangeStreamCaptureMode": lambda fake, mode: fake.exchange_mode(mode),
    "cuMemAlloc": lambda fake, size: (OK, fake.allocate(size)),
    "cuMemHostAlloc": lambda fake, size, flags: (OK, fake.host_allocate(size)),
    "cuMemHostGetDevicePointer": lambda fake, host, flags: (OK, host),
    "cuStreamCreate": lambda fake, flags: fake.create_stream(),
    "cuStreamSynchronize": lambda fake, stream: fake.synchronise(stream),
    "cuStreamDestroy": lambda fake, stream: fake.destroy_stream(stream),
    "cuStreamQuery": lambda fake, stream: fake.query(stream),
    "cuStreamIsCapturing": lambda fake, stream: fake.capture_status(stream),
    "cuEventCreate": lambda fake, flags: fake.create_event(),
    "cuEventRecord": lambda fake, event, stream: fake.record(event, stream),
    "cuEventQuery": lambda fake, event: fake.query_event(event),
    "cuEventSynchronize": lambda fake, event: fake.synchronise_event(event),
    "cuStreamWaitEvent": lambda fake, stream, event, flags: fake.wait(stream, event),
    "cuEventDestroy": lambda fake, event: fake.destroy_event(event),
    "cuMemsetD8Async": lambda fake, base, value, count, stream: (OK,),
    "cuMemFree": lambda fake, address: fake.free(address),
    "cuMemFreeHost": lambda fake, address: fake.free(address),
    "cuCtxSynchronize": lambda fake: (OK,),
    "cuLibraryLoadData": lambda fake, *arguments: fake.load_library(),
    "cuLibraryUnload": lambda fake, library: fake.unload_library(library),
    "cuLibraryGetKernel": lambda fake, library, symbol: (OK, Function(symbol.decode(), fake.context)),
    "cuKernelGetFunction": lambda fake, kernel: (OK, kernel),
    "cuFuncLoad": lambda fake, function: (OK,),
    "cuFuncSetAttribute": lambda fake, function, kind, value: (OK,),
    "cuOccupancyMaxActiveClusters": lambda fake, function, config: (OK, fake.resident_clusters),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": lambda fake, *arguments: (OK, 1),
    "cuLaunchKernelEx": lambda fake, *arguments: fake.launch(*arguments),
    "cuDriverGetVersion": lambda fake: (OK, 13000),
    "cuGetErrorName": lambda fake, result: (OK, result.name.encode()),
    "cuGetErrorString": lambda fake, result: (OK, b"as the driver words it"),
}


_WITHOUT_VALUE = {
    *("cuCtxSetCurrent", "cuCtxSynchronize", "cuMemFree", "cuMemFreeHost", "cuMemsetD8Async", "cuLibraryUnload"),
    *("cuStreamSynchronize", "cuStreamDestroy", "cuStreamQuery", "cuStreamWaitEvent", "cuLaunchKernelEx"),
    *("cuEventRecord", "cuEventQuery", "cuEventSynchronize", "cuEventDestroy", "cuFuncLoad", "cuFuncSetAttribute"),
}


@dataclasses.dataclass(frozen=True)
class FakeRequest:
    """What the compiler is asked for."""

    key: str
    arch: str
    flags: tuple[str, ...]


class FakeCompiler:
    """Counts what is compiled; gives every program the same bytes."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def request_for(self, registry: Registry, key: str, arch: str, extra_flags: tuple[str, ...] = ()) -> Any:
        return FakeRequest(key, arch, extra_flags)

    def cached_cubin(self, request: Any) -> Any:
        self.compiled.append(request.key)
        return SimpleNamespace(cubin=b"cubin of " + request.key.encode(), cached=False)

    def compile_many(self, requests: list[Any], workers: int | None = None, on_done: Any = None) -> list[Any]:
        outcomes = []
        for request in requests:
            outcomes.append(self.cached_cubin(request))
            on_done(request, outcomes[-1])
        return outcomes


class FakeTensor:
    """A CPU tensor that says it is on a CUDA device; everything else, its class included, is the tensor's own."""

    __class__ = torch.Tensor  # type: ignore[assignment]

    def __init__(self, tensor: torch.Tensor, ordinal: int = 0) -> None:
        self._tensor = tensor
        self.device = torch.device("cuda", ordinal)
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def new_empty(self, *shape: int, **options: Any) -> FakeTensor:
        return FakeTensor(self._tensor.new_empty(*shape, **options), self.device.index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


def torch_without_cuda() -> Any:
    """What the workspace uses of torch, its device memory taken from the host's."""
    return SimpleNamespace(
        device=torch.device,
        float32=torch.float32,
        cuda=SimpleNamespace(current_device=lambda: 0),
        empty=lambda elems, dtype, device: torch.empty(elems, dtype=dtype),
    )


@dataclasses.dataclass
class Machine:
    """The fakes of one test, and the switches that torch would hold; `foreign` are streams of another library."""

    driver: FakeDriver
    compiler: FakeCompiler
    capturing: bool = False
    stream: int = 0x5EA
    foreign: set[int] = dataclasses.field(default_factory=set)


def registry_of(model: Model) -> Registry:
    """The registry that an export of a model would hold, without any text."""
    keys = reached_keys(model)
    records = {}
    for entry in keys:
        spec = entry.program
        records[spec.name] = Program(
            name=spec.name,
            role=spec.role,
            headers=(),
            arches=entry.arches,
            flags=(),
            ffi_entry="run",
            arg_plan=spec.arg_plan,
            tensor_maps=spec.tensor_maps,
            barriers=spec.barriers,
            launch=spec.launch,
            digests=(),
        )
    kernels = {entry.key: entry.program.name for entry in keys}
    constants = {entry.key: dict(entry.constants) for entry in keys if entry.constants}
    return Registry(Path("/nowhere"), model.name, model, records, kernels, constants)
