"""`wgmma.mma_async`, decoded once. PTX ISA 9.7.15."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from cakegen.emulator.faults import Fault
from cakegen.emulator.text.ptx import Immediate, Instruction, Register, Vector
from cakegen.errors import EmulationError


@dataclass(frozen=True)
class WgmmaForm:
    """One decoded instruction: `d [64, n] (+)= a [64, 16] b [n, 16]^T`, operands K-major bf16 in shared memory.

    Parameters
    ----------
    accumulate
        `scale-d`; of a form with a predicate in its place, what the predicate said.
    predicate
        Index of that register; -1: none.
    """

    instruction: Instruction
    n: int
    registers: tuple[int, ...]
    a: int
    b: int
    accumulate: bool
    predicate: int = -1

    def at(self, R: list[Any]) -> WgmmaForm:
        """The form with its predicate read."""
        if self.predicate < 0:
            return self
        lanes = R[self.predicate]
        if (lanes != lanes[0]).any():
            raise Fault("divergence", "the lanes of a warp disagree on the scale-d of a wgmma")
        return self if lanes[0] else dataclasses.replace(self, accumulate=False)


def decode_wgmma(instruction: Instruction) -> WgmmaForm:
    """Decode `wgmma.mma_async` once.

    Raises
    ------
    EmulationError
        A shape, a type or an operand that is not modelled.
    """
    parts = instruction.parts
    shape = parts[4] if len(parts) > 4 else ""
    known = parts[1:4] == ("mma_async", "sync", "aligned") and parts[5:] == ("f32", "bf16", "bf16")
    values = [operand.value for operand in instruction.operands[4:] if isinstance(operand, Immediate)]
    scale = instruction.operands[3] if len(instruction.operands) == 8 else None
    accumulate = scale.value if isinstance(scale, Immediate) else int(isinstance(scale, Register)) or -1
    if not known or values != [1, 1, 0, 0] or accumulate not in (0, 1):
        raise EmulationError(f"{instruction.place}: {instruction.text[:100]!r}: this form of wgmma is not modelled")
    d, a, b = instruction.operands[:3]
    n = int(shape.removeprefix("m64n").removesuffix("k16"))
    if not isinstance(d, Vector) or not isinstance(a, Register) or not isinstance(b, Register) or not 8 <= n <= 256:
        raise EmulationError(f"{instruction.place}: {instruction.text[:100]!r}: operands of wgmma not modelled")
    registers = tuple(item.index for item in d.items if isinstance(item, Register))
    if len(registers) != n // 2:
        raise EmulationError(f"{instruction.place}: m64n{n} needs {n // 2} accumulator registers; got {len(registers)}")
    predicate = scale.index if isinstance(scale, Register) else -1
    return WgmmaForm(instruction, n, registers, a.index, b.index, accumulate == 1, predicate)
