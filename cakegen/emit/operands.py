"""The arguments of a body's call: kernel parameters, grouped into the structs of `templates/kernels/`. Pure.

Names come from the table of operands; what a launch is given beside them stands here.
"""

from __future__ import annotations

from collections.abc import Iterable

from cakegen.emit.program import Operand
from cakegen.model import ModelDims
from cakegen.operands import OperandSpec, Preparation


def names_of(specs: Iterable[OperandSpec]) -> tuple[str, ...]:
    """Operands by name."""
    return tuple(spec.name for spec in specs)


def pitches_of(specs: Iterable[OperandSpec]) -> tuple[str, ...]:
    """The parameters that hold the pitch of rows, in elements."""
    return tuple(f"{spec.short}_pitch" for spec in specs)


def maps_of(specs: Iterable[OperandSpec]) -> tuple[str, ...]:
    """The parameters that are tensor maps of operands."""
    return tuple(f"{spec.name}_map" for spec in specs)


def results_of(dims: ModelDims, stage: str) -> str:
    """What a program's last stores fill, in the words of a diagram: a rows stage's products, or the sum."""
    outputs = dims.rows_stage.outputs if stage == "front" else (dims.sum_stage.output,)
    return " | ".join(spec.short for spec in outputs)


def partial_parameters(prepared: Preparation) -> tuple[str, str]:
    """How many partials there are, and how far apart, in elements."""
    return ("num_partials", f"{prepared.partials.name}_partial_stride")


def front_maps_operand(dims: ModelDims) -> Operand:
    """The maps of a rows stage."""
    return Operand(maps_of(dims.rows_stage.mapped), "FrontMaps")


def front_outputs(dims: ModelDims) -> Operand:
    """What a rows stage writes."""
    outputs = dims.rows_stage.outputs
    return Operand((*names_of(outputs), *pitches_of(outputs)), "FrontOutputs")


def tail_maps_operand(dims: ModelDims, *, resident: bool = False) -> Operand:
    """The maps of a sum stage; `resident`: its prepared tokens stay in shared memory, and need none."""
    stage = dims.sum_stage
    left = (spec for spec in stage.mapped if not (resident and spec == stage.preparation.output))
    return Operand(maps_of(left), "ResidentTailMaps" if resident else "TailMaps")


def tail_output(dims: ModelDims, *, mapped: bool = False) -> Operand:
    """What a sum stage writes; `mapped`: through a tensor map too."""
    spec = dims.sum_stage.output
    plain_output = (spec.name, *pitches_of((spec,)))
    return (
        Operand((*maps_of((spec,)), *plain_output), "MappedOutput") if mapped else Operand(plain_output, "TailOutput")
    )


def norm_rows(prepared: Preparation) -> tuple[str, ...]:
    """Buffers and pitches of the rows that are prepared."""
    return (*names_of(prepared.pointed), *pitches_of((prepared.partials, prepared.output)))


def norm_operands(prepared: Preparation) -> Operand:
    """Of staged rows the last three are left out, of a resident y the last: nothing reads them."""
    return Operand((*norm_rows(prepared), *partial_parameters(prepared), "counters"), "NormOperands")


def one_partial_norm(prepared: Preparation) -> Operand:
    """Of a norm inside a GEMM that normalises rows of one partial."""
    return Operand((*norm_rows(prepared), "norm_first_rows"), "OnePartialNorm")


NO_NORM = Operand((), "NoNorm")
SPLIT = Operand(("num_items", "full_items", "sk_ipc", "sk_max_seg", "sk_total"), "Split")
PARTIALS = Operand(("partials", "counters"), "Partials")


def plain(*names: str) -> tuple[Operand, ...]:
    """Parameters that are passed as they are."""
    return tuple(Operand((name,)) for name in names)
