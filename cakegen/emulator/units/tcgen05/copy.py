"""tcgen05.cp: shared memory to tensor memory, in order with later mmas of its thread.

PTX ISA 9.7.16.9. The source lies as a K-major operand does: rows of 16 or 32 bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.operands import read_address, read_lanes, refused
from cakegen.emulator.machine.warp import Strand
from cakegen.emulator.text.ptx import Instruction
from cakegen.emulator.units.tcgen05.descriptors import check_reach
from cakegen.emulator.units.tcgen05.issue import Issued, TensorHost, cta_group_of, pair_of
from cakegen.emulator.units.tcgen05.tensor_memory import Region, split_address

Array = NDArray[Any]

# Shape -> rows of the source, and which block of 32 rows each quadrant gets. 4x256b is left out: the ISA does not say
# in which lanes its rows land.
_SHAPES: dict[tuple[str, ...], tuple[int, tuple[int, ...]]] = {
    ("128x256b",): (128, (0, 1, 2, 3)),
    ("128x128b",): (128, (0, 1, 2, 3)),
    ("64x128b", "warpx2::02_13"): (64, (0, 1, 0, 1)),
    ("64x128b", "warpx2::01_23"): (64, (0, 0, 1, 1)),
    ("32x128b", "warpx4"): (32, (0, 0, 0, 0)),
}


def run_tensor_copy(machine: TensorHost, strand: Strand, instruction: Instruction, active: Array) -> None:
    """Every active thread issues a whole copy; with cta_group::2 each CTA of the pair copies its own."""
    group = cta_group_of(machine, instruction)
    shape = tuple(part for part in instruction.parts[2:] if not part.startswith("cta_group"))
    if shape not in _SHAPES:
        raise refused(instruction)
    targets = read_address(strand, instruction.operands[0], "u4")
    sources = read_lanes(strand, instruction.operands[1], "u8")
    for lane in np.flatnonzero(active):
        _copy(machine, strand, int(lane), instruction, shape, int(targets[lane]), int(sources[lane]), group)


def _copy(
    machine: TensorHost,
    strand: Strand,
    thread_lane: int,
    instruction: Instruction,
    shape: tuple[str, ...],
    target: int,
    source: int,
    cta_group: int,
) -> None:
    rows, blocks = _SHAPES[shape]
    columns = 8 if shape[0].endswith("256b") else 4
    lane, column = split_address(target)
    if lane:
        raise Fault("descriptor", f"tcgen05.cp to lane {lane}; needs lane 0")
    warp = strand.warp
    unit, thread = machine.tensor, (warp.number, thread_lane)
    elements, granules = unit.table.operand(source, False, rows, "tcgen05.cp", 2 * columns)
    region = Region(slice(0, 8), slice(column, column + columns))
    owner = unit.next_owner(instruction, thread)
    issued, queue = Issued(owner, [], []), unit.queue(thread)
    stamp = queue.unit(warp.at(strand.pc - 1, np.arange(32) == thread_lane), warp.cta.index, "tcgen05.cp")
    for cta in pair_of(warp.cta, cta_group):
        memory, shared = cta.tensor_memory, cta.shared
        memory.check_allocated(region, "tcgen05.cp")
        memory.refuse_writers(region, "tcgen05.cp", owner, same_thread=not unit.strict)
        memory.refuse_readers(region, "tcgen05.cp")
        memory.hand_over(region, warp, "tcgen05.cp", stamp)
        check_reach(granules, shared.num_bytes, "of tcgen05.cp")
        queue.hold(warp.thread, shared, granules, "tcgen05.cp")
        words = np.ascontiguousarray(shared.data.view(np.uint16)[elements]).view(np.uint32)
        quadrants = words.reshape(-1, 32, columns)[list(blocks)]
        memory.begin_write(region, owner)
        memory.store(region, quadrants.reshape(8, 16, columns))
        issued.operands.append((shared, granules))
        issued.writes.append((memory, region))
    owner.in_flight += 1
    queue.issued.append(issued)
