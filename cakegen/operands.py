"""Leaf module: the operands of a block's stages, from its declaration. Imports the block's records and errors.

From here derive: programs' arguments and tensor maps, validation, the torch operators' schemas, weights by name, the
reference's arguments, and the random operands of emulator, demo and bench.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from cakegen import block as declared
from cakegen.block import Block
from cakegen.errors import RegistryError
from cakegen.functions import ACTIVATIONS, Activation

Value = TypeVar("Value")
Kind = Literal["rows", "partials", "weight", "vector"]
TOKENS, PARTIALS = "T", "P"
OVER_TP = " / TP"
"""Behind a symbol: the share of one rank."""
TWICE = "2 * "
"""Before an extent: gate rows, and as many up rows."""


class Dims(Protocol):
    """The numbers of a block's extents."""

    def extent(self, symbol: str) -> int:
        """The value of a symbol."""


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
        Extents: `T`, `P`, or symbols of the block, `shared_intermediate / TP` of a rank's share.
    why
        The extents in words, for a refusal; `{i_local}`, `{shared}` and `{tp}` stand for numbers.
    fp32
        Elements are fp32, else bf16.
    result
        What it is called where it is returned, and before `_pitch`; empty: by its name.
    """

    name: str
    kind: Kind
    shape: tuple[str, ...]
    why: str
    fp32: bool = False
    result: str = ""

    @property
    def short(self) -> str:
        """Its name as a result."""
        return self.result or self.name


@dataclass(frozen=True)
class Product:
    """A weight of a rows stage, and what the product with it gives.

    `gated`: the weight has gate rows, then as many up rows. `activated`: an activation stands behind the product.
    """

    weight: OperandSpec
    output: OperandSpec
    gated: bool = False
    activated: bool = False


class _Stage(ABC):
    """What stages of both forms say of their operands."""

    @functools.cached_property
    @abstractmethod
    def operands(self) -> tuple[OperandSpec, ...]:
        """All of them."""

    @functools.cached_property
    @abstractmethod
    def positional(self) -> tuple[OperandSpec, ...]:
        """Those that a call may give without their names, in that order."""

    @functools.cached_property
    def positional_names(self) -> tuple[str, ...]:
        """`positional` by name."""
        return tuple(spec.name for spec in self.positional)

    @functools.cached_property
    def names(self) -> Set[str]:
        """All operands by name, in that order and then the others."""
        return dict.fromkeys((*self.positional_names, *(spec.name for spec in self.operands))).keys()


@dataclass(frozen=True)
class RowsStage(_Stage):
    """One input `[T, K]` and several products with it; the rows of all weights are one space of tiles."""

    tokens: OperandSpec
    products: tuple[Product, ...]

    @functools.cached_property
    def weights(self) -> tuple[OperandSpec, ...]:
        """What it reads and a checkpoint holds."""
        return tuple(product.weight for product in self.products)

    @functools.cached_property
    def inputs(self) -> tuple[OperandSpec, ...]:
        """What it reads, in the order of the functions' parameters."""
        return (self.tokens, *self.weights)

    @functools.cached_property
    def outputs(self) -> tuple[OperandSpec, ...]:
        """What it writes, in the order in which it is returned."""
        return tuple(product.output for product in self.products)

    @functools.cached_property
    def operands(self) -> tuple[OperandSpec, ...]:
        """What it reads, then what it writes."""
        return self.inputs + self.outputs

    @functools.cached_property
    def positional(self) -> tuple[OperandSpec, ...]:
        """Operands that a call may give without their names, in that order."""
        return self.operands

    @functools.cached_property
    def mapped(self) -> tuple[OperandSpec, ...]:
        """What programs read through tensor maps, in the order of their parameters."""
        return (*self.weights, self.tokens)

    @functools.cached_property
    def pointed(self) -> tuple[OperandSpec, ...]:
        """What programs reach by address, in the order of their parameters."""
        return self.outputs

    @functools.cached_property
    def activated(self) -> tuple[Product, ...]:
        """Products behind which an activation stands."""
        return tuple(product for product in self.products if product.activated)

    @functools.cached_property
    def gated(self) -> bool:
        """Whether a tile of those is half gate rows, half up rows."""
        return any(product.gated for product in self.products)


@dataclass(frozen=True)
class Preparation:
    """How a segment's tokens come about: partials are added up, and maybe normalised.

    Parameters
    ----------
    weight
        Of the norm; None: there is none, and one partial is taken as it is.
    output
        The prepared tokens.
    written
        Into memory that the caller gives, as a result. Else the runtime has room for them where they are needed.
    """

    partials: OperandSpec
    weight: OperandSpec | None
    output: OperandSpec
    written: bool

    @property
    def pointed(self) -> tuple[OperandSpec, ...]:
        """What programs reach by address, in the order of their parameters."""
        return (self.partials, *((self.weight,) if self.weight is not None else ()), self.output)

    @property
    def inputs(self) -> tuple[OperandSpec, ...]:
        """What it reads, in the order of the functions' parameters."""
        return (self.partials, *((self.weight,) if self.weight is not None else ()))


