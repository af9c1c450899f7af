"""Arithmetic instructions as Python expressions on arrays of 32 lanes.

`ExpressionWriter.value` gives the text of an instruction's result and its type; `translate` puts such texts into one
function a basic block. Families, not opcode strings: a type or a modifier that a family does not know is an error. The
families stand in `forms`, by topic; what their expressions call stands in modules on arrays.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from cakegen.emulator.text import arithmetic, bits, directed, half_arithmetic
from cakegen.emulator.text.forms import comparisons, conversions, floats, halves, integers, moves
from cakegen.emulator.text.forms.writer import Family, FormWriter, Value
from cakegen.emulator.text.ptx import Instruction
from cakegen.errors import PtxError

FAMILIES: dict[str, Family] = {}
for _topic in (integers, floats, comparisons, conversions, moves):
    assert not FAMILIES.keys() & _topic.FAMILIES.keys()
    FAMILIES |= _topic.FAMILIES


def environment() -> dict[str, Any]:
    """Names that the expressions use."""
    names: dict[str, Any] = {
        name: value
        for module in (arithmetic, bits, directed, half_arithmetic)
        for name, value in inspect.getmembers(module, inspect.isfunction)
    }
    names |= {"sqrt": np.sqrt, "minimum": np.minimum, "maximum": np.maximum, "absolute": np.abs, "where": np.where}
    names |= {"bitwise_count": np.bitwise_count, "isnan": np.isnan, "copysign": np.copysign}
    return names


class ExpressionWriter(FormWriter):
    """Writes expressions for one kernel."""

    def knows(self, root: str) -> bool:
        """Whether a family of arithmetic instructions is known."""
        return root in FAMILIES

    def value(self, instruction: Instruction) -> Value:
        """(expression, numpy type) of an instruction's result; of two results the first.

        Raises
        ------
        EmulationError
            The family does not know the form.
        """
        family, found = FAMILIES[instruction.root], len(instruction.operands)
        if found not in family.operands:
            numbers = " or ".join(map(str, family.operands))
            raise PtxError(f"{instruction.place}: {instruction.text!r}: {instruction.root} has {numbers} operands")
        if halves.is_packed(instruction):
            return halves.packed(self, instruction)
        return family.write(self, instruction)

    def second_value(self, instruction: Instruction) -> Value:
        """(expression, numpy type) of the second result of `p|q`.

        Raises
        ------
        EmulationError
            The family has one result.
        """
        return comparisons.second(self, instruction)
