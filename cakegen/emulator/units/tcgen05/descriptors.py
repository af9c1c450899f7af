"""Descriptors of tcgen05 decoded from their bits.

Shared-memory descriptor: PTX ISA 9.7.16.4.1; canonical layouts 9.7.16.10.2 and 9.7.16.3; instruction descriptor of
kind::f16: 9.7.16.4.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.memory import GRANULE, SHARED_START
from cakegen.errors import EmulationError

Array = NDArray[Any]

# Swizzle code in bits 61 to 63 -> bytes of a row of the atom. 1 (128 bytes in atoms of 32) needs 32-bit types.
_ROW_BYTES = {0: 16, 2: 128, 4: 64, 6: 32}
_RESERVED = 0b11 << 14 | 0b11 << 30 | 0xFF << 53
_VERSION = 0b111 << 46
_K = 16


@dataclass(frozen=True)
class SharedDescriptor:
    """One matrix in shared memory. All distances in bytes, relative to the CTA."""

    start: int
    leading: int
    stride: int
    row_bytes: int

    @property
    def period(self) -> int:
        """Bytes after which the swizzle repeats: 8 rows."""
        return 8 * self.row_bytes


def decode_shared(value: int, name: str) -> SharedDescriptor:
    """Decode the 64 bits.

    Raises
    ------
    Fault
        Reserved bits, a wrong constant, or a swizzle that does not exist.
    EmulationError
        A legal field that is not modelled.
    """
    what = f"descriptor of {name} {value:#018x}"
    if value & _RESERVED:
        raise Fault("descriptor", f"{what} sets reserved bits {value & _RESERVED:#x}")
    if value & _VERSION != 1 << 46:
        raise Fault("descriptor", f"{what}: bits 46 to 48 are {value >> 46 & 7:#05b}, not 0b001 (sm_90 has 0 there)")
    code = value >> 61
    if code not in _ROW_BYTES:
        why = "is for 32-bit types" if code == 1 else "does not exist"
        raise Fault("descriptor", f"{what}: swizzle code {code} {why}")
    if value >> 49 & 7 or value >> 52 & 1:
        raise EmulationError(f"{what}: a base offset or an absolute leading dimension is not modelled")
    start, leading, stride = ((value >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    return SharedDescriptor(start, leading, stride, _ROW_BYTES[code])


class OperandTable:
    """Where the elements of operands lie in shared memory, computed once a descriptor."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool, int, int], tuple[Array, Array]] = {}

    def operand(self, value: int, across: bool, rows: int, name: str, depth: int = _K) -> tuple[Array, Array]:
        """(`[rows, depth]` indices of 16-bit elements, granules) of an operand.

        Parameters
        ----------
        across
            M- or N-major ("transposed"): elements along the rows are neighbours; else K-major.
        """
        key = (value, across, rows, depth)
        if key not in self._known:
            descriptor = decode_shared(value, name)
            (_check_across if across else _check_along)(descriptor, rows, name)
            linear = descriptor.start + _offsets(descriptor, across, rows, depth)
            # bits 4 and up of the absolute address are xored with bits 7 and up (PTX ISA 5.5.7)
            bits = descriptor.row_bytes // GRANULE - 1
            swizzled = linear ^ ((linear >> 7 & bits) << 4)
            self._known[key] = swizzled // 2, np.unique(swizzled // GRANULE)
        return self._known[key]


def _offsets(descriptor: SharedDescriptor, across: bool, rows: int, depth: int) -> Array:
    """Byte offsets of elements `[rows, depth]` from the start, before the swizzle (PTX ISA 9.7.16.10.2)."""
    r, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
    width, lbo, sbo = descriptor.row_bytes, descriptor.leading, descriptor.stride
    if not across:
        inner = k // 8 * lbo + k % 8 * 2 if width == 16 else k * 2
        return r % 8 * width + r // 8 * sbo + inner
    if width == 16:
        return r % 8 * 2 + r // 8 * sbo + k % 8 * 16 + k // 8 * lbo
    chunk = width // 2
    return r % chunk * 2 + r // chunk * lbo + k % 8 * width + k // 8 * sbo


