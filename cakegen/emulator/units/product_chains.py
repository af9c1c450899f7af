"""Products that follow each other on one accumulator, in machine code where that pays."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.units.tensor_core import multiply_add_hopper, multiply_add_wide

Array = NDArray[Any]
MultiplyAdd = Callable[[Array, Array, Array], Array]

# The first product to do, and the one behind the last; returns the product that it can't do (`product_kernels`).
Kernel = Callable[[Array, Array, Array, Array, int, int, Array], int]
# What numpy does for one product beside multiplying, counted in multiplications.
_OVERHEAD = 1 << 14
# Arithmetic -> its kernel, and the multiplications after which a process compiles it: about as many as numpy does
# in the tenth of a second that compiling takes.
_KERNELS = {multiply_add_hopper: ("hopper", 1 << 24), multiply_add_wide: ("wide", 1 << 26)}
_multiplied: dict[MultiplyAdd, int] = dict.fromkeys(_KERNELS, 0)


class Stack(Protocol):
    """Where operands lie: `[products, m, k]` and `[products, n, k]` indices of bf16 elements."""

    @property
    def a(self) -> Array:
        """Of the rows of sums."""

    @property
    def b(self) -> Array:
        """Of their columns."""


@functools.cache
def has_compiler() -> bool:
    """Whether llvmlite is installed."""
    return importlib.util.find_spec("llvmlite") is not None


def kernel_of(multiply_add: MultiplyAdd) -> Kernel | None:
    """The machine code of an arithmetic; None: there is none."""
    if multiply_add not in _KERNELS or not has_compiler():
        return None
    kernels = importlib.import_module("cakegen.emulator.units.product_kernels")
    found: Kernel = kernels.compiled(_KERNELS[multiply_add][0])
    return found


def _paying_kernel(multiply_add: MultiplyAdd, multiplications: int) -> Kernel | None:
    """As `kernel_of`, once so much has been asked of an arithmetic in this process that compiling pays."""
    if multiply_add not in _KERNELS:
        return None
    _multiplied[multiply_add] += multiplications
    return kernel_of(multiply_add) if _multiplied[multiply_add] >= _KERNELS[multiply_add][1] else None


def add_nothing(a: Array, b: Array, sums: Array) -> Array:
    """The arithmetic of who asks when products happen, and not what they are."""
    return sums


def add_products(
    multiply_add: MultiplyAdd, elements: Array, stack: Stack, fresh: Array, span: tuple[int, int], sums: Array
) -> Array:
    """Add products to sums, one after the other, as `multiply_add` does.

    Parameters
    ----------
    elements
        bf16 bits in u16.
    fresh
        Which products start from zero.
    span
        The first of the products to add, and the one behind the last.
    sums
        fp32 `[m, n]`; may be written.
    """
    if multiply_add is add_nothing:
        return sums
    first, last = span
    depth = stack.a.shape[2]
    kernel = _paying_kernel(multiply_add, (last - first) * (sums.size * depth + _OVERHEAD))
    while first < last:
        if kernel is not None:
            first = kernel(elements, stack.a, stack.b, fresh, first, last, sums)
            if first == last:
                break
        before = np.zeros_like(sums) if fresh[first] else sums
        sums = multiply_add(elements[stack.a[first]], elements[stack.b[first]], before)
        first += 1
    return sums
