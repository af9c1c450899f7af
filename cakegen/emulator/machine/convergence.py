"""Which lanes of a warp an instruction wants together (PTX ISA 9.7.13.2, 9.7.9.6)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.machine.warp import Strand
from cakegen.emulator.text.ptx import Immediate, Instruction, Operand, Register
from cakegen.emulator.text.stops import MEMBER_MASKED


def are_together(strand: Strand, instruction: Instruction) -> bool:
    """Whether all lanes of the warp, or of the instruction's member mask, are in a strand."""
    wanted = strand.warp.live_lanes()
    masked = instruction.root in MEMBER_MASKED or instruction.parts[1:2] == ("warp",)
    if masked and "aligned" not in instruction.parts and instruction.root != "barrier" and instruction.operands:
        wanted = wanted & _member_lanes(instruction.operands[-1], strand)
    return not np.count_nonzero(wanted & ~strand.mask)


def _member_lanes(operand: Operand, strand: Strand) -> NDArray[Any]:
    value = operand.value if isinstance(operand, Immediate) else 0xFFFFFFFF
    if isinstance(operand, Register):
        value = int(np.bitwise_or.reduce(strand.warp.registers[operand.index][strand.mask]))
    return (value >> np.arange(32) & 1).astype(np.bool_)
