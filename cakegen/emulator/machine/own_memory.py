"""What is a thread's own: its local memory, and the kernel's parameters as memory.

Local memory starts as poison, and a read of what nothing wrote is no fault: compilers copy the gaps of structs along.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.lane_ops import Mask, load_generic, store_generic
from cakegen.emulator.machine.memory import PARAM_WINDOW
from cakegen.emulator.machine.warp import Warp

Lanes = NDArray[Any]

# The window of local memory in the generic address space, behind that of parameters.
LOCAL_WINDOW = 3 << 60
_WINDOW_SHIFT = np.uint64(60)
_TEXT_BYTES = 512


def environment() -> dict[str, Any]:
    """Names that blocks use."""
    names = "load_local store_local load_param load_anywhere store_anywhere assert_failed"
    return {name: globals()[name] for name in names.split()}


def _active(mask: Mask) -> Lanes:
    return np.arange(32) if mask is None else np.flatnonzero(mask)


def _places(w: Warp, addresses: Lanes, width: int, active: Lanes, what: str) -> tuple[Lanes, Lanes]:
    """(lane, byte) of every byte of an access; checked."""
    offsets = addresses[active].astype(np.int64)
    size = w.local.shape[1]
    low, high = int(offsets.min()), int(offsets.max())
    if high + width > size or low < 0:
        bad = low if low < 0 else high
        raise Fault("out-of-bounds", f"{what} of {width} bytes at local offset {bad}; a thread has {size} bytes")
    if np.count_nonzero(offsets & (width - 1)):
        raise Fault("out-of-bounds", f"{what} of {width} bytes at local offset {low}: not aligned")
    return active[:, None], offsets[:, None] + np.arange(width)


def load_local(w: Warp, addresses: Lanes, kind: str, length: int, mask: Mask, index: int, strong: int = -1) -> Lanes:
    """`ld.local`: `[length, 32]`."""
    width, active = int(kind[1]) * length, _active(mask)
    rows = np.zeros((32, width), np.uint8)
    if active.size:
        rows[active] = w.local[_places(w, addresses, width, active, "read")]
    return np.ascontiguousarray(rows.view(kind).T)


def store_local(w: Warp, addresses: Lanes, values: list[Lanes], mask: Mask, index: int, strong: int = -1) -> None:
    """`st.local`."""
    active = _active(mask)
    if active.size:
        rows = np.ascontiguousarray(np.stack(values, 1)).view(np.uint8)
        w.local[_places(w, addresses, rows.shape[1], active, "write")] = rows[active]


def load_param(w: Warp, addresses: Lanes, kind: str, length: int, mask: Mask, index: int, strong: int = -1) -> Lanes:
    """`ld.param` through a register: `[length, 32]`."""
    items = np.zeros((length, 32), kind)
    for lane in _active(mask):
        for number in range(length):
            items[number, lane] = w.parameter(int(addresses[lane]) + number * int(kind[1]), kind)[0]
    return items


def _window(addresses: Lanes, mask: Mask) -> int:
    """Where the window starts that generic addresses lie in; 0: global memory."""
    windows = addresses[_active(mask)] >> _WINDOW_SHIFT
    first = int(windows[0]) if windows.size else 0
    if (windows != first).any():
        raise Fault("out-of-bounds", "lanes of one generic access are in different state spaces (not modelled)")
    return first << int(_WINDOW_SHIFT)


def load_anywhere(w: Warp, addresses: Lanes, kind: str, length: int, mask: Mask, index: int, strong: int = -1) -> Lanes:
    """`ld` without a state space, of a kernel whose generic addresses may be of parameters or of local memory."""
    window = _window(addresses, mask)
    if window not in (LOCAL_WINDOW, PARAM_WINDOW):
        return load_generic(w, addresses, kind, length, mask, index, strong)
    load = load_local if window == LOCAL_WINDOW else load_param
    return load(w, addresses - np.uint64(window), kind, length, mask, index)


def store_anywhere(w: Warp, addresses: Lanes, values: list[Lanes], mask: Mask, index: int, strong: int = -1) -> None:
    """`st` without a state space, likewise."""
    window = _window(addresses, mask)
    if window == PARAM_WINDOW:
        raise Fault("out-of-bounds", "a store to the kernel's parameters")
    if window == LOCAL_WINDOW:
        store_local(w, addresses - np.uint64(window), values, mask, index)
    else:
        store_generic(w, addresses, values, mask, index, strong)


def assert_failed(w: Warp, offsets: tuple[int, ...], mask: Mask) -> None:
    """`__assertfail(message, file, line, function, size)`, by the offsets of its arguments in local memory.

    Raises
    ------
    Fault
        A lane calls it.
    """
    active = _active(mask)
    if not active.size:
        return
    own = w.local[active[0]]
    message, file, function = (
        _text_at(w, int(own[at : at + 8].view(np.uint64)[0])) for at in (offsets[0], offsets[1], offsets[3])
    )
    line = int(own[offsets[2] : offsets[2] + 4].view(np.uint32)[0])
    raise Fault("assert", f"assertion `{message}` failed at {file}:{line} in {function}")


def _text_at(w: Warp, address: int) -> str:
    """A text in global memory, which ends with a 0."""
    for buffer in w.memory.buffers:
        if buffer.holds(address):
            start = address - buffer.base
            raw = buffer.data[start : start + _TEXT_BYTES].tobytes()
            return raw.split(b"\0")[0].decode("utf-8", "replace")
    return f"the text at {address:#x}"