@dataclass(frozen=True)
class Segment:
    """A part of a sum's K: tokens `[T, K]`, as they are given or prepared, and a weight `[N, K]`.

    `shares_k`: both have the columns of all ranks, and a rank reads its own in place.
    """

    weight: OperandSpec
    tokens: OperandSpec
    prepared: Preparation | None = None
    shares_k: bool = False

    @property
    def inputs(self) -> tuple[OperandSpec, ...]:
        """What it reads, in the order of the functions' parameters."""
        return ((self.tokens,) if self.prepared is None else self.prepared.inputs) + (self.weight,)


@dataclass(frozen=True)
class SumStage(_Stage):
    """One output `[T, N]`, to which all segments add up; in the order of the functions' parameters."""

    output: OperandSpec
    segments: tuple[Segment, ...]

    @functools.cached_property
    def weights(self) -> tuple[OperandSpec, ...]:
        """What it reads and a checkpoint holds."""
        return tuple(spec for spec in self.inputs if spec.kind in ("weight", "vector"))

    @functools.cached_property
    def inputs(self) -> tuple[OperandSpec, ...]:
        """What it reads, in the order of the functions' parameters."""
        return tuple(spec for segment in self.segments for spec in segment.inputs)

    @functools.cached_property
    def outputs(self) -> tuple[OperandSpec, ...]:
        """What it writes for its caller, in the order in which it is returned."""
        return (*(each.output for each in self.preparations if each.written), self.output)

    @functools.cached_property
    def operands(self) -> tuple[OperandSpec, ...]:
        """What it reads, then what it writes for its caller."""
        return self.inputs + self.outputs

    @functools.cached_property
    def positional(self) -> tuple[OperandSpec, ...]:
        """Operands that a call may give without their names, in that order: all but prepared tokens."""
        return (*self.inputs, self.output)

    @functools.cached_property
    def preparation(self) -> Preparation:
        """That of its one segment whose tokens are prepared."""
        (prepared,) = self.preparations
        return prepared

    @functools.cached_property
    def preparations(self) -> tuple[Preparation, ...]:
        """Those of its segments."""
        return tuple(segment.prepared for segment in self.segments if segment.prepared is not None)

    @functools.cached_property
    def along_k(self) -> tuple[Segment, ...]:
        """Segments as programs walk K: what waits for no preparation comes first."""
        return tuple(sorted(self.segments, key=lambda segment: segment.prepared is not None))

    @functools.cached_property
    def mapped(self) -> tuple[OperandSpec, ...]:
        """What programs read through tensor maps, in the order of their parameters."""
        return (
            *(segment.weight for segment in self.along_k),
            *(segment.tokens for segment in self.along_k),
        )

    @functools.cached_property
    def pointed(self) -> tuple[OperandSpec, ...]:
        """What programs reach by address, in the order of their parameters."""
        return (*(spec for each in self.preparations for spec in each.pointed), self.output)


Stage = RowsStage | SumStage


@functools.cache
def stages_of(block: Block) -> dict[str, Stage]:
    """The operands of each stage of a block, by the stage's name.

    Raises
    ------
    RegistryError
        It is not what programs are written for: only a damaged registry holds such a block, since an export that
        declares one is refused.
    """
    forms = [stage.form for stage in block.stages]
    if forms != ["rows", "sum"]:
        raise _damaged(f"needs a stage of rows, then one of sum; got {forms}")
    (rows,), (total,) = block.rows_stages, block.sum_stages
    if rows.name == total.name or len([each for each in rows.products if each.activation]) != 1:
        raise _damaged(f"needs stages of two names, and one product with an activation; got {rows.name}, {total.name}")
    if len(total.segments) != 2 or len([each for each in total.segments if each.prepared is not None]) != 1:
        raise _damaged(f"needs a segment of a prepared sum, and one of others; got {len(total.segments)} segments")
    stages: dict[str, Stage] = {rows.name: _rows_stage(rows), total.name: _sum_stage(total, _rows_stage(rows))}
    specs = dict.fromkeys(spec for stage in stages.values() for spec in (*stage.operands, *stage.pointed))
    for name in (*stages, *(name for spec in specs for name in (spec.name, spec.short))):
        if not declared.is_symbol(name):
            raise _damaged(f"needs names of a-z, 0-9 and _; got {name!r}")
    return stages


def _damaged(what: str) -> RegistryError:
    return RegistryError(f"Model.dims.block: {what}")


