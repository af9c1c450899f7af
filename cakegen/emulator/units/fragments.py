"""Leaf module: which element of a matrix a lane's register holds, for `mma.sync` and for A and D of `wgmma`.

PTX ISA 9.7.14.5 and 9.7.15.5.1. A register holds `e` neighbouring elements of a row of A or of a column of B; `g` is
the lane over 4 and `t` the lane modulo 4:

| matrix | element j of register r of a lane |
| --- | --- |
| A, 16 rows | row g + 8 (r % 2), column e t + 4 e (r / 2) + j |
| A, 8 rows | row g, column e t + 4 e r + j |
| B | row e t + 4 e r + j, column g |
| C, D | row g + 8 (r / 2), column 2 t + r % 2; of f16 pairs row g + 8 r, column 2 t + j |
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@functools.cache
def factor_cells(rows: int, registers: int, elements: int) -> tuple[Array, Array]:
    """(row, place in K) of `[registers, 32, elements]`; B is the same with 8 rows, its columns."""
    r = np.arange(registers)[:, None, None]
    lane = np.arange(32)[None, :, None]
    j = np.arange(elements)[None, None, :]
    high, step = (r % 2, r // 2) if rows == 16 else (0 * r, r)
    row = lane // 4 + 8 * high + 0 * j
    return row, elements * (lane % 4) + 4 * elements * step + j


@functools.cache
def sum_cells(registers: int, elements: int) -> tuple[Array, Array]:
    """(row, column) of `[registers, 32, elements]` sums of 8 columns."""
    number = np.arange(registers * elements).reshape(registers, 1, elements)
    lane = np.arange(32)[None, :, None]
    return lane // 4 + 8 * (number // 2), 2 * (lane % 4) + number % 2
