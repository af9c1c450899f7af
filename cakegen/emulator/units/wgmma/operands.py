"""Operands of wgmma in shared memory: descriptors, and where a tile's elements lie."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.memory import GRANULE, SharedMemory
from cakegen.errors import EmulationError

Array = NDArray[Any]
# Start and stride between 8-row groups, in bytes; and the base offset: the 128-byte row of 1024 bytes in which the
# swizzle's pattern starts.
Descriptor = tuple[int, int, int]

_FIELDS = 0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 7 << 49 | 3 << 62
_SWIZZLE_128B = 1
_ATOM_BYTES = 1024


def decode_descriptor(lanes: Array, name: str) -> Descriptor:
    """The fields of the descriptor of a K-major operand with the 128-byte swizzle.

    Raises
    ------
    Fault, EmulationError
        It is not the same in all lanes, not valid, or of a layout that is not modelled.
    """
    return _decode(lanes.tobytes(), name)


@functools.lru_cache(maxsize=4096)
def _decode(lanes: bytes, name: str) -> Descriptor:
    value = int.from_bytes(lanes[:8], "little")
    if lanes != lanes[:8] * 32:
        raise Fault("descriptor", f"the lanes of a warp disagree on the descriptor of {name}")
    if value & ~_FIELDS:
        raise Fault("descriptor", f"descriptor of {name} {value:#018x} sets reserved bits")
    start, stride = (value & 0x3FFF) << 4, (value >> 32 & 0x3FFF) << 4
    if value >> 62 != _SWIZZLE_128B:
        raise EmulationError(f"descriptor of {name} {value:#018x}: only the 128-byte swizzle (code 1) is modelled")
    base = value >> 49 & 7
    row = ((start >> 7) - base) % 8
    if row or start % 32:
        raise Fault(
            "descriptor",
            f"descriptor of {name}: start {start:#x}, base offset {base} lies in row {row} of its 1024-byte atom at "
            f"byte {start % 128}; a tile starts in row 0, at a multiple of 32",
        )
    if stride == 0 or stride % _ATOM_BYTES:
        raise Fault("descriptor", f"descriptor of {name}: stride {stride} between 8-row groups is no multiple of 1024")
    return start, stride, base


@dataclass(frozen=True, eq=False)
class Tile:
    """What a product of one warp reads of shared memory.

    Parameters
    ----------
    a, b
        `[16, 16]` and `[n, 16]` indices of bf16 elements.
    granules
        Of both, each once.
    """

    a: Array
    b: Array
    granules: Array


@dataclass(frozen=True, eq=False)
class TileStack:
    """Tiles of products that follow each other: `[products, 16, 16]` and `[products, n, 16]` indices."""

    a: Array
    b: Array


class TileTable:
    """Where the elements of operands lie in shared memory, computed once a pair of descriptors."""

    def __init__(self) -> None:
        self._known: dict[tuple[Descriptor, Descriptor, int, int], Tile] = {}
        self._unions: dict[tuple[Tile, ...], Array] = {}
        # products that were decoded together (`batch`), by what they depend on
        self.batches: dict[Any, Any] = {}
        self._stacks: dict[tuple[Tile, ...], TileStack] = {}

    def tile(self, a: Descriptor, b: Descriptor, quarter: int, n: int, shared: SharedMemory) -> Tile:
        """A warp's quarter of the 64 rows of a, and all `n` rows of b."""
        key = (a, b, quarter, n)
        tile = self._known.get(key)
        if tile is None:
            elements = _elements(*a, 16 * quarter, 16), _elements(*b, 0, n)
            granules = np.unique(np.concatenate([each.ravel() for each in elements]) * 2 // GRANULE)
            tile = self._known[key] = Tile(*elements, granules)
        if int(tile.granules[-1]) * GRANULE >= shared.num_bytes:
            start = max(a[0], b[0])
            raise Fault("descriptor", f"an operand at {start:#x} ends behind the CTA's {shared.num_bytes:#x} bytes")
        return tile

    def stack(self, tiles: tuple[Tile, ...]) -> TileStack:
        """Some tiles in one piece."""
        if tiles not in self._stacks:
            self._stacks[tiles] = TileStack(np.stack([tile.a for tile in tiles]), np.stack([tile.b for tile in tiles]))
        return self._stacks[tiles]

    def union(self, tiles: tuple[Tile, ...]) -> Array:
        """The granules of some tiles, each once."""
        if tiles not in self._unions:
            self._unions[tiles] = np.unique(np.concatenate([tile.granules for tile in tiles]))
        return self._unions[tiles]


def _elements(start: int, stride: int, base: int, row: int, rows: int) -> Array:
    """`[rows, 16]` indices of bf16 elements, of rows from `row` on.

    The offset of an element is `row % 8 * 128 + row / 8 * stride + k * 2` from the start; bits 4 to 6 of the sum are
    then xored with bits 7 to 9 less the base offset (PTX ISA 9.7.15.5.1.2; docs/hopper-answers.md).
    """
    r = np.arange(row, row + rows)[:, None]
    linear = start + r % 8 * 128 + r // 8 * stride + np.arange(16)[None, :] * 2
    return np.asarray((linear ^ (((linear >> 7) - base & 7) << 4)) // 2)
