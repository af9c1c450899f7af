"""`cp.async`, the copies that are not bulk: 4, 8 or 16 bytes a lane, in groups of the thread that issues them.

PTX ISA 9.7.9.25.3 (`cp.async` and its groups) and 9.7.13.15.17 (`cp.async.mbarrier.arrive`).

From issue to landing a destination is undefined. What has landed is still nobody's until a wait of the issuing thread
covers its group: from there on it is as if that thread had stored it then, by the generic proxy. Or an mbarrier tracks
it: then whoever waits for the phase sees it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault, Where
from cakegen.emulator.machine.operands import locate, park, read_address, read_lanes, refused
from cakegen.emulator.machine.ports import HasMemory, Issues, Wakes
from cakegen.emulator.machine.warp import Strand
from cakegen.emulator.text.ptx import Immediate, Instruction, Operand, Register
from cakegen.emulator.units.copy_groups import CopyArrival, LaneCopy, SourcePart
from cakegen.emulator.units.tma.copies import require_initialised

Array = NDArray[Any]

_HINTS = {"L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"}
_SIZES = {"ca": (4, 8, 16), "cg": (16,)}


class AsyncCopyHost(Issues, Wakes, HasMemory, Protocol):
    """What `cp.async` asks of its launch."""


def run_copy_async(
    machine: AsyncCopyHost, strand: Strand, instruction: Instruction, active: Array, where: Where
) -> None:
    """`cp.async`, its `commit_group`, `wait_group` and `wait_all`, and `cp.async.mbarrier.arrive`."""
    what = instruction.parts[2]
    if what == "commit_group":
        strand.warp.copies.commit(active)
    elif what in ("wait_group", "wait_all"):
        _wait(strand, instruction, active, all_of_them=what == "wait_all")
    elif what == "mbarrier":
        _track(machine, strand, instruction, active, where)
    elif what in _SIZES:
        _copy(machine, strand, instruction, active, where)
    else:
        raise refused(instruction)


def _wait(strand: Strand, instruction: Instruction, active: Array, *, all_of_them: bool) -> None:
    queue = strand.warp.copies
    if all_of_them:
        # a second commit when it is tried again is an empty group
        queue.commit(active)
        most = 0
    else:
        (operand,) = instruction.operands
        if not isinstance(operand, Immediate):
            raise refused(instruction)
        most = operand.value
    late = queue.wait(most, active, strand.warp.thread)
    if late is not None:
        strand.pc -= 1
        park(strand, queue.waiters, late.what)


def _copy(machine: AsyncCopyHost, strand: Strand, instruction: Instruction, active: Array, where: Where) -> None:
    size, given = _sizes(strand, instruction)
    target = read_address(strand, instruction.operands[0], "u4")[active]
    source = read_address(strand, instruction.operands[1], "u8")[active]
    given = given[active]
    if (given > size).any():
        raise Fault("out-of-bounds", f"cp.async of {size} bytes with a source of {int(given.max())}")
    warp = strand.warp
    for address in target.tolist():
        locate(strand, address, False)
    starts = warp.cta.shared.offsets(target, size, "cp.async")
    sources = _source(machine, source, given, size)
    copy = LaneCopy(machine, warp.copies, active.copy(), starts, size, sources, where)
    copy.begin(warp.at(strand.pc - 1, active))
    machine.issue(copy)


def _sizes(strand: Strand, instruction: Instruction) -> tuple[int, Array]:
    """(bytes that are written, bytes that each lane reads of its source)."""
    kind, *rest = instruction.parts[2:]
    spaces = [part for part in rest if part not in _HINTS]
    if len(spaces) != 2 or spaces[0] not in ("shared", "shared::cta") or spaces[1] != "global":
        raise refused(instruction)
    size, *optional = instruction.operands[2:]
    if "L2::cache_hint" in rest:
        optional.pop()
    if not isinstance(size, Immediate) or size.value not in _SIZES[kind] or len(optional) > 1:
        raise refused(instruction)
    given = np.full(32, size.value, np.uint32)
    if optional:
        given = _given(strand, optional[0], given)
    return size.value, given


def _given(strand: Strand, operand: Operand, whole: Array) -> Array:
    """`src-size`, or nothing where `ignore-src` is true: the rest arrives as zeros."""
    if isinstance(operand, Register) and operand.bank == "pred":
        ignored = read_lanes(strand, operand, "?")
        return np.where(ignored, np.uint32(0), whole)
    return read_lanes(strand, operand, "u4")


def _source(machine: AsyncCopyHost, addresses: Array, given: Array, size: int) -> list[SourcePart]:
    """What is read; a source shorter than the copy in elements that end with it."""
    if addresses.size and (addresses % np.uint64(size)).any():
        raise Fault("out-of-bounds", f"cp.async of {size} bytes from {int(addresses[0]):#x}: not aligned")
    widths = np.gcd(given, np.uint32(size))
    parts = []
    for width in sorted(set(widths[given > 0].tolist())):
        lanes = np.flatnonzero((widths == width) & (given > 0))
        cells = np.array([lane * size + step for lane in lanes for step in range(0, int(given[lane]), width)])
        at = addresses[cells // size] + (cells % size).astype(np.uint64)
        buffer, offsets = machine.memory.find(at, width, "cp.async")
        parts.append(SourcePart(buffer, at, offsets, width, cells // width))
    return parts


def _track(machine: AsyncCopyHost, strand: Strand, instruction: Instruction, active: Array, where: Where) -> None:
    """`cp.async.mbarrier.arrive`: an arrival of each thread, once all of its copies up to here have landed.

    Without `.noinc` the barrier expects it as one more; with it, the count that it was initialised with holds it.
    """
    parts = instruction.parts
    spaces = set(parts[4:]) - {"noinc"}
    if parts[3:4] != ("arrive",) or parts[-1] != "b64" or not spaces <= {"shared", "shared::cta", "b64"}:
        raise refused(instruction)
    warp = strand.warp
    thread = warp.at(strand.pc - 1, active)
    addresses = read_address(strand, instruction.operands[0], "u4")
    for address in sorted(set(addresses[active].tolist())):
        lanes = active & (addresses == np.uint32(address))
        cta, offset = locate(strand, address, False)
        barrier = cta.barrier_at(offset)
        require_initialised(thread, barrier)
        count = int(np.count_nonzero(lanes))
        if "noinc" not in parts:
            barrier.expect_arrivals(count)
        if thread is not None:
            thread.at(strand.pc - 1, lanes)
        machine.issue(CopyArrival(warp.copies, offset, count, *warp.copies.track(lanes, thread), where=where))
