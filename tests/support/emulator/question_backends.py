"""One kernel of `gpu/questions`, on a device or in the emulator; arrays are passed by their bytes and written back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from support.emit.committed_trees import device_headers

from cakegen.compile import CompileRequest, compile_cubin, compile_ptx
from cakegen.registry import LaunchRecord, load_registry
from cakegen.runtime.tensor_map import TensorMap

FOLDER = Path(__file__).parents[2] / "gpu" / "questions"
EXPORT = "tiny_latent_moe"
ARCH = "sm_90a"


@dataclass(frozen=True)
class Kernel:
    """`kernel_<name>` of a file, and its launch."""

    file: str
    name: str
    threads: int = 32
    smem_bytes: int = 0
    cluster: int = 1


@dataclass(frozen=True, eq=False)
class Mapped:
    """A tensor map over an array, `offset` bytes from its start."""

    array: np.ndarray
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str
    offset: int = 0

    def at(self, address: int) -> TensorMap:
        """The map for an array that lies there."""
        return TensorMap("map", address + self.offset, self.dims, self.strides_bytes, self.box, self.swizzle)


Run = Callable[..., None]
"""`run(kernel, grid, *arguments)`: an argument is an array, a `Mapped`, or an i32."""


def request_of(kernel: Kernel) -> CompileRequest:
    """Its text under the headers that generated programs use."""
    registry = load_registry(EXPORT)
    includes, headers = device_headers(registry, hopper=True)
    includes_text = "".join(f'#include "{name}"\n' for name in includes) + "using namespace cake;\n"
    source = includes_text + (FOLDER / f"{kernel.file}.cu").read_text(encoding="utf-8")
    return CompileRequest(kernel.file, ARCH, source, headers, ("-std=c++17",), (), f"kernel_{kernel.name}")


def array_of(argument: Any) -> np.ndarray | None:
    """The array behind an argument."""
    if isinstance(argument, Mapped):
        return argument.array
    return argument if isinstance(argument, np.ndarray) else None


def run_on_device(kernel: Kernel, grid: int, *arguments: Any) -> None:
    """Launch on the first CUDA device, wait, and copy the arrays back.

    Raises
    ------
    LaunchError
        The driver refused a tensor map or the launch.
    RuntimeError
        The kernel made a fault; the context is lost.
    """
    import torch

    from cakegen.runtime import driver
    from cakegen.runtime.arguments import Argument, pack_arguments
    from cakegen.runtime.device import open_device

    device = open_device(0)
    arrays = {id(array): array for array in map(array_of, arguments) if array is not None}
    copies = {key: torch.from_numpy(array.reshape(-1).view(np.uint8)).cuda() for key, array in arrays.items()}

    def bound(argument: Any) -> Argument:
        if isinstance(argument, Mapped):
            return Argument("tma_buffer", "map", argument.at(copies[id(argument.array)].data_ptr()))
        if isinstance(argument, np.ndarray):
            return Argument("buffer", "array", copies[id(argument)].data_ptr())
        return Argument("parameter", "number", int(argument))

    record = LaunchRecord((kernel.threads, 1, 1), (kernel.cluster, 1, 1), False, False, False, kernel.smem_bytes)
    with driver.using_context(device.context):
        block = pack_arguments(tuple(bound(argument) for argument in arguments))
        config = driver.launch_config(record, (grid, 1, 1))
        launch = driver.bind_launch(config, _loaded(kernel).function, block.pointers, driver.current_stream(0))
        assert launch() == 0, f"the launch of {kernel} was refused"
        torch.cuda.synchronize()
    for key, array in arrays.items():
        array.reshape(-1).view(np.uint8)[:] = copies[key].cpu().numpy()


@functools.cache
def _loaded(kernel: Kernel) -> Any:
    from cakegen.runtime import driver

    request = request_of(kernel)
    return driver.load_kernel(compile_cubin(request).cubin, request.kernel_symbol, kernel.smem_bytes)


def run_emulated(kernel: Kernel, grid: int, *arguments: Any) -> None:
    """The same in the emulator; whatever is issued happens at once, since these kernels wait by the clock.

    For that reason the order of their accesses is not checked either.

    Raises
    ------
    EmulationError
        A fault, or something that is not modelled.
    """
    from cakegen.emulator.launches.address_space import AddressSpace
    from cakegen.emulator.machine.adversary import Adversary
    from cakegen.emulator.machine.machine import Machine
    from cakegen.emulator.machine.memory import Buffer, GlobalMemory
    from cakegen.emulator.machine.residency import LaunchShape

    arrays = {id(array): array for array in map(array_of, arguments) if array is not None}
    copies = {key: _aligned(array) for key, array in arrays.items()}
    space = AddressSpace((copy.ctypes.data, copy.nbytes) for copy in copies.values())
    seen = {key: space[copy.ctypes.data] for key, copy in copies.items()}
    buffers = [
        Buffer(f"array {number}", seen[key], copy.nbytes, host=copy.ctypes.data)
        for number, (key, copy) in enumerate(copies.items())
    ]

    def bound(argument: Any) -> Any:
        if isinstance(argument, Mapped):
            return argument.at(seen[id(argument.array)])
        return seen[id(argument)] if isinstance(argument, np.ndarray) else int(argument)

    shape = LaunchShape((grid, 1, 1), (kernel.threads, 1, 1), (kernel.cluster, 1, 1), kernel.smem_bytes)
    values = [bound(argument) for argument in arguments]
    Machine(_translated(kernel), GlobalMemory(buffers), shape, values, Adversary("early"), checks=False).run()
    for key, array in arrays.items():
        array.reshape(-1).view(np.uint8)[:] = copies[key]


@functools.cache
def _translated(kernel: Kernel) -> Any:
    from cakegen.emulator.launches.launch import program_of

    return program_of(compile_ptx(request_of(kernel)), f"kernel_{kernel.name}")


def _aligned(array: np.ndarray) -> np.ndarray:
    raw = np.zeros(array.nbytes + 1024, np.uint8)
    start = -raw.ctypes.data % 1024
    copy = raw[start : start + array.nbytes]
    copy[:] = array.reshape(-1).view(np.uint8)
    return copy
