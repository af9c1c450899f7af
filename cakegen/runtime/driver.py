"""Thin, checked calls of the CUDA driver API. Imports only errors and registry; libcuda is loaded by the first call.

Every result is checked where it is returned, and the error names the call, so that no fault surfaces in a later,
innocent call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from cakegen.errors import LaunchError
from cakegen.registry import LaunchRecord

TENSOR_MAP_BYTES = 128
"""Size of a CUtensorMap (CUDA Driver API, tensor map object management)."""

_FIRST_VERSION_WITH_TENSOR_MAPS = 12000


FORKED = (
    "this process was forked from one that had initialised the CUDA driver, and the driver does not work in such a "
    "child. Start workers with multiprocessing's 'spawn' or 'forkserver', or before the parent asks for a device "
    "(torch.cuda, warm_up, generated_program_available)."
)

# whether this process is a forked child; and whether its parent had initialised the driver, as far as is known
_is_child = False
_forked = False
_initialising = False


@functools.cache
def bindings() -> Any:
    """The driver bindings module, initialised.

    Raises
    ------
    LaunchError
        The bindings or libcuda are not installed, `cuInit` failed, or this process was forked from one where it had
        not.
    """
    global _initialising
    if _forked or _torch_was_forked():
        raise LaunchError(f"no CUDA driver can be used here: {FORKED}")
    _initialising = True
    try:
        return _initialised()
    finally:
        _initialising = False


def _initialised() -> Any:
    try:
        module = importlib.import_module("cuda.bindings.driver")
        (result,) = module.cuInit(0)
    except (ImportError, OSError, RuntimeError) as error:
        raise LaunchError(
            f"no CUDA driver can be used here ({type(error).__name__}: {error}). A launch needs the cuda-bindings "
            "package and NVIDIA's driver (libcuda); backend='reference' runs without either."
        ) from None
    if result != module.CUresult.CUDA_SUCCESS:
        raise LaunchError(f"cuInit failed: {result_text(module, result)}{_fork_hint(module, result)}")
    return module


def _torch_was_forked() -> bool:
    """Whether torch says that it had initialised the driver before the fork; asks only a torch that is imported."""
    torch = sys.modules.get("torch")
    return bool(torch is not None and torch.cuda._is_in_bad_fork())


def _fork_hint(module: Any, result: Any) -> str:
    """What a forked child adds to "not initialised": whoever had initialised the driver, it says no more than that."""
    if _is_child and result == module.CUresult.CUDA_ERROR_NOT_INITIALIZED:
        return f". Most likely {FORKED}"
    return ""


def _note_fork(initialised: Callable[[], Any]) -> None:
    """In a forked child: answer for the driver from now on, if the parent had initialised it, or was about to."""
    global _forked, _is_child, _initialising
    _forked = _forked or _initialising or cast("Any", initialised).cache_info().currsize > 0
    _is_child, _initialising = True, False
    cast("Any", initialised).cache_clear()


os.register_at_fork(after_in_child=functools.partial(_note_fork, bindings))


def result_text(module: Any, result: Any) -> str:
    """Name and meaning of a driver result, as the driver words them."""
    texts = []
    for function in (module.cuGetErrorName, module.cuGetErrorString):
        status, text = function(result)
        known = status == module.CUresult.CUDA_SUCCESS and text is not None
        texts.append(text.decode() if known else f"result {int(result)}")
    return f"{texts[0]} ({texts[1]})"


def call(name: str, *arguments: Any, what: str = "") -> Any:
    """Call one driver function and return its values without the result: None, one value, or a tuple.

    Parameters
    ----------
    name
        Name of the function, as the CUDA Driver API spells it.
    what
        What the call was for; ends up in the message of a failure.

    Raises
    ------
    LaunchError
        The call did not return CUDA_SUCCESS.
    """
    module = bindings()
    result, *values = getattr(module, name)(*arguments)
    if result != module.CUresult.CUDA_SUCCESS:
        text = f"{result_text(module, result)}{_fork_hint(module, result)}"
        raise LaunchError(f"{name}{f' for {what}' if what else ''} failed: {text}")
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def versions() -> str:
    """Versions of the driver and of NVRTC, for messages about a cubin that does not load."""
    driver = call("cuDriverGetVersion")
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        _, major, minor = nvrtc.nvrtcVersion()
        compiler = f"NVRTC {major}.{minor}"
    except (ImportError, OSError, RuntimeError, ValueError):
        compiler = "no NVRTC"
    return f"driver for CUDA {driver // 1000}.{driver % 1000 // 10}, {compiler}"


def current_stream(ordinal: int) -> int:
    """Handle of torch's current stream of a device."""
    return stream_reader()(ordinal)


