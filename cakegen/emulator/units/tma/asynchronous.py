"""mbarriers, and what completes on them: tensor and bulk copies, `st.async`.

A parked wait tries again from its instruction once the barrier's phase has changed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault, Where
from cakegen.emulator.machine.lane_ops import within_window
from cakegen.emulator.machine.memory import OFFSET_MASK, RANK_SHIFT
from cakegen.emulator.machine.operands import (
    HasTensorMaps,
    locate,
    park,
    read_address,
    read_lanes,
    refused,
    tensor_box,
    write_lanes,
)
from cakegen.emulator.machine.ports import HasAdversary, HasMemory, Issues
from cakegen.emulator.machine.warp import Cta, RemoteArrival, Strand
from cakegen.emulator.order.vector_clock import CTA, SCOPES
from cakegen.emulator.text.ptx import Instruction, Operand, Sink, Vector
from cakegen.emulator.units.barriers import MAX_COUNT, PHASE_SHIFT, MBarrier
from cakegen.emulator.units.tma.copies import (
    bulk_landing,
    require_initialised,
    shared_landing,
    store_landing,
    tensor_landing,
)

Array = NDArray[Any]

_BULK_FORMS = {
    ("shared::cluster", "global", "mbarrier::complete_tx::bytes"),
    ("shared::cta", "global", "mbarrier::complete_tx::bytes"),
    ("shared::cluster", "shared::cta", "mbarrier::complete_tx::bytes"),
}
_ONES = np.ones(32, np.uint32)
_SPACES = {"shared", "shared::cta", "b64"}
_SCOPED = _SPACES | {"shared::cluster", "relaxed", "cta", "cluster"}
_ARRIVING = ("arrive", "arrive_drop")
# What may stand behind an operation (PTX ISA 9.7.13.15).
_MBARRIER_FORMS = {
    "init": _SPACES,
    "inval": _SPACES,
    **dict.fromkeys(_ARRIVING, _SCOPED | {"release", "expect_tx", "noComplete"}),
    "pending_count": {"b64"},
    "expect_tx": _SCOPED,
    "complete_tx": _SCOPED,
    "try_wait": _SCOPED - {"shared::cluster"} | {"acquire", "parity"},
    "test_wait": _SCOPED - {"shared::cluster"} | {"acquire", "parity"},
}


class CopyHost(Issues, HasMemory, HasAdversary, HasTensorMaps, Protocol):
    """What copies and mbarriers ask of their launch."""


@dataclass(frozen=True)
class _Form:
    """What an opcode on mbarriers says."""

    what: str
    remote: bool
    generic: bool
    expects: bool
    completes: bool
    relaxed: bool
    parity: bool
    scope: int


@functools.lru_cache(maxsize=256)
def _form_of(parts: tuple[str, ...]) -> _Form | None:
    """The form of an opcode, by default at the scope of the CTA (PTX ISA 9.7.13.15); None: it is not modelled."""
    what, *rest = parts[1:]
    if parts[-1] != "b64" or not set(rest) <= _MBARRIER_FORMS.get(what, set()):
        return None
    scope = next((SCOPES[part] for part in rest if part in SCOPES), CTA)
    return _Form(
        what,
        "shared::cluster" in rest,
        not any(part.startswith("shared") for part in rest),
        "expect_tx" in rest,
        "noComplete" not in rest,
        "relaxed" in rest,
        "parity" in rest,
        scope,
    )


def run_mbarrier(machine: CopyHost, strand: Strand, instruction: Instruction, active: Array, where: Where) -> None:
    """`mbarrier.*`, lane by lane."""
    form = _form_of(instruction.parts)
    if form is None:
        raise refused(instruction)
    what, remote, scope = form.what, form.remote, form.scope
    if what in ("try_wait", "test_wait"):
        _wait(machine, strand, instruction, active, form)
        return
    if what == "pending_count":
        target, state = instruction.operands
        pending = read_lanes(strand, state, "u8") & np.uint64(MAX_COUNT)
        write_lanes(strand, target, active, pending.astype(np.uint32))
        return
    has_result = what in _ARRIVING
    address = _addresses(strand, instruction.operands[1 if has_result else 0], form)
    rest = instruction.operands[2 if has_result else 1 :]
    count = read_lanes(strand, rest[0], "u4") if rest else _ONES
    states = np.zeros(32, np.uint64)
    if has_result and remote and not isinstance(instruction.operands[0], Sink):
        raise refused(instruction)
    thread = strand.warp.at(strand.pc - 1, active)
    released = None
    if has_result and thread is not None and not form.relaxed:
        released = thread.released(scope) if remote else thread.releasing(scope)
    for lane in np.flatnonzero(active):
        cta, offset = locate(strand, int(address[lane]), remote)
        if what == "init":
            cta.init_barrier(offset, int(count[lane]), thread)
            continue
        require_initialised(thread, cta.barrier_at(offset))
        if what == "inval":
            del cta.shared.barriers[offset]
        elif what == "expect_tx":
            cta.expect_bytes(offset, int(count[lane]))
        elif what == "complete_tx":
            cta.complete_bytes(offset, int(count[lane]))
        else:
            states[lane] = cta.barrier_at(offset).state
            tx_bytes, arrivals = (int(count[lane]), 1) if form.expects else (0, int(count[lane]))
            arrival = RemoteArrival(
                strand.warp, cta, offset, arrivals, tx_bytes, where, released, what == "arrive_drop", form.completes
            )
            if cta is strand.warp.cta:
                strand.warp.release()
                arrival.arrive()
            else:
                strand.warp.remote_arrivals.append(arrival)
                machine.issue(arrival)
    if has_result:
        write_lanes(strand, instruction.operands[0], active, states)
    if thread is not None:
        thread.tick()


def _addresses(strand: Strand, operand: Operand, form: _Form) -> Array:
    """Shared addresses of barriers; without a state space they are generic."""
    if not form.generic:
        return read_address(strand, operand, "u4")
    return within_window(read_address(strand, operand, "u8"))


def _wait(machine: CopyHost, strand: Strand, instruction: Instruction, active: Array, form: _Form) -> None:
    """`try_wait.parity`: parks where it would fail, until the barrier's phase changes; may fail first."""
    target, where, phase_operand = instruction.operands[:3]
    addresses = _addresses(strand, where, form)
    if form.parity:
        parities = read_lanes(strand, phase_operand, "u4")
    else:
        parities = _parities_of(strand, addresses, read_lanes(strand, phase_operand, "u8"), active)
    done = np.zeros(32, np.bool_)
    thread = strand.warp.at(strand.pc - 1, active)
    blocking = None
    completed: list[MBarrier] = []
    waits = set(zip(addresses[active].tolist(), parities[active].tolist(), strict=True))
    for address, parity in waits:
        cta, offset = locate(strand, address, False)
        barrier = cta.barrier_at(offset)
        if parity > 1:
            raise Fault("barrier", f"{barrier}: waited for with parity {parity}")
        require_initialised(thread, barrier)
        if not barrier.has_completed(parity):
            blocking = barrier
            continue
        completed.append(barrier)
        if len(waits) == 1:
            done = active
        else:
            done |= (addresses == np.uint32(address)) & (parities == np.uint32(parity))
    if machine.adversary.fails_spuriously():
        done = np.zeros(32, np.bool_)
    elif blocking is not None and form.what == "try_wait" and not np.count_nonzero(done & active):
        strand.pc -= 1
        park(strand, blocking.waiters, _Wait(blocking, parities, active))
        return
    if thread is not None and np.count_nonzero(done):
        # a relaxed wait orders nothing, unless a fence follows (PTX ISA 9.7.13.15.16, 8.8)
        take = thread.observe if form.relaxed else thread.acquire
        for barrier in completed:
            if barrier.order is not None:
                take(barrier.order.passed, form.scope)
    write_lanes(strand, target, active, done)


