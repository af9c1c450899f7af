"""What instructions of a whole warp share: who must execute them, and the registers that they name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault
from cakegen.emulator.text.ptx import Instruction, Operand, Register, Sink, Vector
from cakegen.errors import EmulationError

Array = NDArray[Any]
Mask = NDArray[np.bool_] | None


class RegisterWarp(Protocol):
    """A warp, as far as its registers go."""

    registers: list[Any]


Collective = Callable[[Any, Mask], None]


def refused(instruction: Instruction) -> EmulationError:
    """The error for a form that is not modelled."""
    return EmulationError(f"{instruction.place}: {instruction.text[:120]!r} is not modelled (opcode form unknown)")


def by_whole_warp(instruction: Instruction, act: Callable[[Any], None]) -> Collective:
    """`act`, by all lanes of a warp or by none.

    A predicate in front must say the same in all of them (PTX ISA 9.7.14.5: else the behaviour is undefined).
    """

    def run(warp: RegisterWarp, mask: Mask) -> None:
        if mask is not None and not mask.all():
            if not mask.any():
                return
            raise Fault("divergence", f"{instruction.opcode} by a part of the warp")
        act(warp)

    return run


def registers_of(instruction: Instruction, operand: Operand, counts: tuple[int, ...]) -> tuple[Register | Sink, ...]:
    """The registers of an operand, a vector or a single one; so many of them.

    Raises
    ------
    EmulationError
        The form has other operands.
    """
    items = operand.items if isinstance(operand, Vector) else (operand,)
    registers = tuple(item for item in items if isinstance(item, (Register, Sink)))
    if len(registers) != len(items) or len(items) not in counts:
        raise refused(instruction)
    return registers


def read_registers(warp: RegisterWarp, registers: tuple[Register | Sink, ...], kind: str) -> Array:
    """`[registers, 32]` of a numpy type that is as wide as they are."""
    named = [register for register in registers if isinstance(register, Register)]
    return np.stack([warp.registers[register.index].view(kind) for register in named])


def write_registers(warp: RegisterWarp, registers: tuple[Register | Sink, ...], values: Array) -> None:
    """`[registers, 32]`, of the registers' width."""
    for register, lanes in zip(registers, values, strict=True):
        if isinstance(register, Register):
            warp.registers[register.index] = lanes.view(warp.registers[register.index].dtype)