def _rows_stage(stage: declared.RowsStage) -> RowsStage:
    tokens = OperandSpec(stage.input, "rows", (TOKENS, stage.k), f"T tokens of the {stage.k} width")
    return RowsStage(tokens, tuple(_product(product, stage.k) for product in stage.products))


def _product(product: declared.Product, k: str) -> Product:
    sliced = product.split == "rows"
    rows = product.rows + OVER_TP * sliced
    words = "{i_local}" if sliced else product.rows
    if product.gated:
        weight = OperandSpec(product.weight, "weight", (TWICE + rows, k), f"2 * {words} gate and up rows by {k}")
    else:
        weight = OperandSpec(
            product.weight, "weight", (rows, k), f"{words} rows by {k}" if sliced else f"{words} by {k}"
        )
    output = _rows_of(product.output, rows, fp32=product.dtype == "fp32")
    if product.activation:
        _activation(product)
    return Product(weight, output, product.gated, bool(product.activation))


def _rows_of(name: str, columns: str, *, fp32: bool = False, result: str = "") -> OperandSpec:
    why = "T by this rank's shared columns, {shared} / {tp}" if columns.endswith(OVER_TP) else f"T by {columns}"
    return OperandSpec(name, "rows", (TOKENS, columns), why, fp32, result)


def _sum_stage(stage: declared.SumStage, before: RowsStage) -> SumStage:
    given = {spec.name: spec for spec in before.outputs}
    segments = tuple(_segment(segment, stage.n, given) for segment in stage.segments)
    return SumStage(_rows_of(stage.output, stage.n), segments)


def _segment(segment: declared.Segment, n: str, given: dict[str, OperandSpec]) -> Segment:
    sliced = segment.split == "k" and segment.held == "slice"
    columns = segment.k + OVER_TP * sliced
    why = f"{n} by shared columns" if sliced else f"{n} by {segment.k}, all columns"
    weight = OperandSpec(segment.weight, "weight", (n, columns), why)
    prepared = segment.prepared
    if prepared is None:
        return Segment(weight, given.get(segment.operand) or _rows_of(segment.operand, columns))
    tokens = _rows_of(segment.operand, segment.k, result=prepared.result)
    partials = OperandSpec(prepared.sum_of, "partials", (PARTIALS, TOKENS, segment.k), "P >= 1 partials of T tokens")
    norm = OperandSpec(prepared.norm_weight, "vector", (segment.k,), segment.k) if prepared.norm else None
    return Segment(weight, tokens, Preparation(partials, norm, tokens, prepared.output), segment.split == "k")


@functools.cache
def tolerances_of(block: Block) -> dict[str, float]:
    """By result: atol = rtol against fp64, as the contract says; 0: the reference's own bits."""
    stages = stages_of(block).values()
    exact = {each.output for stage in stages if isinstance(stage, SumStage) for each in stage.preparations}
    found = {
        spec.short: 0.0 if spec in exact else 1e-3 if spec.fp32 else 1e-2 for stage in stages for spec in stage.outputs
    }
    return found | {product.output: _activation(product).tolerance for product in block.products if product.activation}


def _activation(product: declared.Product) -> Activation:
    call = declared.parse_call(product.activation)
    if call is None or call.function not in ACTIVATIONS:
        raise _damaged(f"needs one of the activations {', '.join(ACTIVATIONS)}; got {product.activation!r}")
    return ACTIVATIONS[call.function]


def named(specs: Iterable[OperandSpec], values: Iterable[Value]) -> dict[str, Value]:
    """Values that stand in the order of the table, by name."""
    return {spec.name: value for spec, value in zip(specs, values, strict=True)}


def returned(specs: Iterable[OperandSpec], values: Iterable[Value]) -> dict[str, Value]:
    """Results that stand in the order of the table, by what they are called there."""
    return {spec.short: value for spec, value in zip(specs, values, strict=True)}


def shape_of(spec: OperandSpec, dims: Dims, *, i_local: int, tokens: int = 0, partials: int = 1) -> tuple[int, ...]:
    """The extents of an operand for one rank of one request; `i_local`: the rank's share of what is split by rows."""
    counts = {TOKENS: tokens, PARTIALS: partials}
    return tuple(counts[each] if each in counts else _extent(each, dims, i_local) for each in spec.shape)


def _extent(text: str, dims: Dims, i_local: int) -> int:
    symbol = text.removeprefix(TWICE)
    value = i_local if symbol.endswith(OVER_TP) else dims.extent(symbol)
    return value * (2 if text.startswith(TWICE) else 1)


def share_of(spec: OperandSpec, shape: Iterable[int]) -> int:
    """A rank's share (`i_local`) as an operand's extents tell it; 0 where it has none."""
    for text, extent in zip(spec.shape, shape, strict=True):
        if text.endswith(OVER_TP):
            return extent // 2 if text.startswith(TWICE) else extent
    return 0
