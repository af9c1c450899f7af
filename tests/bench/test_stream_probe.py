"""The stream probe without a GPU: it compiles, its boxes cover the weights, and its arguments fit the kernel."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch
from support.runtime.fakes import FakeDriver

from cakegen.bench.stream_probe import (
    BARRIER_BYTES,
    BOX_SHAPES,
    RING_BYTES,
    BoxShape,
    StreamProbe,
    probe_arguments,
    probe_request,
)
from cakegen.compile import compile_cubin
from cakegen.runtime import control, device, driver
from cakegen.runtime.tensor_map import TensorMap

SHAPES = pytest.mark.parametrize("shape", BOX_SHAPES, ids=lambda shape: shape.name)


@SHAPES
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_probe_compiles_into_registers_alone(shape: BoxShape, arch: str) -> None:
    report = compile_cubin(probe_request(shape, arch)).report
    assert (report.stack_bytes, report.spill_bytes) == (0, 0)


@SHAPES
def test_one_probe_fills_more_than_half_of_an_sm(shape: BoxShape) -> None:
    assert shape.slots * 8 <= BARRIER_BYTES
    assert 2 * (shape.slots * shape.bytes) > 233472
    assert RING_BYTES + BARRIER_BYTES <= 232448


@SHAPES
def test_arguments_stand_in_the_kernels_order(shape: BoxShape) -> None:
    source = probe_request(shape, "sm_90a").source
    parameters = re.search(r"kernel_\w+\((.*?)\) \{", source, re.DOTALL)
    assert parameters is not None
    wanted = [declared.split()[-1].lstrip("*") for declared in parameters[1].split(",")]
    arguments = probe_arguments([torch.empty(256, 128, dtype=torch.bfloat16)], shape, 0x1000)
    assert [argument.name for argument in arguments] == wanted
    kinds = ["tma_buffer"] * 3 + ["buffer"] + ["parameter"] * 6
    assert [argument.kind for argument in arguments] == kinds


@SHAPES
def test_boxes_cover_every_matrix_once(shape: BoxShape) -> None:
    up = torch.empty(512, 3584, dtype=torch.bfloat16)[:, 448:896]
    down = torch.empty(512, 768, dtype=torch.bfloat16)
    arguments = {argument.name: argument.value for argument in probe_arguments([up, down], shape, 0x1000)}
    first, second = arguments["first"], arguments["second"]
    assert isinstance(first, TensorMap)
    assert isinstance(second, TensorMap)
    assert (first.address, first.dims, first.strides_bytes) == (up.data_ptr(), (64, 512, 7), (7168, 128))
    assert (second.dims, second.strides_bytes) == ((64, 512, 12), (1536, 128))
    assert first.box_bytes == shape.bytes
    for name, chunks in (("first", 7), ("second", 12)):
        tiles, boxes = arguments[f"{name}_tiles"], arguments[f"{name}_boxes"]
        assert isinstance(tiles, int)
        assert isinstance(boxes, int)
        assert tiles * shape.rows == 512
        assert (boxes - 1) * shape.chunks < chunks <= boxes * shape.chunks
    assert (arguments["third_tiles"], arguments["third_boxes"]) == (0, 1)


def test_ragged_slice_is_not_read_past_its_end() -> None:
    up = torch.empty(128, 3584, dtype=torch.bfloat16)[:, 224:448]
    arguments = {argument.name: argument.value for argument in probe_arguments([up], BOX_SHAPES[1], 0x1000)}
    assert isinstance(arguments["first"], TensorMap)
    assert arguments["first"].dims == (64, 128, 3)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A driver that records launches; the compiler is the real one."""
    recorder = FakeDriver()
    monkeypatch.setattr(driver, "bindings", lambda: recorder)
    monkeypatch.setattr(driver, "tensor_map_encoder", lambda: lambda *arguments: 0)
    monkeypatch.setattr(driver, "stream_reader", lambda: lambda ordinal: 0x77)
    monkeypatch.setattr(device, "_opened", {})
    monkeypatch.setattr(control, "_controls", {})
    return recorder


def test_probe_launches_one_cta_an_sm_on_the_current_stream(fake: FakeDriver) -> None:
    probe = StreamProbe(0)
    matrices = [torch.empty(128, 512, dtype=torch.bfloat16), torch.empty(256, 512, dtype=torch.bfloat16)]
    for name, arm in probe.arms(matrices).items():
        fake.launches.clear()
        arm.call()
        (launched,) = fake.launches
        assert launched.grid_ctas == (132, 1, 1)
        assert launched.stream == 0x77
        assert launched.symbol == probe_request(next(s for s in BOX_SHAPES if s.name == name), "sm_90a").kernel_symbol


def test_floor_launches_the_same_kernel_with_no_box(fake: FakeDriver) -> None:
    arm = StreamProbe(0).floor(torch.empty(128, 512, dtype=torch.bfloat16))  # holds what the pointers lead to
    arm.call()
    (launched,) = fake.launches
    table = (ctypes.c_void_p * 10).from_address(launched.pointers)
    values = [ctypes.c_int32.from_address(address or 0).value for address in table[4:]]
    assert values[0::2] == [0, 0, 0]
    assert all(values[1::2]), "the walk divides by the boxes of a tile"
