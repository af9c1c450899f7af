"""What `cp.reduce.async.bulk` does to the elements that it meets.

PTX ISA 9.7.9.25.4 and 9.7.9.27.1 (`cp.reduce.async.bulk`, and the same of tensors).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.text.arithmetic import add_bf16, flush_f32

Array = NDArray[Any]
Reduction = Callable[[Array, Array], Array]

# Which numpy type holds an element; `b32` and `b64` are bits.
_TYPES = {"u32": "u4", "s32": "i4", "u64": "u8", "s64": "i8", "b32": "u4", "b64": "u8"}
_TYPES |= {"f16": "f2", "bf16": "u2", "f32": "f4", "f64": "f8"}


def _add_f32(old: Array, value: Array) -> Array:
    """Subnormal inputs and results are flushed to zeros with their sign."""
    sums: Array = flush_f32(flush_f32(old) + flush_f32(value))
    return sums


def _inc(old: Array, value: Array) -> Array:
    return np.where(old >= value, 0, old + 1).astype(old.dtype)


def _dec(old: Array, value: Array) -> Array:
    return np.where((old == 0) | (old > value), value, old - 1).astype(old.dtype)


_OPERATIONS: dict[tuple[str, str], Reduction] = {
    **{("add", kind): np.add for kind in ("u32", "s32", "u64", "f16", "f64")},
    ("add", "f32"): _add_f32,
    ("add", "bf16"): add_bf16,
    **{("min", kind): np.minimum for kind in ("u32", "s32", "u64", "s64")},
    **{("max", kind): np.maximum for kind in ("u32", "s32", "u64", "s64")},
    ("inc", "u32"): _inc,
    ("dec", "u32"): _dec,
    **{("and", kind): np.bitwise_and for kind in ("b32", "b64")},
    **{("or", kind): np.bitwise_or for kind in ("b32", "b64")},
    **{("xor", kind): np.bitwise_xor for kind in ("b32", "b64")},
}
OPERATIONS = frozenset(operation for operation, _ in _OPERATIONS)


def find_reduction(operation: str, kind: str) -> Reduction | None:
    """Bytes `[n, width]` in memory, bytes that come -> bytes `[n, width]`; None: no such form is modelled.

    Parameters
    ----------
    kind
        The element's type: `u32`, `bf16`, …; elements fill each row.
    """
    if (operation, kind) not in _OPERATIONS:
        return None
    combine, dtype = _OPERATIONS[operation, kind], _TYPES[kind]

    def reduce(old: Array, value: Array) -> Array:
        result = combine(np.ascontiguousarray(old).view(dtype), np.ascontiguousarray(value).view(dtype))
        return np.ascontiguousarray(result, dtype).view(np.uint8)

    return reduce
