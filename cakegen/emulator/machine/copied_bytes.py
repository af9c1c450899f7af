"""Leaf module: which bytes of a CTA's shared memory a `cp.async` or a narrow `st.async` still writes.

Its copies may be as narrow as 4 bytes, so that a mark for a granule of 16 would hold neighbours that have landed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault

Array = NDArray[Any]


class CopiedBytes:
    """A mark a byte.

    Parameters
    ----------
    start
        Where the program's part of the memory starts, from which reports count.
    """

    def __init__(self, size: int, start: int) -> None:
        self._size, self._start = size, start
        self._marks: Array | None = None

    def refuse(self, rows: Array, width: int, what: str) -> None:
        """Refuse to touch rows of `width` bytes of which some are on their way."""
        if self._marks is None:
            return
        marks = self._marks.reshape(-1, width)[rows]
        if np.count_nonzero(marks):
            bad = int(rows[marks.any(axis=1)][0]) * width - self._start
            raise Fault("pending-write", f"shared offset {bad} {what} while a copy of lanes still writes to it")

    def begin(self, rows: Array, width: int, what: str) -> None:
        """A copy is issued that writes a row for each lane."""
        if self._marks is None:
            self._marks = np.zeros(self._size, np.uint8)
        self.refuse(rows, width, f"is written by {what}")
        if np.unique(rows).size != rows.size:
            raise Fault("race", f"two lanes of {what} write to one place")
        self._marks.reshape(-1, width)[rows] = 1

    def end(self, rows: Array, width: int) -> None:
        """They have landed."""
        assert self._marks is not None
        self._marks.reshape(-1, width)[rows] = 0
