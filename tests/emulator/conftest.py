"""Fixtures of the emulator's tests: CUDA text -> NVRTC -> emulated launch, and programs with a planted fault."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.emit.committed_trees import device_headers
from support.emulator.copied_boxes import Box, record_boxes

from cakegen.compile import CompileRequest, compile_ptx, request_for
from cakegen.emulator.launches.address_space import AddressSpace
from cakegen.emulator.launches.launch import program_of
from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.machine.memory import Buffer, GlobalMemory
from cakegen.emulator.machine.residency import LaunchShape
from cakegen.emulator.text.translate import Program
from cakegen.registry import Registry, load_registry

EXPORT = "tiny_latent_moe"
KERNELS = Path(__file__).parent / "kernels"


@pytest.fixture(scope="session")
def registry() -> Registry:
    """The small model's tree."""
    return load_registry(EXPORT)


@functools.cache
def _compiled(source: str, arch: str) -> Program:
    registry = load_registry(EXPORT)
    own = [] if arch == "sm_90a" else [("tcgen05.cuh", (KERNELS / "tcgen05.cuh").read_text())]
    includes, headers = device_headers(registry, hopper=arch == "sm_90a")
    text = "".join(f'#include "{name}"\n' for name in (*includes, *dict(own))) + f"using namespace cake;\n{source}"
    request = CompileRequest("test", arch, text, (*headers, *own), ("-std=c++17", "-lineinfo"), (), "kernel_test")
    return program_of(compile_ptx(request), "kernel_test")


def aligned(values: Any, dtype: Any = None) -> np.ndarray:
    """A copy of an array at an address that is a multiple of 256."""
    values = np.ascontiguousarray(values, dtype)
    raw = np.zeros(values.nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 256
    copy = raw[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def _launch(
    source: str,
    *values: Any,
    grid: int | tuple[int, int] = 1,
    block: int = 32,
    cluster: int = 1,
    smem: int = 0,
    cooperative: bool = False,
    adversary: Adversary | None = None,
    outputs: tuple[int, ...] = (),
    arch: str = "sm_90a",
    **options: Any,
) -> Machine:
    """Run `kernel_test`; arrays are buffers (those numbered in `outputs` are checked); `options` are the machine's."""
    arrays = {number: value for number, value in enumerate(values) if isinstance(value, np.ndarray)}
    space = AddressSpace((each.ctypes.data, each.nbytes) for each in arrays.values())
    buffers = [
        Buffer(f"argument {number}", space[host := each.ctypes.data], each.nbytes, output=number in outputs, host=host)
        for number, each in arrays.items()
    ]

    def bound(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return space[value.ctypes.data]
        # a map's memory is the array in its `address`
        return dataclasses.replace(value, address=space[value.address]) if hasattr(value, "box") else value

    arguments = [bound(value) for value in values]
    shape = LaunchShape(
        (grid, 1, 1) if isinstance(grid, int) else (*grid, 1), (block, 1, 1), (cluster, 1, 1), smem, cooperative
    )
    program, memory = _compiled(source, arch), GlobalMemory(buffers)
    machine = Machine(program, memory, shape, arguments, adversary or Adversary("early"), **options)
    machine.run()
    return machine


@pytest.fixture
def launch() -> Callable[..., Machine]:
    """Runs a CUDA text; see `_launch`."""
    return _launch


@pytest.fixture
def program() -> Callable[[str], str]:
    """The text of a program in `kernels/`, for `launch`."""

    def read(name: str) -> str:
        roles = (KERNELS / "gemm_pair.cuh").read_text().replace("#pragma once", "")
        return ("" if "one_cta" in name else roles) + (KERNELS / f"{name}.cu").read_text()

    return read


@pytest.fixture
def array() -> Callable[..., np.ndarray]:
    """Makes aligned arrays."""
    return aligned


@pytest.fixture
def token_boxes(monkeypatch: pytest.MonkeyPatch) -> list[Box]:
    """The boxes of tokens that runs copy from now on."""
    return record_boxes(monkeypatch, {"x", "shared_act", "y_workspace"})


@pytest.fixture
def planted() -> Callable[..., Callable[[Registry, str, str], Program]]:
    """A loader whose programs have one text replaced, in the source and what it includes or in the PTX."""

    def make(old: str, new: str, *, ptx: bool = False) -> Callable[[Registry, str, str], Program]:
        def load(registry: Registry, key: str, arch: str) -> Program:
            request = request_for(registry, key, arch, ("-lineinfo",))
            if not ptx:
                headers = tuple((name, text.replace(old, new)) for name, text in request.headers)
                changed = dataclasses.replace(request, source=request.source.replace(old, new), headers=headers)
                assert changed != request, f"{request.name} does not hold {old!r}"
                request = changed
            text = compile_ptx(request)
            if ptx:
                assert old in text, f"the PTX of {request.name} does not hold {old!r}"
                text = text.replace(old, new, 1)
            return program_of(text, request.kernel_symbol)

        return load

    return make
