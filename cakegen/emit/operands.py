"""The arguments of a body's call: kernel parameters, grouped into the structs of `templates/kernels/`. Pure.

Names come from the table of operands; what a launch is given beside them stands here.
"""

from __future__ import annotations

from collections.abc import Iterable

from cakegen.emit.program import Operand
from cakegen.operands import FRONT, TAIL, OperandSpec


def names_of(specs: Iterable[OperandSpec]) -> tuple[str, ...]:
    """Operands by name."""
    return tuple(spec.name for spec in specs)


def pitches_of(specs: Iterable[OperandSpec]) -> tuple[str, ...]:
    """The parameters that hold the pitch of rows, in elements."""
    return tuple(f"{spec.short}_pitch" for spec in specs)


def maps_of(specs: Iterable[OperandSpec]) -> tuple[str, ...]:
    """The parameters that are tensor maps of operands."""
    return tuple(f"{spec.name}_map" for spec in specs)


def results_of(stage: str) -> str:
    """What a program's last stores fill, in the words of a diagram: a rows stage's products, or the sum."""
    return " | ".join(spec.short for spec in (FRONT.outputs if stage == "front" else (TAIL.output,)))


(NORM,) = TAIL.norms
PARTIAL_PARAMETERS = ("num_partials", f"{NORM.partials.name}_partial_stride")
"""How many partials there are, and how far apart, in elements."""

FRONT_MAPS = Operand(maps_of(FRONT.mapped), "FrontMaps")
FRONT_OUTPUTS = Operand((*names_of(FRONT.outputs), *pitches_of(FRONT.outputs)), "FrontOutputs")
TAIL_MAPS = Operand(maps_of(TAIL.mapped), "TailMaps")
RESIDENT_TAIL_MAPS = Operand(maps_of(spec for spec in TAIL.mapped if spec != NORM.output), "ResidentTailMaps")
TAIL_OUTPUT = Operand((TAIL.output.name, *pitches_of((TAIL.output,))), "TailOutput")
MAPPED_OUTPUT = Operand((*maps_of((TAIL.output,)), *TAIL_OUTPUT.parameters), "MappedOutput")
_NORM_ROWS = (*names_of(NORM.pointed), *pitches_of((NORM.partials, NORM.output)))
NORM_OPERANDS = Operand((*_NORM_ROWS, *PARTIAL_PARAMETERS, "counters"), "NormOperands")
"""Of staged rows the last three are left out, of a resident y the last: nothing reads them."""
ONE_PARTIAL_NORM = Operand((*_NORM_ROWS, "norm_first_rows"), "OnePartialNorm")
NO_NORM = Operand((), "NoNorm")
SPLIT = Operand(("num_items", "full_items", "sk_ipc", "sk_max_seg", "sk_total"), "Split")
PARTIALS = Operand(("partials", "counters"), "Partials")


def plain(*names: str) -> tuple[Operand, ...]:
    """Parameters that are passed as they are."""
    return tuple(Operand((name,)) for name in names)
