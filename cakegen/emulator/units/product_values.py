"""What elements of a product's factors stand for, by their type."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.text.small_floats import FORMATS, decode

Array = NDArray[Any]

# A tensor core reads a tf32 factor from the upper 19 bits of a word.
_TF32_BITS = np.uint32(0xFFFFE000)


def values_of(elements: Array, kind: str) -> Array:
    """Unsigned elements of a type -> fp32 of a floating-point type, integers in i4 of another; shapes stay."""
    if kind == "tf32":
        return (elements & _TF32_BITS).view(np.float32)
    if kind == "f16":
        return elements.view(np.float16).astype(np.float32)
    if kind in FORMATS:
        return np.asarray(decode(elements, FORMATS[kind]))
    values = elements.astype(np.int32)
    bits = int(kind[1:])
    if kind[0] == "s":
        values = values - (values >> bits - 1 << bits)
    return values
