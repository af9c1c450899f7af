"""Arrays of this machine's memory as buffers of a launch: element types, files, fills, comparison.

numpy has no bf16 and no 8-bit floats: they are kept as their bits, and the element type says what they mean.
"""

from __future__ import annotations

import math
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.text.arithmetic import bf16_single
from cakegen.emulator.units.tensor_core import bf16_to_f32
from cakegen.errors import LaunchError

Array = NDArray[Any]

ELEMENTS: dict[str, str] = {
    "bf16": "u2",
    "f16": "f2",
    "f32": "f4",
    "f64": "f8",
    "e4m3": "u1",
    "e5m2": "u1",
    "i8": "i1",
    "u8": "u1",
    "i16": "i2",
    "u16": "u2",
    "i32": "i4",
    "u32": "u4",
    "i64": "i8",
    "u64": "u8",
}
"""Element types and the numpy types that hold them: bf16 and the 8-bit floats as their bits."""

# All bits set: NaN in every float type, -1 in every signed one.
POISON_BYTE = 0xFF
_ALIGN_BYTES = 256
_PART_ELEMS = 1 << 20
_MOST_HEADER_BYTES = 10000
# what a damaged header makes of numpy's reader, which parses it as Python
_DAMAGED = (
    *(ArithmeticError, EOFError, LookupError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError),
    tokenize.TokenError,
)


@dataclass(eq=False)
class HostBuffer:
    """One array that launches share.

    Parameters
    ----------
    role
        `read`: a write to it is a fault. `write`: every element must be written, each by one CTA of a launch, and none
        read before. `update`: read and written freely.
    array
        Its first values; copied to an address that is a multiple of 256 bytes.
    """

    name: str
    role: str
    element: str
    array: NDArray[Any]

    def __post_init__(self) -> None:
        raw = np.empty(self.array.nbytes + _ALIGN_BYTES, np.uint8)
        start = -raw.ctypes.data % _ALIGN_BYTES
        copy = raw[start : start + self.array.nbytes].view(self.array.dtype).reshape(self.array.shape)
        copy[...] = self.array
        self.array = copy

    @property
    def address(self) -> int:
        """Of the first element."""
        return int(self.array.ctypes.data)


def scalar_bytes(element: str, value: float) -> bytes:
    """A scalar argument as the bytes of its parameter.

    Raises
    ------
    LaunchError
        The type can't hold the value.
    """
    kind = ELEMENTS[element]
    if kind[0] == "f" or element == "bf16":
        return _float_bytes(element, value)
    if kind[0] != "f":
        limits = np.iinfo(kind)
        if (isinstance(value, float) and not value.is_integer()) or not limits.min <= value <= limits.max:
            raise LaunchError(f"a scalar of type {element} must be a whole number {limits.min} … {limits.max}; {value}")
        value = int(value)
    return np.array([value], kind).tobytes()


def _float_bytes(element: str, value: float) -> bytes:
    try:
        with np.errstate(over="ignore"):
            stored = np.array([value], "f4" if element == "bf16" else ELEMENTS[element])
            lost = math.isfinite(value) and not np.isfinite(stored[0])
    except OverflowError:
        lost = True
    if lost:
        raise LaunchError(f"a scalar of type {element} must be within its range; {str(value)[:40]} is not")
    return np.asarray(bf16_single(stored)).tobytes() if element == "bf16" else stored.tobytes()


def fill_array(element: str, shape: Sequence[int], fill: str | float, name: str = "") -> Array:
    """An array of one value, of `poison` (all bits set), of `index`: 0, 1, 2, … in memory order, or of `normal`.

    Parameters
    ----------
    name
        Normal random numbers of buffers with other names are others; the same in every run.

    Raises
    ------
    LaunchError
        The type can't hold the value.
    """
    dtype = np.dtype(ELEMENTS[element])
    if fill == "poison":
        return np.full((*shape, dtype.itemsize), POISON_BYTE, np.uint8).view(dtype)[..., 0]
    if fill in ("index", "normal"):
        stored = np.empty(math.prod(shape), dtype)
        for first, values in _values(element, stored.size, fill == "normal", name):
            part = bf16_single(values.astype(np.float32)) if element == "bf16" else values.astype(dtype)
            stored[first : first + values.size] = part
        return stored.reshape(shape)
    return np.full(shape, np.frombuffer(scalar_bytes(element, float(fill)), dtype)[0])


