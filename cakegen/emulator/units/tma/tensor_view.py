"""A tensor map over an allocation: which elements and bytes a box holds (PTX ISA 5.5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.memory import GRANULE, AccessAccount, Buffer, GlobalMemory
from cakegen.errors import EmulationError
from cakegen.runtime.tensor_map import SWIZZLE_BYTES

Array = NDArray[Any]
# Where a box and its tensor overlap: in the box, in the tensor; slowest dimension first.
Clip = tuple[tuple[slice, ...], tuple[slice, ...]]


class MapRecord(Protocol):
    """What a tensor map says; the runtime's `TensorMap` is one."""

    @property
    def name(self) -> str:
        """The kernel argument."""

    @property
    def address(self) -> int:
        """First element."""

    @property
    def dims(self) -> tuple[int, ...]:
        """Extents in elements, innermost first."""

    @property
    def strides_bytes(self) -> tuple[int, ...]:
        """Distances along dims 1, 2, …"""

    @property
    def box(self) -> tuple[int, ...]:
        """Elements of one copy, innermost first."""

    @property
    def swizzle(self) -> str:
        """`none`, or the width of the swizzle: `32B`, `64B`, `128B`."""

    @property
    def oob(self) -> str:
        """`zeros`."""

    @property
    def element_bytes(self) -> int:
        """1, 2, 4 or 8."""

    @property
    def element(self) -> str:
        """Type of the elements, which reductions ask for."""


@dataclass(eq=False)
class TensorView:
    """A tensor map over an allocation: elements as an array, slowest dimension first, and who wrote them."""

    record: MapRecord
    buffer: Buffer
    accesses: AccessAccount | None = None
    elements: Array = field(init=False)
    writers: Array | None = field(init=False)

    def __post_init__(self) -> None:
        record, buffer = self.record, self.buffer
        offset = record.address - buffer.base
        size = record.element_bytes
        strides = (size, *record.strides_bytes)
        # a dimension of extent 1 moves nowhere, whatever its stride
        last = offset + sum((extent - 1) * step for extent, step in zip(record.dims, strides, strict=True))
        if offset < 0 or last + size > buffer.num_bytes:
            raise Fault(
                "out-of-bounds",
                f"tensor map {record.name} reaches byte {last + size} of {buffer.name}, which has {buffer.num_bytes}",
            )
        shape, steps = record.dims[::-1], strides[::-1]
        flat = buffer.data[offset : offset + (buffer.num_bytes - offset) // size * size].view(f"u{size}")
        self.elements = np.lib.stride_tricks.as_strided(flat, shape, steps)
        writer = buffer.writer
        self.writers = None
        # an entry is two bytes: elements of one byte can't be looked up in a view
        if writer is not None and size > 1:
            self.writers = np.lib.stride_tricks.as_strided(writer[offset // 2 :], shape, [step * 2 for step in steps])

    def _strided(self, marks: Array) -> Array:
        """One mark a byte of the allocation -> `[…, bytes of an element]`, as `elements` are laid out."""
        offset = self.record.address - self.buffer.base
        size = self.record.element_bytes
        steps = (1, size, *self.record.strides_bytes)
        return np.lib.stride_tricks.as_strided(marks[offset:], (size, *self.record.dims)[::-1], steps[::-1])

    @property
    def box_bytes(self) -> int:
        """Bytes of a box, whether or not it lies inside."""
        return int(np.prod(self.record.box)) * self.record.element_bytes

    def clip(self, corner: Sequence[int]) -> Clip | None:
        """Which elements of a box lie in the tensor; None: none does."""
        box, tensor = [], []
        for first, extent, width in zip(reversed(corner), self.elements.shape, self.record.box[::-1], strict=True):
            low, high = max(first, 0), min(first + width, extent)
            if low >= high:
                return None
            box.append(slice(low - first, high - first))
            tensor.append(slice(low, high))
        return tuple(box), tuple(tensor)

    def fetch(self, corner: Sequence[int]) -> Array:
        """The bytes of a box, dense; elements outside of the tensor are zeros."""
        box = np.zeros(self.record.box[::-1], self.elements.dtype)
        clip = self.clip(corner)
        if clip is None:
            return box.reshape(-1).view(np.uint8)
        inside, source = clip
        if self.accesses is not None:
            self.accesses.read_at(self.buffer, lambda marks: self._strided(marks)[source])
        if self.writers is not None and not self.writers[source].all():
            raise Fault("unwritten-read", f"a copy reads elements of {self.buffer.name} that nothing has written")
        box[inside] = self.elements[source]
        return box.reshape(-1).view(np.uint8)

    def cells(self, corner: Sequence[int]) -> tuple[Array, int]:
        """(offsets in the allocation, their width in bytes) of what a box holds: as wide as its ends allow, up to 16.

        The order is that of the box: row after row, innermost first.
        """
        clip = self.clip(corner)
        size = self.record.element_bytes
        if clip is None:
            return np.empty(0, np.int64), size
        *outer, inner = clip[1]
        first = self.record.address - self.buffer.base + size * inner.start
        num_bytes = size * (inner.stop - inner.start)
        # strides and the address are multiples of 16
        width = math.gcd(first, self.buffer.base, num_bytes, GRANULE)
        offsets = np.arange(first, first + num_bytes, width)
        for places, stride in zip(reversed(outer), self.record.strides_bytes, strict=True):
            steps = stride * np.arange(places.start, places.stop)
            offsets = offsets + steps.reshape(-1, *[1] * offsets.ndim)
        return offsets.reshape(-1), width

    def granules(self, corner: Sequence[int]) -> Array:
        """The 16-byte granules of the allocation that hold the box."""
        record, size = self.record, self.record.element_bytes
        strides = (size, *record.strides_bytes)
        inner = max(corner[0], 0), min(corner[0] + record.box[0], record.dims[0])
        base = record.address - self.buffer.base
        offsets = np.arange((base + size * inner[0]) // GRANULE, -(-(base + size * inner[1]) // GRANULE)) * GRANULE
        for first, width, extent, stride in zip(corner[1:], record.box[1:], record.dims[1:], strides[1:], strict=True):
            places = np.arange(max(first, 0), min(first + width, extent))
            offsets = offsets + places.reshape(-1, *[1] * offsets.ndim) * stride
        return offsets.reshape(-1) // GRANULE


def view_tensor(record: MapRecord, memory: GlobalMemory) -> TensorView:
    """The view of a map over the launch's memory.

    Raises
    ------
    Fault
        It reaches outside of its allocation, or is of a kind that is not modelled.
    """
    width = SWIZZLE_BYTES.get(record.swizzle)
    if width is None or record.oob != "zeros":
        raise EmulationError(f"tensor map {record.name}: {record.swizzle} and fill {record.oob} are not modelled")
    inner = record.box[0] * record.element_bytes
    if width and inner != width:
        raise EmulationError(
            f"tensor map {record.name}: an inner extent of {inner} bytes, below its swizzle's {width}, is not modelled"
        )
    buffer, _ = memory.find(np.array([record.address], np.uint64), 1, f"tensor map {record.name}")
    return TensorView(record, buffer, memory.accesses)