@functools.cache
def stream_reader() -> Callable[[int], int]:
    """What `current_stream` asks, for a caller that can't afford the way there."""
    return cast("Callable[[int], int]", importlib.import_module("torch")._C._cuda_getCurrentRawStream)


def stream_is_foreign(ordinal: int) -> bool:
    """Whether torch's current stream of a device is another library's, which may destroy it at any time.

    torch's id of such a stream is its handle (torch.cuda.ExternalStream). The default stream has id 0, and the streams
    of torch's pools, which live as long as the process, have small odd ones.
    """
    stream = _torch_cuda().current_stream(ordinal)
    return bool(stream.stream_id == stream.cuda_stream != 0)


def is_capturing(ordinal: int | None = None) -> bool:
    """Whether torch's current stream of a device is being captured into a graph; false where torch has no CUDA.

    False too where the context is lost and the question fails: the launch that follows reports that better.

    Parameters
    ----------
    ordinal
        The device, by default torch's current one.
    """
    cuda = _torch_cuda()
    try:
        if not cuda.is_initialized():
            return False
        if ordinal is None or ordinal == cuda.current_device():
            return bool(cuda.is_current_stream_capturing())
        with cuda.device(ordinal):
            return bool(cuda.is_current_stream_capturing())
    except RuntimeError:
        return False


@functools.cache
def _torch_cuda() -> Any:
    return importlib.import_module("torch").cuda


def context_is_current(context: int) -> bool:
    """Whether a context is the calling thread's current one; the cheap half of `using_context`, for the launch path."""
    current = ctypes.c_void_p()
    return not _context_reader()(ctypes.byref(current)) and current.value == context


@functools.cache
def _context_reader() -> Any:
    return c_function("cuCtxGetCurrent", 4000, ctypes.c_void_p)


@contextlib.contextmanager
def using_context(context: int) -> Iterator[None]:
    """Make a context current for a while; a thread that had none keeps it."""
    previous = int(call("cuCtxGetCurrent"))
    if previous != context:
        call("cuCtxSetCurrent", context)
    try:
        yield
    finally:
        if previous not in (0, context):
            call("cuCtxSetCurrent", previous)


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allow allocations and loads while another thread captures a graph (cuThreadExchangeStreamCaptureMode).

    Nothing in such a section enqueues work on a stream that may be captured.
    """
    mode = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    previous = call("cuThreadExchangeStreamCaptureMode", mode)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", previous)


def launch_config(record: LaunchRecord, grid_ctas: tuple[int, int, int]) -> Any:
    """A launch configuration with exactly the record's attributes; the stream is set at launch.

    `attrs` is assigned as one list: the bindings copy it on assignment, so an append to it would be lost.
    """
    module = bindings()
    config = module.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid_ctas
    config.blockDimX, config.blockDimY, config.blockDimZ = record.block
    config.sharedMemBytes = record.dynamic_smem_bytes
    kinds = module.CUlaunchAttributeID
    attributes = []
    if record.cluster != (1, 1, 1):
        cluster = _attribute(module, kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = record.cluster
        attributes.append(cluster)
    if record.cooperative:
        cooperative = _attribute(module, kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
        cooperative.value.cooperative = 1
        attributes.append(cooperative)
    if record.programmatic:
        programmatic = _attribute(module, kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
        programmatic.value.programmaticStreamSerializationAllowed = 1
        attributes.append(programmatic)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


def _attribute(module: Any, kind: Any) -> Any:
    attribute = module.CUlaunchAttribute()
    attribute.id = kind
    return attribute


@dataclass(frozen=True)
class Kernel:
    """A kernel of a loaded library, in one device's context. It stays loaded until `unload` is called."""

    symbol: str
    function: Any
    library: Any

    def unload(self) -> None:
        """Unload the library; no launch of it may be in flight or follow."""
        call("cuLibraryUnload", self.library, what=self.symbol)


