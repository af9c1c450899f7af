"""The stream probe: what a row's weights take to reach shared memory, and what a launch alone takes.

Imports compile, emit, runtime's driver layer and this package. The program is compiled where it runs; nothing of it is
in a generated tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cakegen import compile as compilation
from cakegen import paths
from cakegen.bench.arms import Arm
from cakegen.bench.rows import BF16_BYTES
from cakegen.compile import CompileRequest
from cakegen.emit.environment import template_environment
from cakegen.emit.program import COMPILE_FLAGS, Constant
from cakegen.emit.shared import HeaderPool
from cakegen.registry import LaunchRecord
from cakegen.runtime import driver
from cakegen.runtime.arguments import Argument, pack_arguments
from cakegen.runtime.control import open_control
from cakegen.runtime.device import open_device
from cakegen.runtime.tensor_map import TensorMap

CHUNK_COLS = 64
BARRIER_BYTES = 1024
RING_BYTES = 192 * 1024
"""More than half of an SM's shared memory, so that one CTA runs on each. A ring beyond 64 KB gained nothing (H200,
2026-11-29)."""
MATRICES = 3
# tells a report of a wait that gave up that no generated program was at fault
_PROGRAM_ID = 0x5EA40BE5
# a tensor map must have an address; that of a matrix without boxes is never used
_UNUSED = "unused"


@dataclass(frozen=True)
class BoxShape:
    """One variant: boxes of `rows` weight rows by `chunks` K chunks of 64 columns."""

    rows: int
    chunks: int

    @property
    def name(self) -> str:
        """As rows of results call it."""
        return f"stream {self.rows}x{self.chunks * CHUNK_COLS}"

    @property
    def bytes(self) -> int:
        """Bytes of one copy."""
        return self.rows * self.chunks * CHUNK_COLS * BF16_BYTES

    @property
    def slots(self) -> int:
        """Boxes that the ring holds."""
        return RING_BYTES // self.bytes


BOX_SHAPES = (BoxShape(128, 2), BoxShape(128, 1), BoxShape(64, 1))
"""Large boxes stream faster, small ones share few bytes more evenly; the limit is the fastest."""


def probe_request(shape: BoxShape, arch: str) -> CompileRequest:
    """The compile request of one variant.

    Raises
    ------
    EmitError
        A template is wrong.
    """
    environment = template_environment(paths.templates_root())
    pool = HeaderPool(environment)
    name = f"stream_probe_{shape.rows}x{shape.chunks}"
    constants = (
        Constant("kBoxRows", shape.rows, "weight rows of a box"),
        Constant("kBoxChunks", shape.chunks, f"K chunks of a box; a chunk is {CHUNK_COLS} columns"),
        Constant("kBoxBytes", shape.bytes, "bytes of a box"),
        Constant("kNumSlots", shape.slots, "boxes that the ring holds"),
        Constant("kRingOffset", BARRIER_BYTES, "bytes from the start of shared memory, behind the barriers"),
    )
    source = pool.render("probe/stream.cu", {"name": name, "constants": constants, "program_id": _PROGRAM_ID})
    return CompileRequest(
        name=name,
        arch=arch,
        source=source,
        headers=tuple(sorted(pool.texts().items())),
        flags=COMPILE_FLAGS,
        constants=(),
        kernel_symbol=f"kernel_{name}",
    )


def weight_map(name: str, matrix: torch.Tensor, shape: BoxShape) -> TensorMap:
    """Boxes over a `[rows, cols]` row-major bf16 matrix, which may be a column range of a wider one.

    Columns behind the last whole chunk are left out: they would be read past the range, and a limit must not be too
    high.
    """
    rows, cols = matrix.shape
    pitch_bytes = matrix.stride(0) * BF16_BYTES
    dims = (CHUNK_COLS, rows, cols // CHUNK_COLS)
    strides = (pitch_bytes, CHUNK_COLS * BF16_BYTES)
    return TensorMap(name, matrix.data_ptr(), dims, strides, (CHUNK_COLS, shape.rows, shape.chunks))


def probe_arguments(matrices: Sequence[torch.Tensor], shape: BoxShape, wait_record: int) -> tuple[Argument, ...]:
    """Arguments of a probe in the kernel's order; the first matrix stands in for those that are not there.

    Parameters
    ----------
    matrices
        One to three weights to stream.
    wait_record
        Address of the device's wait record.
    """
    assert 1 <= len(matrices) <= MATRICES, len(matrices)
    names = ("first", "second", "third")
    maps = [weight_map(name, matrix, shape) for name, matrix in zip(names, matrices, strict=False)]
    counts = [(-(-m.shape[0] // shape.rows), -(-(m.shape[1] // CHUNK_COLS) // shape.chunks)) for m in matrices]
    missing = MATRICES - len(matrices)
    maps += [weight_map(_UNUSED, matrices[0], shape)] * missing
    counts += [(0, 1)] * missing
    parameters = [
        Argument("parameter", f"{name}_{what}", value)
        for name, pair in zip(names, counts, strict=True)
        for what, value in zip(("tiles", "boxes"), pair, strict=True)
    ]
    of_maps = [Argument("tma_buffer", name, value) for name, value in zip(names, maps, strict=True)]
    return (*of_maps, Argument("buffer", "wait_record", wait_record), *parameters)


class StreamProbe:
    """The probe's variants, loaded on one device.

    Raises
    ------
    CakeError
        The device is not supported, or a variant does not compile.
    """

    def __init__(self, ordinal: int) -> None:
        device = open_device(ordinal)
        self._ordinal = ordinal
        self._grid_ctas = (device.sm_count, 1, 1)
        self._wait_record = open_control(device).wait_record.device_address
        self._record = LaunchRecord((32, 1, 1), (1, 1, 1), False, False, False, BARRIER_BYTES + RING_BYTES)
        requests = [probe_request(shape, device.arch.name) for shape in BOX_SHAPES]
        with driver.using_context(device.context):
            self._kernels = {
                shape: driver.load_kernel(
                    compilation.cached_cubin(request).cubin, request.kernel_symbol, self._record.dynamic_smem_bytes
                )
                for shape, request in zip(BOX_SHAPES, requests, strict=True)
            }

    def arms(self, matrices: Sequence[torch.Tensor]) -> dict[str, Arm]:
        """An arm for each variant that streams the matrices."""
        return {shape.name: self.arm(shape, matrices) for shape in BOX_SHAPES}

    def arm(self, shape: BoxShape, matrices: Sequence[torch.Tensor]) -> Arm:
        """One variant over some matrices."""
        arguments = probe_arguments(matrices, shape, self._wait_record)
        return Arm(self._launcher(shape, arguments, list(matrices)), {})

    def floor(self, matrix: torch.Tensor) -> Arm:
        """A launch of the same shape that copies nothing; `matrix` only gives its tensor maps an address."""
        shape = BOX_SHAPES[0]
        arguments = probe_arguments([matrix], shape, self._wait_record)
        idle = tuple(
            Argument(a.kind, a.name, 0) if a.kind == "parameter" and a.name.endswith("_tiles") else a for a in arguments
        )
        return Arm(self._launcher(shape, idle, [matrix]), {})

    def _launcher(self, shape: BoxShape, arguments: tuple[Argument, ...], kept: list[torch.Tensor]) -> Any:
        block = pack_arguments(arguments)
        config = driver.launch_config(self._record, self._grid_ctas)
        function = self._kernels[shape].function

        def launch() -> None:
            assert kept, "the matrices live as long as the launch"
            config.hStream = driver.current_stream(self._ordinal)
            driver.call("cuLaunchKernelEx", config, function, block.pointers, 0, what="stream probe")

        return launch
