"""Which bytes of an allocation a strided tensor holds: sorted ranges that do not touch. Imports numpy only."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Offsets = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Extents:
    """Byte ranges `[starts[i], ends[i])` in rising order, with a gap between each and the next.

    Any strides make such ranges: rows that are pitched, planes that lie between the rows of each other, planes that
    overlap.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    _first: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_first", self.starts.tolist())

    @property
    def num_bytes(self) -> int:
        """Bytes from 0 to behind the last one held."""
        return int(self.ends[-1]) if self.ends.size else 0

    @property
    def dense(self) -> bool:
        """Whether nothing lies between two bytes that are held."""
        return self.starts.size <= 1

    def holds(self, offset: int) -> bool:
        """Whether a byte is held."""
        index = bisect.bisect_right(self._first, offset) - 1
        return index >= 0 and offset < int(self.ends[index])

    def outside(self, offsets: Offsets, width: int) -> NDArray[np.bool_]:
        """Which accesses of `width` bytes reach a byte that is not held."""
        places = offsets.astype(np.int64)
        index = np.searchsorted(self.starts, places, "right") - 1
        return (index < 0) | (places + width > self.ends[np.maximum(index, 0)])

    def share_bytes(self, others: Extents) -> bool:
        """Whether a byte is in both."""
        index = np.searchsorted(self.ends, others.starts, "right")
        inside = index < self.starts.size
        return bool((self.starts[index[inside]] < others.ends[inside]).any())

    def moved(self, num_bytes: int) -> Extents:
        """The ranges so many bytes further on."""
        return Extents(self.starts + num_bytes, self.ends + num_bytes)


def rows_extents(row_bytes: int, rows: int, pitch_bytes: int, planes: int = 1, plane_bytes: int = 0) -> Extents:
    """The bytes of `planes` matrices `plane_bytes` apart, each of `rows` rows `pitch_bytes` apart."""
    first = np.arange(planes, dtype=np.int64)[:, None] * plane_bytes + np.arange(rows, dtype=np.int64) * pitch_bytes
    starts = first.reshape(-1)
    return joined([Extents(starts, starts + row_bytes)])


def joined(parts: Iterable[Extents]) -> Extents:
    """The bytes of any of the parts, whose own ranges may be in any order and overlap."""
    pairs = [(part.starts, part.ends) for part in parts]
    starts = np.concatenate([first for first, _ in pairs])
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    ends = np.maximum.accumulate(np.concatenate([last for _, last in pairs])[order])
    begins = np.ones(starts.size, bool)
    begins[1:] = starts[1:] > ends[:-1]
    places = np.flatnonzero(begins)
    return Extents(starts[places], np.append(ends[places[1:] - 1], ends[-1:]))
