"""Buffers of a launch file as arrays: types, fills, files, comparison."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cakegen.emulator.launches.arrays import ELEMENTS, HostBuffer, compare_arrays, fill_array, read_array, scalar_bytes
from cakegen.errors import LaunchError


@pytest.mark.parametrize(
    ("element", "value", "expected"),
    [
        ("i32", -2, "feffffff"),
        ("u64", 2**64 - 1, "ffffffffffffffff"),
        ("i64", -(2**63), "0000000000000080"),
        ("u8", 255, "ff"),
        ("e4m3", 0x38, "38"),
        ("f32", 1.5, "0000c03f"),
        ("f64", 1, "000000000000f03f"),
        ("f16", 0.5, "0038"),
        ("bf16", 1.0, "803f"),
        # halfway between two bf16: to the even one
        ("bf16", 1 + 2**-8, "803f"),
        ("bf16", 1 + 3 * 2**-8, "823f"),
    ],
)
def test_scalar_has_the_bytes_of_its_type(element: str, value: float, expected: str) -> None:
    assert scalar_bytes(element, value).hex() == expected


@pytest.mark.parametrize(("element", "value"), [("i32", 2**31), ("u16", -1), ("i64", 0.5), ("u8", 256)])
def test_scalar_that_its_type_cannot_hold_is_refused(element: str, value: float) -> None:
    with pytest.raises(LaunchError, match=f"a scalar of type {element} must be a whole number"):
        scalar_bytes(element, value)


def test_fills() -> None:
    assert np.isnan(fill_array("f32", (2, 3), "poison")).all()
    assert (fill_array("i16", (4,), "poison") == -1).all()
    assert (fill_array("bf16", (2,), "poison") == 0xFFFF).all()
    assert fill_array("bf16", (2, 2), "index").tolist() == [[0, 0x3F80], [0x4000, 0x4040]]
    assert fill_array("f64", (3,), "index").tolist() == [0, 1, 2]
    assert fill_array("bf16", (2,), 1.0).tolist() == [0x3F80] * 2
    assert all(fill_array(element, (5,), "index").dtype == np.dtype(kind) for element, kind in ELEMENTS.items())


def test_buffer_is_an_aligned_copy() -> None:
    values = np.arange(7, dtype=np.uint16)
    buffer = HostBuffer("x", "update", "u16", values)
    assert buffer.address % 256 == 0
    buffer.array[0] = 9
    assert values[0] == 0


def test_file_of_another_type_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.npy"
    np.save(file, np.zeros(3, np.float32))
    assert read_array("x", "f32", file).tolist() == [0, 0, 0]
    with pytest.raises(LaunchError, match=r"holds float32 \[3\]; elements of type bf16 are kept as uint16"):
        read_array("x", "bf16", file)
    with pytest.raises(LaunchError, match=r"buffer x: .*none.npy: No such file"):
        read_array("x", "f32", tmp_path / "none.npy")
    file.write_text("text")
    with pytest.raises(LaunchError, match="buffer x: "):
        read_array("x", "f32", file)


def test_comparison_of_bits_and_of_values() -> None:
    wanted = fill_array("bf16", (4,), "index")
    got = wanted.copy()
    got[3] += 1
    assert compare_arrays("x", "bf16", wanted, wanted, 0, 0) is None
    assert compare_arrays("x", "bf16", got, wanted, 0, 0) == "1 of 4 elements of x differ from the expected bits"
    # one bf16 step at 3 is 2^-6
    assert compare_arrays("x", "bf16", got, wanted, 0, 2**-7) is None
    assert (
        compare_arrays("x", "bf16", got, wanted, 1e-3, 1e-3)
        == "1 of 4 elements of x are out of tolerance; the largest error is 0.0156"
    )
    assert "has the shape [4]; [2, 2] is expected" in str(compare_arrays("x", "bf16", got, got.reshape(2, 2), 0, 0))


def test_nan_agrees_with_nan_alone() -> None:
    a = np.array([np.nan, np.inf, 1], np.float32)
    assert compare_arrays("x", "f32", a, a, 1e-3, 0) is None
    assert "1 of 3" in str(compare_arrays("x", "f32", a, np.array([0, np.inf, 1], np.float32), 1e-3, 0))
