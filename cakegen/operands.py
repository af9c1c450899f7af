"""Leaf module: the operands of the two stages, once. Imports the model.

From here derive: programs' arguments and tensor maps, validation, the torch operators' schemas, weights by name, the
reference's arguments, and the random operands of emulator, demo and bench.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from cakegen.model import ModelDims

Value = TypeVar("Value")
Kind = Literal["rows", "partials", "weight", "vector"]
Extent = Literal["T", "P", "hidden", "latent", "experts", "i_local", "2 * i_local"]


@dataclass(frozen=True)
class OperandSpec:
    """One operand.

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
    fp32
        Elements are fp32, else bf16.
    result
        What it is called where it is returned, and before `_pitch`; empty: by its name.
    """

    name: str
    kind: Kind
    shape: tuple[Extent, ...]
    why: str
    fp32: bool = False
    result: str = ""

    @property
    def short(self) -> str:
        """Its name as a result."""
        return self.result or self.name


@dataclass(frozen=True)
class Product:
    """A weight of a rows stage, and what the product with it gives; `gated`: of gate rows, then as many up rows."""

    weight: OperandSpec
    output: OperandSpec
    gated: bool = False


@dataclass(frozen=True)
class RowsStage:
    """One input `[T, K]` and several products with it; the rows of all weights are one space of tiles."""

    tokens: OperandSpec
    products: tuple[Product, ...]

    @property
    def weights(self) -> tuple[OperandSpec, ...]:
        """What it reads and a checkpoint holds."""
        return tuple(product.weight for product in self.products)

    @property
    def inputs(self) -> tuple[OperandSpec, ...]:
        """What it reads, in the order of the functions' parameters."""
        return (self.tokens, *self.weights)

    @property
    def outputs(self) -> tuple[OperandSpec, ...]:
        """What it writes, in the order in which it is returned."""
        return tuple(product.output for product in self.products)

    @property
    def operands(self) -> tuple[OperandSpec, ...]:
        """What it reads, then what it writes."""
        return self.inputs + self.outputs

    @property
    def mapped(self) -> tuple[OperandSpec, ...]:
        """What programs read through tensor maps, in the order of their parameters."""
        return (*self.weights, self.tokens)

    @property
    def pointed(self) -> tuple[OperandSpec, ...]:
        """What programs reach by address, in the order of their parameters."""
        return self.outputs


@dataclass(frozen=True)
class Norm:
    """How a segment's tokens come about: partials are added, the sum is normalised and written."""

    partials: OperandSpec
    weight: OperandSpec
    output: OperandSpec

    @property
    def pointed(self) -> tuple[OperandSpec, ...]:
        """What programs reach by address, in the order of their parameters."""
        return (self.partials, self.weight, self.output)


@dataclass(frozen=True)
class Segment:
    """A part of a sum's K: tokens `[T, K]`, as they are given or as a norm writes them, and a weight `[N, K]`."""

    weight: OperandSpec
    tokens: OperandSpec
    norm: Norm | None = None

    @property
    def whole_k(self) -> bool:
        """Both have the columns of all ranks, and a rank reads its own in place."""
        return self.weight.shape[1] != "i_local"

    @property
    def inputs(self) -> tuple[OperandSpec, ...]:
        """What it reads, in the order of the functions' parameters."""
        return ((self.tokens,) if self.norm is None else (self.norm.partials, self.norm.weight)) + (self.weight,)