def _check_along(descriptor: SharedDescriptor, rows: int, name: str) -> None:
    """K-major: a start within the first row of an atom, 8-row groups at whole atoms."""
    start, width, period = descriptor.start, descriptor.row_bytes, descriptor.period
    if width == 16:
        return
    if start % period >= width or start % 32:
        raise Fault(
            "descriptor",
            f"descriptor of {name}: start {start:#x} is byte {start % period} of its {period}-byte atom; a K-major "
            f"tile with rows of {width} bytes starts in row 0, at a multiple of 32",
        )
    if rows > 8:
        _check_distance(descriptor.stride, period, "stride between 8-row groups", name)


def _check_across(descriptor: SharedDescriptor, rows: int, name: str) -> None:
    """M- or N-major: whole atoms."""
    start, width, period = descriptor.start, descriptor.row_bytes, descriptor.period
    if width == 16:
        return
    if start % period:
        raise Fault(
            "descriptor", f"descriptor of {name}: start {start:#x} is no multiple of its {period}-byte atom (M/N-major)"
        )
    _check_distance(descriptor.stride, period, "stride between groups of 8 along K", name)
    if rows > width // 2:
        _check_distance(descriptor.leading, period, f"step between chunks of {width // 2} rows", name)


def _check_distance(distance: int, period: int, what: str, name: str) -> None:
    if distance == 0 or distance % period:
        raise Fault("descriptor", f"descriptor of {name}: {what} is {distance} bytes, no multiple of {period}")


def check_reach(granules: Array, num_bytes: int, name: str) -> None:
    """Refuse an operand that leaves the CTA's shared memory."""
    first, last = int(granules[0]) * GRANULE, int(granules[-1]) * GRANULE
    if first < SHARED_START or last >= num_bytes:
        raise Fault(
            "descriptor",
            f"operand {name} lies at shared offsets {first - SHARED_START} to {last + 15 - SHARED_START}; the CTA has "
            f"{num_bytes - SHARED_START} bytes",
        )


@dataclass(frozen=True)
class InstructionDescriptor:
    """What one tcgen05.mma of kind::f16 computes. M and N are those of the pair for cta_group::2.

    `a_half`, `b_half`: the operand is f16, not bf16.
    """

    m: int
    n: int
    a_across: bool
    b_across: bool
    a_negated: bool
    b_negated: bool
    a_half: bool
    b_half: bool


def decode_instruction(value: int, cta_group: int) -> InstructionDescriptor:
    """Decode the 32 bits for kind::f16.

    Raises
    ------
    Fault
        A combination that the ISA does not list.
    EmulationError
        One that it lists and this does not model.
    """
    what = f"instruction descriptor {value:#010x}"
    reserved = value & (1 << 3 | 1 << 6 | 1 << 23 | 1 << 29 | 0b11 << 30)
    if reserved:
        raise Fault("descriptor", f"{what} sets bits {reserved:#x}, which kind::f16 has no use for")
    if value & 0b111:
        raise EmulationError(f"{what}: sparse matrices are not modelled")
    d_type, a_type, b_type = value >> 4 & 3, value >> 7 & 7, value >> 10 & 7
    if d_type > 1 or a_type > 1 or b_type > 1 or (d_type == 0 and 1 in (a_type, b_type)):
        raise Fault("descriptor", f"{what}: types D {d_type}, A {a_type}, B {b_type} are no combination of kind::f16")
    if d_type != 1:
        raise EmulationError(f"{what}: only an fp32 accumulator is modelled")
    m, n = (value >> 24 & 31) * 16, (value >> 17 & 63) * 8
    heights, step = ((64, 128), 8) if cta_group == 1 else ((128, 256), 16)
    if m not in heights or n % step or not step <= n <= 256:
        raise Fault(
            "descriptor",
            f"{what}: M {m} x N {n} with cta_group::{cta_group}; M is {heights[0]} or {heights[1]}, N {step} to 256 in "
            f"steps of {step}",
        )
    negated, across = value >> 13 & 3, value >> 15 & 3
    flags = (across & 1, across & 2, negated & 1, negated & 2, a_type == 0, b_type == 0)
    return InstructionDescriptor(m, n, *map(bool, flags))
