"""What blocks call: memory accesses and branches of one warp.

A mask is None where all 32 lanes are active; else lanes outside of it touch nothing and get zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.memory import RANK_SHIFT, SHARED_WINDOW
from cakegen.emulator.machine.warp import Cta, Warp
from cakegen.emulator.units.launch_control import first_ctaid, is_canceled

Lanes = NDArray[Any]
Mask = NDArray[np.bool_] | None

ALL = b"\x01" * 32
NONE = b"\x00" * 32


def environment() -> dict[str, Any]:
    """Names that blocks use."""
    names = (
        "branch divergent_branch pack unpack load_shared load_cluster load_global load_constant load_generic "
        "store_shared store_cluster store_global store_generic part_of_warp by_all"
    )
    table = {name: globals()[name] for name in names.split()}
    return table | {"is_canceled": is_canceled, "first_ctaid": first_ctaid}


def branch(condition: Lanes, target: int, otherwise: int) -> int | tuple[Lanes, int, int]:
    """Where a whole warp goes; a split where its lanes disagree."""
    text = condition.tobytes()
    if text == ALL:
        return target
    return otherwise if text == NONE else (condition, target, otherwise)


def divergent_branch(condition: Lanes, mask: Lanes, target: int, otherwise: int) -> int | tuple[Lanes, int, int]:
    """Where the active lanes go; a split where they disagree."""
    taken = condition & mask
    text = taken.tobytes()
    if text == NONE:
        return otherwise
    return target if text == mask.tobytes() else (taken, target, otherwise)


def pack(parts: list[Lanes], kind: str) -> Lanes:
    """`mov.b64 d, {a, b}`: the first part is the lowest."""
    return np.stack(parts, 1).view(kind if kind == "c16" else f"u{kind[1]}").reshape(-1)


def unpack(value: Lanes, part: str) -> Lanes:
    """`mov.b64 {a, b}, s`: rows of parts, the lowest first."""
    return np.ascontiguousarray(value.reshape(-1, 1).view(part).T)


def _items(rows: Lanes, kind: str) -> Lanes:
    """`[lanes, bytes]` -> `[items, lanes]` of a type."""
    return np.ascontiguousarray(rows.view(kind).T)


def _spread(rows: Lanes, active: Lanes, width: int) -> Lanes:
    full = np.zeros((32, width), np.uint8)
    full[active] = rows
    return full


def _bytes(values: list[Lanes]) -> Lanes:
    """Items of every lane -> `[lanes, bytes]`."""
    stacked = values[0].reshape(32, 1) if len(values) == 1 else np.stack(values, 1)
    return np.ascontiguousarray(stacked).view(np.uint8)


def load_shared(w: Warp, addresses: Lanes, kind: str, length: int, mask: Mask, index: int, strong: int = -1) -> Lanes:
    """`ld.shared`: own CTA only; `[length, 32]`."""
    width = int(kind[1]) * length
    thread = w.at(index, mask, strong)
    if mask is None:
        own_window(w, addresses)
        return _items(w.cta.shared.load(addresses, width, thread), kind)
    active = np.flatnonzero(mask)
    if not active.size:
        return np.zeros((length, 32), kind)
    own_window(w, addresses[active])
    return _items(_spread(w.cta.shared.load(addresses[active], width, thread), active, width), kind)


def own_window(w: Warp, addresses: Lanes) -> None:
    """Refuse `shared::cta` addresses of another CTA."""
    if np.count_nonzero(addresses >> np.uint32(RANK_SHIFT) != w.cta.shared.rank):
        raise Fault("out-of-bounds", "a shared::cta access with the address of another CTA of the cluster")


def peer_of(w: Warp, addresses: Lanes) -> Cta:
    """The CTA of the cluster whose shared memory some addresses name."""
    ranks = addresses >> np.uint32(RANK_SHIFT)
    if (ranks != ranks[0]).any():
        raise Fault("out-of-bounds", "lanes of one shared::cluster access name different CTAs (not modelled)")
    rank = int(ranks[0])
    if rank != w.cta.shared.rank and not w.cta.cluster.barrier.generation:
        raise Fault(
            "race",
            f"an access to shared memory of cluster rank {rank}, and no barrier.cluster has shown that it has started",
        )
    return w.cta.peer(rank)


def load_cluster(w: Warp, addresses: Lanes, kind: str, length: int, mask: Mask, index: int, strong: int = -1) -> Lanes:
    """`ld.shared::cluster`."""
    active = np.arange(32) if mask is None else np.flatnonzero(mask)
    if not active.size:
        return np.zeros((length, 32), kind)
    width = int(kind[1]) * length
    rows = peer_of(w, addresses[active]).shared.load(addresses[active], width, w.at(index, mask, strong))
    return _items(_spread(rows, active, width), kind)


def load_global(w: Warp, addresses: Lanes, kind: str, length: int, mask: Mask, index: int, strong: int = -1) -> Lanes:
    """`ld.global`: `[length, 32]`."""
    width = int(kind[1]) * length
    thread = w.at(index, mask, strong)
    if mask is None:
        return _items(w.memory.load(addresses, width, thread), kind)
    active = np.flatnonzero(mask)
    if not active.size:
        return np.zeros((length, 32), kind)
    return _items(_spread(w.memory.load(addresses[active], width, thread), active, width), kind)


def load_constant(w: Warp, addresses: Lanes, kind: str, length: int, mask: Mask, index: int, strong: int = -1) -> Lanes:
    """`ld.global.nc`: of memory that the launch does not write."""
    active = addresses if mask is None else addresses[mask]
    if active.size:
        w.memory.require_constant(active, int(kind[1]) * length, w.at(index, mask))
    return load_global(w, addresses, kind, length, mask, index, strong)


def in_shared_window(addresses: Lanes, mask: Mask) -> bool:
    """Whether generic addresses are of shared memory."""
    active = addresses if mask is None else addresses[mask]
    inside = (active >= np.uint64(SHARED_WINDOW)) & (active < np.uint64(2 * SHARED_WINDOW))
    if inside.any() and not inside.all():
        raise Fault("out-of-bounds", "lanes of one generic access are in different state spaces (not modelled)")
    return bool(inside.any())


def within_window(addresses: Lanes) -> Lanes:
    """Generic addresses of shared memory as those of its window."""
    return (addresses - np.uint64(SHARED_WINDOW)).astype(np.uint32)


def load_generic(w: Warp, addresses: Lanes, kind: str, length: int, mask: Mask, index: int, strong: int = -1) -> Lanes:
    """`ld` without a state space."""
    if in_shared_window(addresses, mask):
        return load_cluster(w, within_window(addresses), kind, length, mask, index, strong)
    return load_global(w, addresses, kind, length, mask, index, strong)


def store_generic(w: Warp, addresses: Lanes, values: list[Lanes], mask: Mask, index: int, strong: int = -1) -> None:
    """`st` without a state space."""
    if in_shared_window(addresses, mask):
        store_cluster(w, within_window(addresses), values, mask, index, strong)
    else:
        store_global(w, addresses, values, mask, index, strong)


def store_shared(w: Warp, addresses: Lanes, values: list[Lanes], mask: Mask, index: int, strong: int = -1) -> None:
    """`st.shared`: own CTA only."""
    rows = _bytes(values)
    if mask is not None:
        addresses, rows = addresses[mask], rows[mask]
        if not addresses.size:
            return
    own_window(w, addresses)
    w.cta.shared.store(addresses, rows, w.at(index, mask, strong))


def store_cluster(w: Warp, addresses: Lanes, values: list[Lanes], mask: Mask, index: int, strong: int = -1) -> None:
    """`st.shared::cluster`."""
    rows = _bytes(values)
    if mask is not None:
        addresses, rows = addresses[mask], rows[mask]
    if addresses.size:
        peer_of(w, addresses).shared.store(addresses, rows, w.at(index, mask, strong))


def store_global(w: Warp, addresses: Lanes, values: list[Lanes], mask: Mask, index: int, strong: int = -1) -> None:
    """`st.global`."""
    rows = _bytes(values)
    if mask is not None:
        addresses, rows = addresses[mask], rows[mask]
        if not addresses.size:
            return
    w.memory.store(addresses, rows, w.cta.index, w.at(index, mask, strong))
    if w.machine.watched:
        # every word of 8 bytes, since somebody may poll any of them
        w.machine.touch((addresses[:, None] + np.arange(0, rows.shape[1], 8, dtype=np.uint64)).ravel())


def part_of_warp(what: str) -> None:
    """An instruction that wants all 32 lanes, reached by fewer."""
    raise Fault("divergence", f"{what} by a part of the warp")


def by_all(mask: Lanes, what: str) -> bool:
    """Whether all lanes execute an instruction that wants the whole warp; none may do so without the others."""
    text = mask.tobytes()
    if text not in (ALL, NONE):
        raise Fault("divergence", f"{what} by a part of the warp: its predicate differs between lanes")
    return text == ALL
