"""Which granules of global memory a box reads, for every size of its elements; which bulk copies are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cakegen.emulator.copies import bulk_landing
from cakegen.emulator.faults import Fault
from cakegen.emulator.memory import GRANULE, Buffer
from cakegen.emulator.tensor_view import TensorView
from cakegen.runtime.tensor_map import TensorMap

pytestmark = pytest.mark.emulator

PITCH, ROWS, FIRST = 64, 8, 128


@pytest.mark.parametrize("corner", [(0, 1), (-1, 0), (1, 7)], ids=str)
@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
def test_box_reads_the_granules_of_its_bytes(
    array: Callable[..., np.ndarray], element_bytes: int, corner: tuple[int, int]
) -> None:
    memory = array(np.zeros(FIRST + PITCH * ROWS), np.uint8)
    buffer = Buffer("x", memory.ctypes.data, memory.nbytes)
    width = PITCH // element_bytes
    box = (32 // element_bytes, 2)
    record = TensorMap(
        "map", memory.ctypes.data + FIRST, (width, ROWS), (PITCH,), box, "none", element_bytes=element_bytes
    )
    column, row = corner[0] * box[0], corner[1]
    inside = [
        FIRST + PITCH * y + element_bytes * x
        for y in range(row, min(row + box[1], ROWS))
        for x in range(max(column, 0), min(column + box[0], width))
    ]
    expected = sorted({byte // GRANULE for byte in inside})
    assert sorted(TensorView(record, buffer).granules((column, row)).tolist()) == expected


@pytest.mark.parametrize(("source", "num_bytes", "start"), [(0, 8, 0), (8, 16, 0), (0, 16, 8), (0, 0, 0)])
def test_bulk_copy_of_an_odd_size_is_reported(source: int, num_bytes: int, start: int) -> None:
    """PTX ISA, cp.async.bulk: the size and both addresses are multiples of 16."""
    nowhere: Any = None
    with pytest.raises(
        Fault, match=rf"cp\.async\.bulk of {num_bytes} bytes, {source:#x} -> {start:#x}: multiples of 16"
    ):
        bulk_landing(nowhere, source, num_bytes, nowhere, start, 0, nowhere)
