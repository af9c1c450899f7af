"""Operands of wgmma in shared memory: descriptors, and where a tile's elements lie."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.memory import GRANULE, SharedMemory
from cakegen.errors import EmulationError

Array = NDArray[Any]


class Descriptor(NamedTuple):
    """An operand in shared memory. Distances in bytes.

    Parameters
    ----------
    start, leading, stride
        Fields of the descriptor; what they step over depends on the layout (`_offsets`).
    base
        The base offset: the 128-byte row of 1024 bytes in which the swizzle's pattern starts.
    row_bytes
        Of a row of the atom: 16 without a swizzle.
    across
        M- or N-major: elements along the rows are neighbours; else K-major.
    width
        Bytes of an element.
    """

    start: int
    leading: int
    stride: int
    base: int
    row_bytes: int
    across: bool
    width: int


_FIELDS = 0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 7 << 49 | 3 << 62
# Swizzle code -> bytes of a row of the atom.
_ROW_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}
_ATOM_BYTES = 1024


def decode_descriptor(lanes: Array, name: str, width: int = 2, across: bool = False) -> Descriptor:
    """The fields of an operand's descriptor.

    Raises
    ------
    Fault, EmulationError
        It is not the same in all lanes, not valid, or of a layout that is not modelled.
    """
    return _decode(lanes.tobytes(), name, width, across)


@functools.lru_cache(maxsize=4096)
def _decode(lanes: bytes, name: str, width: int, across: bool) -> Descriptor:
    value = int.from_bytes(lanes[:8], "little")
    if lanes != lanes[:8] * 32:
        raise Fault("descriptor", f"the lanes of a warp disagree on the descriptor of {name}")
    if value & ~_FIELDS:
        raise Fault("descriptor", f"descriptor of {name} {value:#018x} sets reserved bits")
    start, leading, stride = ((value >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    found = Descriptor(start, leading, stride, value >> 49 & 7, _ROW_BYTES[value >> 62], across, width)
    if found.row_bytes < 128 and found.base:
        raise EmulationError(f"descriptor of {name} {value:#018x}: a base offset needs the 128-byte swizzle (code 1)")
    if found.row_bytes > 16:
        _check_atom(found, name)
    return found


def _check_atom(found: Descriptor, name: str) -> None:
    """A swizzled operand starts in row 0 of its atom, and strides over whole atoms."""
    start, period = found.start, 8 * found.row_bytes
    row = ((start >> 7) - found.base) % 8 if found.row_bytes == 128 else start % period // found.row_bytes
    if row or start % 32 or (found.across and start % found.row_bytes):
        raise Fault(
            "descriptor",
            f"descriptor of {name}: start {start:#x}, base offset {found.base} lies in row {row} of its {period}-byte "
            f"atom at byte {start % found.row_bytes}; a tile starts in row 0, at a multiple of 32",
        )
    if found.stride == 0 or found.stride % period:
        groups = "groups of 8 along K" if found.across else "8-row groups"
        raise Fault(
            "descriptor", f"descriptor of {name}: stride {found.stride} between {groups} is no multiple of {period}"
        )


@dataclass(frozen=True, eq=False)
class Tile:
    """What a product of one warp reads of shared memory.

    Parameters
    ----------
    a, b
        `[16, k]` and `[n, k]` indices of elements; A is None where it is in registers.
    granules
        Of both, each once.
    """

    a: Array | None
    b: Array
    granules: Array


@dataclass(frozen=True, eq=False)
class TileStack:
    """Tiles of products that follow each other: `[products, 16, k]` and `[products, n, k]` indices."""

    a: Array
    b: Array


class TileTable:
    """Where the elements of operands lie in shared memory, computed once a pair of descriptors."""

    def __init__(self) -> None:
        self._known: dict[tuple[Descriptor | None, Descriptor, int, int], Tile] = {}
        self._unions: dict[tuple[Tile, ...], Array] = {}
        # products that were decoded together (`batch`), by what they depend on
        self.batches: dict[Any, Any] = {}
        self._stacks: dict[tuple[Tile, ...], TileStack] = {}

    def tile(self, a: Descriptor | None, b: Descriptor, quarter: int, n: int, shared: SharedMemory) -> Tile:
        """A warp's quarter of the 64 rows of a, and all `n` rows of b."""
        key = (a, b, quarter, n)
        tile = self._known.get(key)
        if tile is None:
            right = _addresses(b, 0, n)
            left = None if a is None else _addresses(a, 16 * quarter, 16)
            both = [each.ravel() for each in (left, right) if each is not None]
            granules = np.unique(np.concatenate(both) // GRANULE)
            width = b.width
            tile = self._known[key] = Tile(None if left is None else left // width, right // width, granules)
        if int(tile.granules[-1]) * GRANULE >= shared.num_bytes:
            start = max(b.start, 0 if a is None else a.start)
            raise Fault("descriptor", f"an operand at {start:#x} ends behind the CTA's {shared.num_bytes:#x} bytes")
        return tile

    def stack(self, tiles: tuple[Tile, ...]) -> TileStack:
        """Some tiles, with A in shared memory, in one piece."""
        if tiles not in self._stacks:
            left = np.stack([tile.a for tile in tiles if tile.a is not None])
            self._stacks[tiles] = TileStack(left, np.stack([tile.b for tile in tiles]))
        return self._stacks[tiles]

    def union(self, tiles: tuple[Tile, ...]) -> Array:
        """The granules of some tiles, each once."""
        if tiles not in self._unions:
            self._unions[tiles] = np.unique(np.concatenate([tile.granules for tile in tiles]))
        return self._unions[tiles]


def _addresses(found: Descriptor, row: int, rows: int) -> Array:
    """`[rows, k]` addresses of elements, of rows from `row` on.

    Bits 4 and up of the address are xored with bits 7 and up, less the base offset (PTX ISA 9.7.15.5.1.2;
    docs/hopper-answers.md).
    """
    linear = found.start + _offsets(found, row, rows)
    bits = found.row_bytes // GRANULE - 1
    return np.asarray(linear ^ (((linear >> 7) - found.base & bits) << 4))


def _offsets(found: Descriptor, row: int, rows: int) -> Array:
    """Byte offsets from the start, before the swizzle, in the canonical layouts (PTX ISA 9.7.15.5.1)."""
    r = np.arange(row, row + rows)[:, None]
    k = np.arange(32 // found.width)[None, :]
    row_bytes, leading, stride = found.row_bytes, found.leading, found.stride
    along = k * found.width
    if not found.across:
        inner = along // 16 * leading + along % 16 if row_bytes == 16 else along
        return r % 8 * row_bytes + r // 8 * stride + inner
    if row_bytes == 16:
        return r % 8 * 2 + r // 8 * stride + k % 8 * 16 + k // 8 * leading
    chunk = row_bytes // 2
    return r % chunk * 2 + r // chunk * leading + k % 8 * row_bytes + k // 8 * stride
