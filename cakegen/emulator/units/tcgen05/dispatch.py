"""The tcgen05 family: who runs what, and what a CTA must have finished when it exits."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from cakegen.emulator.faults import Fault, Where
from cakegen.emulator.machine.operands import refused
from cakegen.emulator.machine.warp import Cta, Strand
from cakegen.emulator.text.ptx import Instruction
from cakegen.emulator.units.tcgen05 import access as tcgen05_access
from cakegen.emulator.units.tcgen05 import alloc as tcgen05_alloc
from cakegen.emulator.units.tcgen05.copy import run_tensor_copy
from cakegen.emulator.units.tcgen05.issue import TensorHost, run_commit, uncommitted
from cakegen.emulator.units.tcgen05.mma import run_mma

Array = NDArray[Any]

_COLLECTIVE = {
    "alloc": tcgen05_alloc.allocate,
    "dealloc": tcgen05_alloc.free,
    "relinquish_alloc_permit": tcgen05_alloc.relinquish,
    "ld": tcgen05_access.load,
    "st": tcgen05_access.store,
    "wait::ld": tcgen05_access.wait_loads,
    "wait::st": tcgen05_access.wait_stores,
}


def run_tcgen05(machine: TensorHost, strand: Strand, instruction: Instruction, active: Array, where: Where) -> None:
    """Any instruction of the family."""
    what = instruction.parts[1]
    if what == "mma":
        run_mma(machine, strand, instruction, active)
    elif what == "cp":
        run_tensor_copy(machine, strand, instruction, active)
    elif what == "commit":
        run_commit(machine, strand, instruction, active, where)
    elif what == "fence::after_thread_sync":
        traffic, thread = strand.warp.tensor, strand.warp.thread
        traffic.unfenced = False
        traffic.ordered = thread.clock.copy() if thread is not None else None
    elif what == "fence::before_thread_sync":
        strand.warp.tensor.fenced = strand.warp.tensor.accesses
    elif what in _COLLECTIVE:
        if not active.all():
            raise Fault("divergence", f"tcgen05.{what} by a part of the warp")
        if instruction.parts[-1] not in ("b32", "aligned"):
            raise refused(instruction)
        _COLLECTIVE[what](machine, strand, instruction)
    else:
        raise refused(instruction)


def check_tensor_exit(machine: TensorHost, cta: Cta) -> None:
    """Refuse the exit of a CTA that holds columns, or whose mmas nothing has covered."""
    memory = cta.tensor_memory if machine.tensor.cta_group else None
    if memory is None:
        return
    late = uncommitted(machine.tensor, memory)
    if late is not None:
        raise Fault("exit", f"CTA {cta.index} exits while {late.owner} is not covered by a commit that has arrived")
    if memory.allocations:
        columns = ", ".join(f"{each.columns} at {each.start:#x}" for each in memory.allocations)
        raise Fault("tensor-memory", f"CTA {cta.index} exits without tcgen05.dealloc of columns: {columns}")
