"""TMA stores and reductions, shared memory to global, and the bulk groups of the thread that issues them.

PTX ISA 9.7.9.25 (bulk copies and their groups), 9.7.9.27 (tensors).

From its issue until a wait of its own thread covers it, a store's source is held: a write to it is a fault. So the
source is read at issue; no legal moment would give other bytes. The write to global memory happens when the adversary
says, at the latest when a `wait_group` without `.read` asks for it, or when the launch ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault, Where
from cakegen.emulator.machine.memory import GRANULE, SHARED_START, SharedMemory
from cakegen.emulator.machine.operands import HasTensorMaps, locate, park, read_address, read_lanes, refused, tensor_box
from cakegen.emulator.machine.ports import Issues
from cakegen.emulator.machine.warp import Strand, Warp
from cakegen.emulator.order.warp_order import WarpOrder
from cakegen.emulator.text.ptx import Immediate, Instruction
from cakegen.emulator.units.tma.bulk_groups import BulkQueue, BulkStore, StoreTarget, Target
from cakegen.emulator.units.tma.reductions import OPERATIONS, find_reduction
from cakegen.emulator.units.tma.tensor_view import TensorView
from cakegen.runtime.tensor_map import SWIZZLE_BYTES

Array = NDArray[Any]

_TO_GLOBAL = ("global", "shared::cta", "bulk_group")
_BOX_ALIGN = 128


class StoreHost(StoreTarget, Issues, HasTensorMaps, Protocol):
    """What bulk stores ask of their launch."""


def run_bulk_group(machine: StoreHost, strand: Strand, instruction: Instruction, active: Array, where: Where) -> None:
    """Stores, reductions, `commit_group` and `wait_group`."""
    parts = instruction.parts
    if parts[3:] == ("commit_group",):
        for queue in _queues(strand, active):
            queue.commit()
    elif parts[3:4] == ("wait_group",) and set(parts[4:]) <= {"read"}:
        _wait(strand, instruction, active)
    else:
        _store(machine, strand, instruction, active, where)


def _queues(strand: Strand, active: Array) -> Iterator[BulkQueue]:
    for lane in np.flatnonzero(active):
        yield strand.warp.bulk.setdefault(int(lane), BulkQueue())


def _wait(strand: Strand, instruction: Instruction, active: Array) -> None:
    (most,) = instruction.operands
    if not isinstance(most, Immediate):
        raise refused(instruction)
    thread = strand.warp.thread
    for queue in _queues(strand, active):
        late = queue.wait(most.value, "read" in instruction.parts, thread)
        if late is not None:
            strand.pc -= 1
            park(strand, queue.waiters, late.what)
            return


def _store(machine: StoreHost, strand: Strand, instruction: Instruction, active: Array, where: Where) -> None:
    parts = [part for part in instruction.parts[1:] if part not in ("tile", "L2::cache_hint", "noftz")]
    reduces = parts[0] == "reduce"
    operation = next((part for part in parts if part in OPERATIONS), "") if reduces else ""
    tensor = "tensor" in parts
    kind = "" if tensor or not reduces else parts.pop()
    form = tuple(part for part in parts if part not in ("reduce", operation))
    if form[:2] != ("async", "bulk") or form[4 if tensor else 2 :] != _TO_GLOBAL or (reduces and not operation):
        raise refused(instruction)
    for lane in np.flatnonzero(active):
        queue = strand.warp.bulk.setdefault(int(lane), BulkQueue())
        if tensor:
            view, corner = tensor_box(machine, strand, instruction.operands[0], int(lane))
            target, kind = _box_target(view, corner), view.record.element
            granules, values = _box_source(strand, instruction, int(lane), view, corner)
            what = f"store of box {tuple(corner)} of {view.record.name}"
        else:
            size = int(read_lanes(strand, instruction.operands[2], "u4")[lane])
            address = int(read_address(strand, instruction.operands[0], "u8")[lane])
            start = _shared_start(strand, instruction, int(lane))
            target = _linear_target(machine, address, start, size)
            granules, values = _linear_source(strand.warp.cta.shared, start, size)
            what = f"bulk store of {size} bytes to {target.buffer.name}"
        reduction = find_reduction(operation, kind) if reduces else None
        if reduces and reduction is None:
            raise refused(instruction)
        if target.buffer.read_only:
            raise Fault("output", f"a {what}; it is an input")
        what = f"the {what}" if not reduces else f"the {what} ({operation})"
        store = BulkStore(machine, queue, strand.warp.cta, granules, target, values, reduction, what, where)
        _issue(machine, store, strand.warp.at(strand.pc - 1, active & (np.arange(32) == lane)))


def _issue(machine: Issues, store: BulkStore, thread: WarpOrder | None) -> None:
    store.issuer.shared.begin_read(store.granules, store.what, whole=False)
    if thread is not None:
        store.queue.begin(thread, store)
    store.queue.open.append(store)
    machine.issue(store)


def _shared_start(strand: Strand, instruction: Instruction, lane: int) -> int:
    address = int(read_address(strand, instruction.operands[1], "u4")[lane])
    return locate(strand, address, False)[1]


def _box_target(view: TensorView, corner: list[int]) -> Target:
    if min(corner) < 0:
        raise Fault(
            "out-of-bounds",
            f"a store of box {tuple(corner)} of {view.record.name}: the corner of what is stored can't be negative",
        )
    offsets, width = view.cells(corner)
    if offsets.size:
        view.buffer.check(offsets.astype(np.uint64), width, "a store of a box")
    return Target(view.buffer, offsets, width)


def _box_source(
    strand: Strand, instruction: Instruction, lane: int, view: TensorView, corner: list[int]
) -> tuple[Array, Array]:
    """(granules of the box in shared memory, the bytes of what lies in the tensor as rows of the target)."""
    start = _shared_start(strand, instruction, lane)
    if start % _BOX_ALIGN:
        raise Fault("out-of-bounds", f"a box of {view.record.name} comes from {start:#x}; needs a multiple of 128")
    shared, record = strand.warp.cta.shared, view.record
    granules = _span(shared, start, view.box_bytes)
    bits = max(SWIZZLE_BYTES[record.swizzle] // GRANULE - 1, 0)
    granules = granules ^ (granules >> 3 & bits)
    clip = view.clip(corner)
    width = view.cells(corner)[1]

    def inside(memory: Array) -> Array:
        box = memory.reshape(-1, GRANULE)[granules].reshape(*record.box[::-1], record.element_bytes)
        return np.ascontiguousarray(box[() if clip is None else clip[0]]).reshape(-1, width)

    if clip is None:
        return granules, np.empty((0, width), np.uint8)
    _require_written(inside, shared, f"box {tuple(corner)} of {record.name}")
    return granules, inside(shared.data)


def _require_written(select: Callable[[Array], Array], shared: SharedMemory, what: str) -> None:
    written = select(shared.valid)
    if not written.all():
        missing = int(written.size - np.count_nonzero(written))
        raise Fault("unwritten-read", f"a store of {what} reads {missing} bytes that nothing has written")


def _span(shared: SharedMemory, start: int, size: int) -> Array:
    for at in (start, start + size - 1):
        shared.offsets(np.array([at], np.uint32), 1, "a bulk store's source")
    return np.arange(start // GRANULE, (start + size) // GRANULE)


def _linear_target(machine: StoreHost, address: int, start: int, size: int) -> Target:
    if size == 0 or (size | address | start) % GRANULE:
        raise Fault("out-of-bounds", f"a bulk store of {size} bytes, {start:#x} -> {address:#x}: multiples of 16")
    rows = np.uint64(address) + GRANULE * np.arange(size // GRANULE, dtype=np.uint64)
    buffer, offsets = machine.memory.find(rows, GRANULE, "a bulk store")
    return Target(buffer, offsets.astype(np.int64), GRANULE)


def _linear_source(shared: SharedMemory, start: int, size: int) -> tuple[Array, Array]:
    granules = _span(shared, start, size)
    _require_written(lambda memory: memory.reshape(-1, GRANULE)[granules], shared, f"offset {start - SHARED_START}")
    return granules, shared.data.reshape(-1, GRANULE)[granules]


def check_bulk_exit(warp: Warp, strict: bool) -> None:
    """Refuse a warp's exit while stores may still read its CTA's shared memory.

    Raises
    ------
    Fault
        A store was not waited for. `strict` is False: the device keeps the memory until it has been read, as published
        kernels assume.
    """
    for lane, queue in warp.bulk.items():
        store = queue.holding()
        if store is None:
            continue
        if strict:
            fault = Fault(
                "exit",
                f"CTA {warp.cta.index} warp {warp.index} exits, and lane {lane} has not waited for {store.what}: its "
                "source may still be read. Needs cp.async.bulk.wait_group.read 0 behind a commit_group",
            )
            raise fault.at(store.where) if store.where else fault
        for each in (each for group in (*queue.groups, queue.open) for each in group):
            each.release()
