"""Tensor maps: the limits of cuTensorMapEncodeTiled, the two views, and what the driver is given."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import pytest
from cuda.bindings import driver as real
from support.runtime.fakes import Machine

from cakegen.errors import LaunchError
from cakegen.registry import TensorMapEntry
from cakegen.runtime import driver, tensor_map
from cakegen.runtime.tensor_map import TensorMap, encode_tensor_map, view_matrix

GOOD = TensorMap("x", 0x1000, (64, 5, 112), (14336, 128), (64, 8, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"address": 0x1008}, r"address must be a multiple of 16 .* got 0x1008 \(mod 16 = 8\)"),
        ({"address": 0}, "not null"),
        ({"dims": (64, 0, 112)}, r"dims\[1\] must be 1 to 2\^32"),
        ({"dims": (64, 2**32 + 1, 112)}, r"dims\[1\]"),
        ({"strides_bytes": (14328, 128)}, r"strides_bytes\[0\] .* got 14328 \(mod 16 = 8\)"),
        ({"strides_bytes": (2**40, 128)}, r"strides_bytes\[0\] must be a multiple of 16 below 2\^40"),
        ({"strides_bytes": (14336, 0)}, r"strides_bytes\[1\]"),
        ({"box": (64, 257, 2)}, r"box\[1\] must be 1 to 256"),
        ({"box": (64, 0, 2)}, r"box\[1\]"),
        ({"box": (65, 8, 2)}, r"box\[0\] must be a multiple of 16 bytes .* 65 elements \* 2 bytes = 130"),
        ({"box": (72, 8, 2)}, r"at most the 128 bytes of its swizzle .* 72 elements \* 2 bytes = 144"),
        ({"swizzle": "64B"}, "at most the 64 bytes of its swizzle"),
        ({"swizzle": "96B"}, "swizzle, promotion, oob"),
        ({"strides_bytes": (14336,)}, "rank must be"),
        ({"dims": (64,) * 6, "box": (64,) * 6, "strides_bytes": (128,) * 5}, "rank must be 1 to 5"),
    ],
)
def test_tensor_map_refuses_by_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message) as error:
        dataclasses.replace(GOOD, **change)
    assert "tensor map x" in str(error.value)


@pytest.mark.parametrize("change", [{"dims": (64, 2**32, 112)}, {"box": (64, 256, 2)}, {"address": 16}])
def test_tensor_map_accepts_the_limits_themselves(change: dict[str, Any]) -> None:
    dataclasses.replace(GOOD, **change)


def test_box_bytes_counts_a_whole_box() -> None:
    assert GOOD.box_bytes == 64 * 8 * 2 * 2


def test_chunks_view_steps_over_columns_by_128_bytes() -> None:
    entry = TensorMapEntry("x", "x", "chunks", (64, 8, 2))
    view = view_matrix(entry, 0x1000, rows=5, cols=7168, pitch_elems=7680)
    assert (view.dims, view.strides_bytes, view.box) == ((64, 5, 112), (15360, 128), (64, 8, 2))


def test_columns_view_ends_at_the_last_column() -> None:
    entry = TensorMapEntry("y", "y", "columns", (64, 8, 1))
    view = view_matrix(entry, 0x1000, rows=5, cols=672, pitch_elems=3584)
    assert (view.dims, view.strides_bytes) == ((672, 5, 1), (7168, 35840))


@pytest.mark.parametrize(("view", "cols", "message"), [("chunks", 224, r"224 = 3 \* 64 \+ 32"), ("rows", 64, "'rows'")])
def test_view_matrix_refuses(view: str, cols: int, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        view_matrix(TensorMapEntry("x", "x", view, (64, 8, 1)), 0x1000, 5, cols, cols)


def test_encode_gives_the_driver_every_field(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(driver, "tensor_map_encoder", lambda: lambda *arguments: seen.extend(arguments) or 0)
    encode_tensor_map(GOOD, 0x4000)
    destination, dtype, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, oob = seen
    assert (destination, rank, address) == (0x4000, 3, 0x1000)
    assert [list(array) for array in (dims, strides, box, steps)] == [[64, 5, 112], [14336, 128], [64, 8, 2], [1, 1, 1]]
    assert all(isinstance(array, ctypes.Array) for array in (dims, strides, box, steps))
    assert dtype == real.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    assert interleave == real.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
    assert swizzle == real.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
    assert promotion == real.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE
    assert oob == real.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE


def test_enumeration_values_are_the_drivers() -> None:
    for name, value in tensor_map._SWIZZLES.items():
        assert getattr(real.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{name.upper()}") == value
    for name, value in tensor_map._PROMOTIONS.items():
        spelled = name.upper() if name == "none" else f"L2_{name}"
        assert getattr(real.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{spelled}") == value
    nan = real.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA
    assert {"zeros": 0, "nan": nan} == tensor_map._OOB_FILLS


def test_encode_refusal_shows_the_record(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "tensor_map_encoder", lambda: lambda *arguments: 1)
    with pytest.raises(LaunchError, match=r"refused TensorMap\(name='x'.*CUDA_ERROR_INVALID_VALUE"):
        encode_tensor_map(GOOD, 0x4000)
