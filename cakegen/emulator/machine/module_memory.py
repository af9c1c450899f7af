"""Variables of a module as allocations, which keep what they hold from one launch of a stream to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.machine.memory import Buffer, GlobalMemory
from cakegen.emulator.text.ptx import Kernel, ModuleVariable

# Above all arrays that a launch is given, each variable far from the next.
_FIRST = 1 << 59
_APART = 1 << 40
_ALIGN = 1024


@dataclass(eq=False)
class VariableBuffer(Buffer):
    """The allocation of a variable, and the bytes that are behind it."""

    variable: ModuleVariable = field(kw_only=True)
    storage: NDArray[np.uint8] = field(kw_only=True)


def place_variables(kernel: Kernel, memory: GlobalMemory) -> dict[str, int]:
    """The address of each variable that a kernel names; those that no earlier launch has placed are placed now."""
    return {each.name: _buffer_of(each, memory).base for each in kernel.variables}


def _buffer_of(variable: ModuleVariable, memory: GlobalMemory) -> Buffer:
    placed = [buffer for buffer in memory.buffers if isinstance(buffer, VariableBuffer)]
    for buffer in placed:
        if buffer.variable == variable:
            return buffer
    size = len(variable.content)
    raw = np.zeros(size + _ALIGN, np.uint8)
    start = -raw.ctypes.data % _ALIGN
    storage = raw[start : start + size]
    storage[:] = np.frombuffer(variable.content, np.uint8)
    made = VariableBuffer(
        variable.name,
        _FIRST + _APART * len(placed),
        size,
        read_only=variable.constant,
        host=storage.ctypes.data,
        variable=variable,
        storage=storage,
    )
    memory.buffers.append(made)
    return made
