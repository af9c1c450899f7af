"""Leaf module: the operands of the two stages, once. Imports the model.

Validation, the torch operators' schemas, weights by name, and random operands of tests, demo and bench derive from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cakegen.model import ModelDims

Kind = Literal["rows", "partials", "weight", "vector"]
Extent = Literal["T", "P", "hidden", "latent", "experts", "i_local", "2 * i_local"]


@dataclass(frozen=True)
class OperandSpec:
    """One operand of a stage.

    Parameters
    ----------
    name
        As the functions' parameters and the registry's `arg_plan` spell it.
    kind
        `rows`: `[T, …]`, whose rows may be apart. `partials`: several of those. `weight`: contiguous, or packed.
        `vector`: contiguous.
    shape
        Extents in the model's symbols; `i_local` are a rank's columns of the shared expert.
    why
        The extents in words, for a refusal; `{i_local}`, `{shared}` and `{tp}` stand for numbers.
    output
        The stage writes it; all others it reads.
    fp32
        Elements are fp32, else bf16.
    """

    name: str
    kind: Kind
    shape: tuple[Extent, ...]
    why: str
    output: bool = False
    fp32: bool = False


FRONT = (
    OperandSpec("x", "rows", ("T", "hidden"), "T tokens of the hidden width"),
    OperandSpec("gate_weight", "weight", ("experts", "hidden"), "experts by hidden"),
    OperandSpec("down_weight", "weight", ("latent", "hidden"), "latent by hidden"),
    OperandSpec(
        "shared_gate_up_weight", "weight", ("2 * i_local", "hidden"), "2 * {i_local} gate and up rows by hidden"
    ),
    OperandSpec("logits", "rows", ("T", "experts"), "T by experts", output=True, fp32=True),
    OperandSpec("latent", "rows", ("T", "latent"), "T by latent", output=True),
    OperandSpec("shared_act", "rows", ("T", "i_local"), "T by this rank's shared columns", output=True),
)
TAIL = (
    OperandSpec("routed", "partials", ("P", "T", "latent"), "P >= 1 partials of T tokens"),
    OperandSpec("norm_weight", "vector", ("latent",), "latent"),
    OperandSpec("up_weight", "weight", ("hidden", "latent"), "hidden by latent, all columns"),
    OperandSpec("shared_act", "rows", ("T", "i_local"), "T by {shared} / {tp}"),
    OperandSpec("shared_down_weight", "weight", ("hidden", "i_local"), "hidden by shared columns"),
    OperandSpec("y_workspace", "rows", ("T", "latent"), "T by latent", output=True),
    OperandSpec("out", "rows", ("T", "hidden"), "T by hidden", output=True),
)
"""Of both: inputs in the order of the functions' parameters, then outputs in the order in which they are returned."""
STAGES = {"front": FRONT, "tail": TAIL}


def inputs_of(stage: str) -> tuple[OperandSpec, ...]:
    """What a stage reads."""
    return tuple(spec for spec in STAGES[stage] if not spec.output)


def outputs_of(stage: str) -> tuple[OperandSpec, ...]:
    """What a stage writes."""
    return tuple(spec for spec in STAGES[stage] if spec.output)


def weights_of(stage: str) -> tuple[OperandSpec, ...]:
    """What a stage reads and a checkpoint holds."""
    return tuple(spec for spec in STAGES[stage] if spec.kind in ("weight", "vector"))


def shape_of(
    spec: OperandSpec, dims: ModelDims, *, i_local: int, tokens: int = 0, partials: int = 1
) -> tuple[int, ...]:
    """The extents of an operand for one rank of one request."""
    extents: dict[Extent, int] = {
        "T": tokens,
        "P": partials,
        "hidden": dims.hidden,
        "latent": dims.latent,
        "experts": dims.experts,
        "i_local": i_local,
        "2 * i_local": 2 * i_local,
    }
    return tuple(extents[extent] for extent in spec.shape)
