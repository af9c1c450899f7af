"""`wgmma.mma_async`, decoded once. PTX ISA 9.7.15."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from cakegen.emulator.faults import Fault
from cakegen.emulator.text.ptx import Immediate, Instruction, Register, Vector
from cakegen.emulator.units.product_values import ProductKind
from cakegen.errors import EmulationError

BF16_PRODUCT = ProductKind("bf16", "bf16", "f32")
_A_REGISTERS = 4


# Types of A -> those that B may have with it, and of D (PTX ISA 9.7.15.2).
_TYPES = {
    "f16": ({"f16"}, {"f16", "f32"}),
    "bf16": ({"bf16"}, {"f32"}),
    "tf32": ({"tf32"}, {"f32"}),
    **dict.fromkeys(("e4m3", "e5m2"), ({"e4m3", "e5m2"}, {"f16", "f32"})),
    **dict.fromkeys(("s8", "u8"), ({"s8", "u8"}, {"s32"})),
}
_SHAPE = re.compile(r"m64n(\d+)k(\d+)$")


@dataclass(frozen=True)
class WgmmaForm:
    """One decoded instruction: `d [64, n] (+)= a [64, k] b [n, k]^T`, B in shared memory.

    Parameters
    ----------
    a, b
        Registers of their descriptors; `a` -1: A is in registers.
    accumulate
        `scale-d`; of a form with a predicate in its place, what the predicate said.
    predicate
        Index of that register; -1: none.
    a_registers
        The registers of A.
    a_across, b_across
        The operand is M- or N-major in shared memory ("transposed"); else K-major.
    """

    instruction: Instruction
    n: int
    registers: tuple[int, ...]
    a: int
    b: int
    accumulate: bool
    predicate: int = -1
    kind: ProductKind = BF16_PRODUCT
    a_registers: tuple[int, ...] = ()
    a_across: bool = False
    b_across: bool = False

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
    kind, n = _kind_of(instruction)
    d, a, b, *rest = instruction.operands
    scale, *immediates = rest
    accumulate = scale.value if isinstance(scale, Immediate) else int(isinstance(scale, Register)) or -1
    values = [operand.value for operand in immediates if isinstance(operand, Immediate)]
    from_registers = isinstance(a, Vector)
    # integers have no `imm-scale`; 16-bit types alone have `imm-trans`, of what lies in shared memory
    wanted = {"s8": 0, "u8": 0}.get(kind.a, 2) + (2 - from_registers if kind.width == 2 else 0)
    scales, across = values[:2], [*[0] * (len(values) == 3), *values[2:]]
    is_legal = len(values) == len(immediates) == wanted and accumulate in (0, 1)
    if not is_legal or not set(scales) <= {1, -1} or not set(across) <= {0, 1}:
        raise _refused(instruction, "this form of wgmma is not modelled")
    if not isinstance(d, Vector) or not isinstance(b, Register) or not (from_registers or isinstance(a, Register)):
        raise _refused(instruction, "operands of wgmma not modelled")
    registers, sources = _indices(d), _indices(a) if isinstance(a, Vector) else ()
    count = n // (4 if kind.d == "f16" else 2)
    if len(registers) != count:
        raise EmulationError(f"{instruction.place}: m64n{n} needs {count} accumulator registers; got {len(registers)}")
    if from_registers and len(sources) != _A_REGISTERS:
        raise EmulationError(f"{instruction.place}: A of wgmma is in {_A_REGISTERS} registers; got {len(sources)}")
    kind = dataclasses.replace(kind, negates_a=scales[:1] == [-1], negates_b=scales[1:] == [-1])
    a_index = a.index if isinstance(a, Register) else -1
    predicate = scale.index if isinstance(scale, Register) else -1
    a_across, b_across = map(bool, across or (0, 0))
    return WgmmaForm(
        instruction, n, registers, a_index, b.index, accumulate == 1, predicate, kind, sources, a_across, b_across
    )


def _refused(instruction: Instruction, why: str) -> EmulationError:
    return EmulationError(f"{instruction.place}: {instruction.text[:100]!r}: {why}")


def _indices(vector: Vector) -> tuple[int, ...]:
    return tuple(item.index for item in vector.items if isinstance(item, Register))


def _kind_of(instruction: Instruction) -> tuple[ProductKind, int]:
    """The types, and N."""
    parts = [part for part in instruction.parts if part != "satfinite"]
    shape = _SHAPE.match(parts[4]) if len(parts) == 8 and len(instruction.operands) >= 4 else None
    if shape is None or parts[1:4] != ["mma_async", "sync", "aligned"]:
        raise _refused(instruction, "this form of wgmma is not modelled")
    d, a, b = parts[5:]
    kind = ProductKind(a, b, d, saturates="satfinite" in instruction.parts)
    of_b, of_d = _TYPES.get(a, (set(), set()))
    n, k = (int(each) for each in shape.groups())
    step = 16 if d == "s32" and n > 32 else 8
    if b not in of_b or d not in of_d or k != kind.depth or n % step or not 8 <= n <= 256:
        raise _refused(instruction, "this form of wgmma is not modelled")
    if kind.saturates and d != "s32":
        raise _refused(instruction, "this form of wgmma is not modelled")
    return kind, n