def _parities_of(strand: Strand, addresses: Array, states: Array, active: Array) -> Array:
    """The parities of phases that states name: of the current phase, or the one before (PTX ISA 9.7.13.15.16)."""
    phases = (states >> np.uint64(PHASE_SHIFT)).astype(np.int64)
    for lane in np.flatnonzero(active):
        cta, offset = locate(strand, int(addresses[lane]), False)
        barrier = cta.barrier_at(offset)
        if int(phases[lane]) not in (barrier.phase, barrier.phase - 1):
            raise Fault("barrier", f"{barrier}: waited for with the state of phase {int(phases[lane])}")
    return (phases & 1).astype(np.uint32)


class _Wait:
    """A parked wait, for the report."""

    def __init__(self, barrier: Any, parities: Array, active: Array) -> None:
        self._barrier = barrier
        self._parity = int(parities[active][0])

    def __str__(self) -> str:
        return f"parity {self._parity} of {self._barrier}"


def _destinations(
    strand: Strand, address: int, barrier: int, mask: int | None, paired: bool, remote: bool
) -> Iterator[tuple[Cta, int, Cta, int]]:
    """(CTA, offset, CTA of the barrier, its offset) of every destination.

    With `.cta_group::2` the barrier may lie in the other CTA of a destination's pair: in the one whose rank has the
    parity of the CTA that the barrier's address names (PTX ISA 9.7.9.27).
    """
    cta, start = locate(strand, address, remote)
    barrier_cta, barrier_offset = locate(strand, barrier, remote)
    parity = barrier_cta.shared.rank & 1
    if mask is None:
        if barrier_cta is not cta and not (paired and barrier_cta.shared.rank == cta.shared.rank ^ 1):
            raise Fault("barrier", "a copy's barrier and its destination lie in different CTAs")
        yield cta, start, barrier_cta, barrier_offset
        return
    ranks = [rank for rank in range(16) if mask >> rank & 1]
    for rank in ranks:
        peer = strand.warp.cta.peer(rank)
        yield peer, start, peer.peer(rank & ~1 | parity) if paired else peer, barrier_offset


