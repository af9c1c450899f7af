"""Which granules of global memory a box reads, for every size of its elements."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cakegen.emulator.copies import GRANULE, TensorView
from cakegen.emulator.memory import Buffer
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