def _values(element: str, count: int, normal: bool, name: str) -> Iterator[tuple[int, Array]]:
    """(number of the first, values) in parts: 8 bytes each are many for elements of one."""
    if normal and ELEMENTS[element][0] != "f" and element != "bf16":
        raise LaunchError(f"buffer {name}: fill 'normal' is for bf16, f16, f32 and f64; its elements are {element}")
    source = np.random.default_rng(list(name.encode()))
    for first in range(0, count, _PART_ELEMS):
        end = min(first + _PART_ELEMS, count)
        yield first, source.standard_normal(end - first) if normal else np.arange(first, end)


def read_array(name: str, element: str, file: Path) -> Array:
    """The array of a `.npy` file.

    Raises
    ------
    LaunchError
        It can't be read, or holds elements of another type.
    """
    dtype = np.dtype(ELEMENTS[element])
    try:
        with file.open("rb") as stream:
            shape, order, held = _read_header(stream)
            size = math.prod(shape)
            if held == dtype and size:
                left = file.stat().st_size - stream.tell()
                if size * dtype.itemsize != left:
                    raise ValueError(f"its header says {list(shape)} of {held}, and {left} bytes follow")
                values = np.fromfile(stream, dtype, size)
    except OSError as error:
        raise LaunchError(f"buffer {name}: {file}: {error.strerror or error}") from None
    except _DAMAGED as error:
        raise LaunchError(f"buffer {name}: {file} is no whole .npy file: {str(error)[:200]}") from None
    if held != dtype or not size:
        raise LaunchError(
            f"buffer {name}: {file} holds {held} {list(shape)}; elements of type {element} are kept as {dtype}"
        )
    return np.ascontiguousarray(values.reshape(shape, order=order))


def _read_header(stream: BinaryIO) -> tuple[tuple[int, ...], Literal["C", "F"], Any]:
    """Shape, order and type of a `.npy` file; the stream then stands at its values (NumPy, NEP 1)."""
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"its format is {version}; (1, 0) and (2, 0) are read")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream, max_header_size=_MOST_HEADER_BYTES)
    if any(extent < 0 for extent in shape) or len(shape) > 32:
        raise ValueError(f"its header says {list(shape)}")
    return shape, "F" if fortran else "C", dtype


def compare_arrays(name: str, element: str, got: Array, wanted: Array, atol: float, rtol: float) -> str | None:
    """What is wrong with an array, in words; None where it is as wanted.

    Elements may differ by `atol + rtol * |wanted|`; where both are 0, in no bit. 8-bit floats are compared as bits.
    """
    if got.shape != wanted.shape:
        return f"{name} has the shape {list(got.shape)}; {list(wanted.shape)} is expected"
    if atol == rtol == 0 or element in ("e4m3", "e5m2"):
        differs = got.reshape(-1, 1).view(np.uint8) != wanted.reshape(-1, 1).view(np.uint8)
        wrong = int(differs.any(axis=1).sum())
        return f"{wrong} of {got.size} elements of {name} differ from the expected bits" if wrong else None
    a, b = (np.asarray(bf16_to_f32(each) if element == "bf16" else each, np.float64) for each in (got, wanted))
    with np.errstate(invalid="ignore"):
        close = (np.abs(a - b) <= atol + rtol * np.abs(b)) | (a == b) | (np.isnan(a) & np.isnan(b))
        worst = np.nanmax(np.abs(a - b))
    if close.all():
        return None
    count = int((~close).sum())
    return f"{count} of {got.size} elements of {name} are out of tolerance; the largest error is {worst:.3g}"