def run_copy(machine: CopyHost, strand: Strand, instruction: Instruction, active: Array, where: Where) -> None:
    """`cp.async.bulk` and `cp.async.bulk.tensor` to shared memory; `cp.async.bulk.prefetch.L2`."""
    if instruction.parts[1:] == ("async", "bulk", "prefetch", "L2", "global"):
        check_prefetch(strand, instruction, active)
        return
    if instruction.parts[1:5] == ("async", "bulk", "prefetch", "tensor"):
        # no effect, but the map and its coordinates must be there
        for lane in np.flatnonzero(active):
            tensor_box(machine, strand, instruction.operands[0], int(lane))
        return
    groups = {"cta_group::1", "cta_group::2"} & set(instruction.parts)
    parts = [part for part in instruction.parts[3:] if part not in ("tile", "L2::cache_hint", *groups)]
    multicast = "multicast::cluster" in parts
    tensor = parts[:1] == ["tensor"]
    shape = tuple(part for part in parts[2 if tensor else 0 :] if part != "multicast::cluster")
    remote = "shared::cluster" in parts
    if instruction.parts[1:3] != ("async", "bulk") or shape not in _BULK_FORMS or (multicast and not remote):
        raise refused(instruction)
    operands = instruction.operands
    destination = read_address(strand, operands[0], "u4")
    barrier = read_address(strand, operands[2 if tensor else 3], "u4")
    masks = read_lanes(strand, operands[3 if tensor else 4], "u2") if multicast else None
    for lane in np.flatnonzero(active):
        mask = None if masks is None else int(masks[lane])
        where_to = int(destination[lane]), int(barrier[lane])
        paired = "cta_group::2" in groups
        for cta, start, signals, barrier_offset in _destinations(strand, *where_to, mask, paired, remote):
            if tensor:
                view, corner = tensor_box(machine, strand, operands[1], int(lane))
                landing = tensor_landing(view, corner, cta, start, barrier_offset, where)
            elif shape[1] == "shared::cta":
                inside = locate(strand, int(read_address(strand, operands[1], "u4")[lane]), False)[1]
                size = int(read_lanes(strand, operands[2], "u4")[lane])
                landing = shared_landing(strand.warp.cta, inside, size, cta, start, barrier_offset, where)
            else:
                source = int(read_address(strand, operands[1], "u8")[lane])
                size = int(read_lanes(strand, operands[2], "u4")[lane])
                landing = bulk_landing(machine.memory, source, size, cta, start, barrier_offset, where)
            landing.signals = signals
            landing.begin(strand.warp.at(strand.pc - 1, active))
            machine.issue(landing)


def check_prefetch(strand: Strand, instruction: Instruction, active: Array) -> None:
    """What PTX ISA 9.7.9.25.5.3 asks of a bulk prefetch, which has no effect here: 16-byte alignment of both."""
    address = read_address(strand, instruction.operands[0], "u8")[active]
    size = read_lanes(strand, instruction.operands[1], "u4")[active]
    odd = np.flatnonzero((address % np.uint64(16) != 0) | (size % np.uint32(16) != 0))
    if odd.size:
        where = f"{int(size[odd[0]])} bytes at {int(address[odd[0]]):#x}"
        raise Fault("out-of-bounds", f"a prefetch of {where}: both must be multiples of 16")


def run_store_async(machine: CopyHost, strand: Strand, instruction: Instruction, active: Array, where: Where) -> None:
    """`st.async`: a word, or a vector of words, of each lane."""
    *modifiers, kind = instruction.parts[2:]
    rest = set(modifiers) - {"weak", "v2", "v4"}
    source = instruction.operands[1]
    items = source.items if isinstance(source, Vector) else (source,)
    width = int(kind[1:]) // 8 if kind[0] in "busf" and kind[1:] in ("32", "64") else 0
    size = width * len(items)
    if rest != {"shared::cluster", "mbarrier::complete_tx::bytes"} or size not in (4, 8, 16):
        raise refused(instruction)
    if len(strand.warp.cta.cluster.ctas) == 1:
        raise Fault("out-of-bounds", "st.async in a cluster of one CTA")
    address = read_address(strand, instruction.operands[0], "u4")[active]
    barrier = read_address(strand, instruction.operands[2], "u4")[active]
    rows = np.stack([read_lanes(strand, item, f"u{width}")[active] for item in items], 1).view(np.uint8)
    if (address % np.uint32(size)).any():
        raise Fault("out-of-bounds", f"st.async of {size} bytes to {int(address[0]):#x}: not aligned")
    targets = np.stack([address >> np.uint32(RANK_SHIFT), barrier], 1)
    for rank, barrier_address in {(int(row[0]), int(row[1])) for row in targets}:
        here = (targets == (rank, barrier_address)).all(axis=1)
        cta, barrier_offset = locate(strand, barrier_address, True)
        if cta.shared.rank != rank:
            raise Fault("barrier", "an st.async's barrier and its destination lie in different CTAs")
        starts = (address[here] & np.uint32(OFFSET_MASK)).astype(np.int64)
        landing = store_landing(cta, starts, rows[here], barrier_offset, where)
        landing.begin(strand.warp.at(strand.pc - 1, active))
        machine.issue(landing)
