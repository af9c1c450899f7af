"""tcgen05.alloc, dealloc, relinquish_alloc_permit.

PTX ISA 9.7.16.7.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.memory import SHARED_WINDOW
from cakegen.emulator.machine.operands import park, read_address, read_lanes, uniform
from cakegen.emulator.machine.warp import Strand
from cakegen.emulator.text.ptx import Instruction
from cakegen.emulator.units.tcgen05.issue import TensorHost, cta_group_of, pair_of
from cakegen.emulator.units.tcgen05.tensor_memory import TensorMemory, split_address


def allocate(machine: TensorHost, strand: Strand, instruction: Instruction) -> None:
    """`tcgen05.alloc` (PTX ISA 9.7.16.7): waits for room; the address lands in shared memory."""
    group = cta_group_of(machine, instruction)
    address, columns = instruction.operands
    count = uniform(strand, read_lanes(strand, columns, "u4"), "the number of columns")

    def take(memories: list[TensorMemory]) -> int | None:
        # published kernels take a first allocation to lie at column 0
        salt = machine.elect_salt if machine.tensor.strict else 0
        starts = [memory.allocate(count, group, salt) for memory in memories]
        assert starts.count(starts[0]) == len(starts), "CTAs of a pair allocate together, so alike"
        return starts[0]

    start = _together(machine, strand, instruction, group, ("alloc", count, 0), take)
    if start is None:
        return
    wide = "shared::cta" not in instruction.parts
    where = read_address(strand, address, "u8" if wide else "u4")
    where = (where - np.uint64(SHARED_WINDOW)).astype(np.uint32) if wide else where
    target = np.array([uniform(strand, where, "the address of the result")], np.uint32)
    thread = strand.warp.at(strand.pc - 1, None)
    strand.warp.cta.shared.store(target, np.array([[start]], np.uint32).view(np.uint8), thread)


def free(machine: TensorHost, strand: Strand, instruction: Instruction) -> None:
    """`tcgen05.dealloc` (PTX ISA 9.7.16.7)."""
    group = cta_group_of(machine, instruction)
    address, columns = (uniform(strand, read_lanes(strand, o, "u4"), "dealloc") for o in instruction.operands)

    memory = strand.warp.cta.tensor_memory
    if memory.answer is None:
        start = split_address(address)[1]
        memory.check_order_of_free(slice(start, start + columns), strand.warp)

    def give_back(memories: list[TensorMemory]) -> int:
        for memory in memories:
            memory.free(address, columns, group)
            machine.wake(memory.waiters)
        return 0

    _together(machine, strand, instruction, group, ("dealloc", address, columns), give_back)


def relinquish(machine: TensorHost, strand: Strand, instruction: Instruction) -> None:
    """`tcgen05.relinquish_alloc_permit` (PTX ISA 9.7.16.7)."""

    def promise(memories: list[TensorMemory]) -> int:
        for memory in memories:
            memory.relinquished = True
        return 0

    group = cta_group_of(machine, instruction)
    _together(machine, strand, instruction, group, ("relinquish_alloc_permit", 0, 0), promise)


def _together(
    machine: TensorHost,
    strand: Strand,
    instruction: Instruction,
    cta_group: int,
    what: tuple[str, int, int],
    act: Callable[[list[TensorMemory]], int | None],
) -> int | None:
    """Do something in one CTA, or in both of a pair once a warp of each is there; None: the strand waits.

    With cta_group::2 the first warp may block until the other CTA's comes (PTX ISA 9.7.16.7.1).
    """
    cta = strand.warp.cta
    memory = cta.tensor_memory
    if memory.answer is not None:
        answer, memory.answer = memory.answer, None
        return answer
    pair = [memory]
    if cta_group == 2 and memory.offered is None:
        pair = [each.tensor_memory for each in pair_of(cta, cta_group)]
        other = pair[1 - (cta.shared.rank & 1)]
        if other.offered is not None and other.offered != what:
            raise Fault("tensor-memory", f"the CTAs of a pair disagree: {what} meets {other.offered} of the other")
        if other.offered is None:
            memory.offered = what
    result = act(pair) if memory.offered is None else None
    if result is None:
        strand.pc -= 1
        reason = f"{what[1]} free columns of tensor memory"
        if memory.offered is not None:
            reason = f"the other CTA of the pair to execute `{instruction.opcode}`"
        park(strand, memory.waiters, reason)
        return None
    if cta_group == 2:
        other.offered, other.answer = None, result
        machine.wake(other.waiters)
    return result