def load_kernel(cubin: bytes, symbol: str, dynamic_smem_bytes: int) -> Kernel:
    """Load a cubin into the current context and opt its kernel in to its dynamic shared memory.

    Raises
    ------
    LaunchError
        The driver refused the cubin; the message names the driver's and NVRTC's versions, and nothing stays loaded.
    """
    library = None
    try:
        library = call("cuLibraryLoadData", cubin, [], [], 0, [], [], 0, what=symbol)
        kernel = call("cuLibraryGetKernel", library, symbol.encode(), what=symbol)
        function = call("cuKernelGetFunction", kernel, what=symbol)
        # with lazy loading the code would otherwise be loaded by the first launch, which may be in a capture
        call("cuFuncLoad", function, what=symbol)
        limit = bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        what = f"{symbol} with {dynamic_smem_bytes} bytes of dynamic shared memory"
        call("cuFuncSetAttribute", function, limit, dynamic_smem_bytes, what=what)
    except LaunchError as error:
        if library is not None:
            # the error to tell is the first one
            with contextlib.suppress(LaunchError):
                call("cuLibraryUnload", library, what=symbol)
        raise LaunchError(f"{error}; {len(cubin)} bytes of cubin; {versions()}") from None
    return Kernel(symbol, function, library)


def max_active_clusters(kernel: Kernel, record: LaunchRecord, grid_ctas: tuple[int, int, int]) -> int:
    """Clusters of a launch that can be resident on the device at once (cuOccupancyMaxActiveClusters)."""
    config = launch_config(record, grid_ctas)
    return int(call("cuOccupancyMaxActiveClusters", kernel.function, config, what=kernel.symbol))


def max_active_ctas_per_sm(kernel: Kernel, record: LaunchRecord) -> int:
    """CTAs without a cluster that one multiprocessor can hold at once."""
    threads = record.block[0] * record.block[1] * record.block[2]
    arguments = (kernel.function, threads, record.dynamic_smem_bytes)
    return int(call("cuOccupancyMaxActiveBlocksPerMultiprocessor", *arguments, what=kernel.symbol))


def c_function(symbol: str, version: int, *arguments: Any) -> Any:
    """A driver function as ctypes calls it, past the bindings: where a call must be cheap, or write where we say.

    Parameters
    ----------
    version
        CUDA version of the signature (cuGetProcAddress).
    arguments
        ctypes types of its parameters; it returns a CUresult.

    Raises
    ------
    LaunchError
        The driver is too old to have it.
    """
    address, _ = call("cuGetProcAddress", symbol.encode(), version, 0, what=symbol)
    if not address:
        raise LaunchError(f"the driver has no {symbol}; it came with CUDA {version // 1000}.0. {versions()}")
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(int(address))


_CONFIG_BYTES = 56
_CONFIG_STREAM_OFFSET = 32
"""A CUlaunchConfig and the place of its hStream (cuda.h: seven 32-bit fields come first, a count and padding last)."""


@functools.cache
def _kernel_launcher() -> Any:
    pointer = ctypes.c_void_p
    return c_function("cuLaunchKernelEx", 11080, pointer, pointer, pointer, pointer)


def bind_launch(config: Any, function: Any, pointers: int, stream: int) -> Callable[[], int]:
    """A launch with nothing left open: a call enqueues it and returns the CUresult as an int.

    It has a configuration of its own, so that threads with other streams need no lock.

    Parameters
    ----------
    config
        From `launch_config`; its attributes are shared, so it must outlive the callable.
    pointers
        Address of the kernelParams array.
    stream
        Handle of the stream.

    Notes
    -----
    Called through the bindings' own cuLaunchKernelEx, a runner cost the host 10 us (H200's host, 2026-11-29).
    """
    copy = ctypes.create_string_buffer(ctypes.string_at(int(config.getPtr()), _CONFIG_BYTES), _CONFIG_BYTES)
    ctypes.c_uint64.from_buffer(copy, _CONFIG_STREAM_OFFSET).value = stream
    launch: Any = functools.partial(_kernel_launcher(), ctypes.addressof(copy), int(function), pointers, None)
    launch.config = copy
    return cast("Callable[[], int]", launch)


def driver_version() -> tuple[int, int]:
    """The CUDA version that the driver reports, as (major, minor)."""
    version = int(call("cuDriverGetVersion"))
    return version // 1000, version % 1000 // 10


@functools.cache
def tensor_map_encoder() -> Any:
    """`cuTensorMapEncodeTiled` as a C function that writes to an address of our choice.

    The object must be 64-byte aligned, which the bindings' own CUtensorMap object is not.
    """
    pointer, u32, enum = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int
    arguments = (pointer, enum, u32, pointer, pointer, pointer, pointer, pointer, enum, enum, enum, enum)
    return c_function("cuTensorMapEncodeTiled", _FIRST_VERSION_WITH_TENSOR_MAPS, *arguments)
