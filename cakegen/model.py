"""Leaf module: the records that planner, emitter and runtime share. No torch, no pydantic, no I/O.

Everything here is a frozen dataclass of numbers and strings, so that a plan is a pure function of hashable values
and a registry can hold a model as a literal. Sizes in bytes end in `_bytes`; K is counted in chunks of `block_k`.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from dataclasses import dataclass
from typing import Any, TypeVar

from cakegen.arch import architecture
from cakegen.block import Block
from cakegen.errors import RegistryError
from cakegen.operands import RowsStage, Stage, SumStage, stages_of, tolerances_of
from cakegen.rules import BlackwellRules, HopperRules, HopperTile

R = TypeVar("R")


@dataclass(frozen=True)
class NamedFunction:
    """A function of `cakegen.functions`, and the values of its parameters in their order there."""

    name: str
    numbers: tuple[float, ...]


@dataclass(frozen=True)
class ModelDims:
    """A block, and the values of its symbols.

    Parameters
    ----------
    norm_eps
        Of the norm behind the sum of partials; None where the block has none.
    activation
        What stands behind the product whose rows are split over TP.
    """

    hidden: int
    latent: int
    experts: int
    shared_intermediate: int
    norm_eps: float | None
    activation: NamedFunction
    block: Block

    def extent(self, symbol: str) -> int:
        """The value of a symbol of the block.

        Raises
        ------
        RegistryError
            The block names one that is no extent.
        """
        value = getattr(self, symbol, None)
        if type(value) is not int:
            raise RegistryError(f"Model.dims.block: needs extents that are numbers of the model; got {symbol!r}")
        return value

    def check_block(self) -> None:
        """Refuse a block that no export declares; raises `RegistryError`."""
        for symbol in self.block.widths:
            self.extent(symbol)
        if self.normed != (self.norm_eps is not None):
            raise RegistryError(f"Model.dims.norm_eps: needs a number where the block has a norm; got {self.norm_eps}")

    @functools.cached_property
    def stages(self) -> dict[str, Stage]:
        """The operands of each stage, by its name; raises as `stages_of`."""
        return stages_of(self.block)

    @functools.cached_property
    def rows_stage(self) -> RowsStage:
        """The operands of the stage of one input."""
        (found,) = (stage for stage in self.stages.values() if isinstance(stage, RowsStage))
        return found

    @functools.cached_property
    def sum_stage(self) -> SumStage:
        """The operands of the stage of one output."""
        (found,) = (stage for stage in self.stages.values() if isinstance(stage, SumStage))
        return found

    @property
    def tolerances(self) -> dict[str, float]:
        """By result, against fp64; see `tolerances_of`."""
        return tolerances_of(self.block)

    @property
    def normed(self) -> bool:
        """Whether the sum of partials is normalised; else one partial is multiplied as it is."""
        return self.sum_stage.preparation.weight is not None

    @property
    def shares_latent(self) -> bool:
        """Whether a rank multiplies its share of the latent columns in the tail; else all, of its own sum."""
        return any(segment.shares_k for segment in self.sum_stage.segments)

    def i_local(self, tp: int) -> int:
        """Shared-expert columns of one rank."""
        return self.shared_intermediate // tp

    def latent_slice(self, tp: int) -> int:
        """Latent columns that one rank multiplies in the tail."""
        return self.latent // tp if self.shares_latent else self.latent

    def latent_begin(self, tp: int, rank: int) -> int:
        """The first of them."""
        return rank * self.latent_slice(tp) if self.shares_latent else 0


@dataclass(frozen=True)
class Target:
    """One architecture that an export serves: its TP degrees and the SM counts of the parts to plan for."""

    arch: str
    tp_degrees: tuple[int, ...]
    sm_counts: tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """All that planning needs: what the registry's `MODEL` literal holds.

    Parameters
    ----------
    hopper, blackwell
        Rules of each family of architectures; None where the model has no target of it. `cakegen.plan.family_of` names
        the family of an architecture, whose `rules` reads its own.
    """

    name: str
    dims: ModelDims
    max_tokens: int
    max_partials: int
    targets: tuple[Target, ...]
    hopper: HopperRules | None
    blackwell: BlackwellRules | None

    @property
    def tp_degrees(self) -> tuple[int, ...]:
        """The TP degrees that some target has, rising."""
        return tuple(sorted({tp for target in self.targets for tp in target.tp_degrees}))

    def target(self, arch: str) -> Target | None:
        """The target for an architecture, or None where the export does not serve it."""
        return next((t for t in self.targets if t.arch == arch), None)

    def preferring(self, tile: HopperTile) -> Model:
        """This model with costs at which Hopper's prefill takes one of its tiles, whatever the others would save."""
        assert self.hopper is not None  # whose tile it is
        prefill = self.hopper.prefill.preferring(tile)
        return dataclasses.replace(self, hopper=dataclasses.replace(self.hopper, prefill=prefill))