@dataclass(frozen=True)
class SumStage:
    """One output `[T, N]`, to which all segments add up; in the order of the functions' parameters."""

    output: OperandSpec
    segments: tuple[Segment, ...]

    @property
    def weights(self) -> tuple[OperandSpec, ...]:
        """What it reads and a checkpoint holds."""
        return tuple(spec for spec in self.inputs if spec.kind in ("weight", "vector"))

    @property
    def inputs(self) -> tuple[OperandSpec, ...]:
        """What it reads, in the order of the functions' parameters."""
        return tuple(spec for segment in self.segments for spec in segment.inputs)

    @property
    def outputs(self) -> tuple[OperandSpec, ...]:
        """What it writes, in the order in which it is returned."""
        return (*(norm.output for norm in self.norms), self.output)

    @property
    def operands(self) -> tuple[OperandSpec, ...]:
        """What it reads, then what it writes."""
        return self.inputs + self.outputs

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Those of its segments."""
        return tuple(segment.norm for segment in self.segments if segment.norm is not None)

    @property
    def along_k(self) -> tuple[Segment, ...]:
        """Segments as programs walk K: what waits for no norm comes first."""
        return tuple(sorted(self.segments, key=lambda segment: segment.norm is not None))

    @property
    def mapped(self) -> tuple[OperandSpec, ...]:
        """What programs read through tensor maps, in the order of their parameters."""
        return (
            *(segment.weight for segment in self.along_k),
            *(segment.tokens for segment in self.along_k),
        )

    @property
    def pointed(self) -> tuple[OperandSpec, ...]:
        """What programs reach by address, in the order of their parameters."""
        return (*(spec for norm in self.norms for spec in norm.pointed), self.output)


Stage = RowsStage | SumStage

_SHARED_ACT = OperandSpec("shared_act", "rows", ("T", "i_local"), "T by this rank's shared columns, {shared} / {tp}")
_Y = OperandSpec("y_workspace", "rows", ("T", "latent"), "T by latent", result="y")
FRONT = RowsStage(
    OperandSpec("x", "rows", ("T", "hidden"), "T tokens of the hidden width"),
    (
        Product(
            OperandSpec("gate_weight", "weight", ("experts", "hidden"), "experts by hidden"),
            OperandSpec("logits", "rows", ("T", "experts"), "T by experts", fp32=True),
        ),
        Product(
            OperandSpec("down_weight", "weight", ("latent", "hidden"), "latent by hidden"),
            OperandSpec("latent", "rows", ("T", "latent"), "T by latent"),
        ),
        Product(
            OperandSpec(
                "shared_gate_up_weight", "weight", ("2 * i_local", "hidden"), "2 * {i_local} gate and up rows by hidden"
            ),
            _SHARED_ACT,
            gated=True,
        ),
    ),
)
TAIL = SumStage(
    OperandSpec("out", "rows", ("T", "hidden"), "T by hidden"),
    (
        Segment(
            OperandSpec("up_weight", "weight", ("hidden", "latent"), "hidden by latent, all columns"),
            _Y,
            Norm(
                OperandSpec("routed", "partials", ("P", "T", "latent"), "P >= 1 partials of T tokens"),
                OperandSpec("norm_weight", "vector", ("latent",), "latent"),
                _Y,
            ),
        ),
        Segment(
            OperandSpec("shared_down_weight", "weight", ("hidden", "i_local"), "hidden by shared columns"), _SHARED_ACT
        ),
    ),
)
STAGES: dict[str, Stage] = {"front": FRONT, "tail": TAIL}

_EXACT = {norm.output for norm in TAIL.norms}
TOLERANCES = {
    spec.short: 0.0 if spec in _EXACT else 1e-3 if spec.fp32 else 1e-2
    for stage in STAGES.values()
    for spec in stage.outputs
}
"""By result: atol = rtol against fp64, as the contract says; 0: the reference's own bits."""


def named(specs: Iterable[OperandSpec], values: Iterable[Value]) -> dict[str, Value]:
    """Values that stand in the order of the table, by name."""
    return {spec.name: value for spec, value in zip(specs, values, strict=True)}


def returned(specs: Iterable[OperandSpec], values: Iterable[Value]) -> dict[str, Value]:
    """Results that stand in the order of the table, by what they are called there."""
    return {spec.short: value for spec, value in zip(specs, values, strict=True)}


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