@dataclass(frozen=True)
class DeviceFacts:
    """What a plan may depend on of a device.

    Parameters
    ----------
    arch
        Architecture name (`sm_90a`).
    sm_count
        Streaming multiprocessors that a launch may use.
    resident_pairs
        Two-CTA clusters that can be resident at once with one CTA an SM: the driver's occupancy where there is a
        device, else `sm_count // 2`.
    max_dynamic_smem_bytes
        Dynamic shared memory of one CTA.
    """

    arch: str
    sm_count: int
    resident_pairs: int
    max_dynamic_smem_bytes: int

    @staticmethod
    def nominal(arch: str, sm_count: int) -> DeviceFacts:
        """Facts of a device that is not at hand: every two SMs can hold a pair."""
        return DeviceFacts(arch, sm_count, sm_count // 2, architecture(arch).max_dynamic_smem_bytes)


def to_literal(record: Any) -> Any:
    """A record as nested dicts, lists, numbers and strings: what a registry can hold as a literal. None is left out."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
        return {name: to_literal(value) for name, value in values.items() if value is not None}
    if isinstance(record, tuple):
        return [to_literal(item) for item in record]
    return record


def from_literal(cls: type[R], literal: Any) -> R:
    """The inverse of `to_literal`.

    Raises
    ------
    RegistryError
        A field is missing that may not be None, unknown, or of the wrong type.
    """
    return typing.cast(R, convert_literal(cls, literal, cls.__name__))


def convert_literal(kind: Any, value: Any, where: str) -> Any:
    """A literal as a value of an annotation: a record, a tuple, or one of the literals themselves.

    Parameters
    ----------
    where
        What to call it in a message.

    Raises
    ------
    RegistryError
        As `from_literal`.
    """
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _convert_record(kind, value, where)
    if typing.get_origin(kind) is tuple:
        return _convert_tuple(typing.get_args(kind), value, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, types.UnionType):
        return convert_literal(_tagged(kind, value, where), value, where)
    if typing.get_origin(kind) is typing.Literal and value not in typing.get_args(kind):
        raise RegistryError(f"{where}: needs one of {list(typing.get_args(kind))}; got {value!r}")
    if isinstance(kind, type) and type(value) is not kind:
        raise RegistryError(f"{where}: needs {kind.__name__}; got {value!r}")
    return value


def _tagged(kinds: Any, value: Any, where: str) -> Any:
    """Of records that are told apart by a field of one value each: the one that a literal says it is."""
    tags = {typing.get_args(_hints(record)["form"][0])[0]: record for record in typing.get_args(kinds)}
    form = value.get("form") if isinstance(value, dict) else None
    if not isinstance(form, str) or form not in tags:
        raise RegistryError(f"{where}: needs a record whose form is one of {list(tags)}; got {value!r}")
    return tags[form]


def _convert_record(kind: type, value: Any, where: str) -> Any:
    hints = _hints(kind)
    required = {name for name, (_, optional) in hints.items() if not optional}
    if not isinstance(value, dict) or not required <= set(value) <= set(hints):
        got = sorted(value) if isinstance(value, dict) else type(value).__name__
        also = f", and may have {sorted(set(hints) - required)}" if len(required) < len(hints) else ""
        raise RegistryError(f"{where}: needs the fields {sorted(required)}{also}; got {got}")
    given = {name: convert_literal(hints[name][0], item, f"{where}.{name}") for name, item in value.items()}
    return kind(**dict.fromkeys(hints) | given)


def _convert_tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    """`tuple[X, ...]`, or `tuple[X, Y]` of exactly as many items."""
    if not isinstance(value, (list, tuple)):
        raise RegistryError(f"{where}: needs a list; got {type(value).__name__}")
    items = kinds[:1] * len(value) if kinds[-1] is Ellipsis else kinds
    if len(value) != len(items):
        raise RegistryError(f"{where}: needs {len(items)} items; got {len(value)}")
    return tuple(
        convert_literal(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(items, value, strict=True))
    )


@functools.cache
def _hints(record: type) -> dict[str, tuple[Any, bool]]:
    """Field -> its type without the `None` of an optional one, and whether it is one."""
    found = {}
    hints = typing.get_type_hints(record)
    for name, hint in ((field.name, hints[field.name]) for field in dataclasses.fields(record)):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        optional = isinstance(hint, types.UnionType)
        found[name] = (kinds[0] if optional else hint, optional)
    return found
