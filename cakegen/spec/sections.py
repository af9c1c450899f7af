"""Leaf module: the sections of an export file as strict pydantic models. Bounds here; what fits together in `legality`.

A section's fields have the names of those that they become in `cakegen.model`, where their meaning is documented. The
sections of rules are derived from `cakegen.rules`, which holds the bounds and the meaning of each field.
"""

from __future__ import annotations

import functools
import types
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from cakegen.block import Block, parameters_of
from cakegen.rules import Meaning, nested_table, rule_fields

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,47}$")]
ArchName = Annotated[str, Field(pattern=r"^sm_[0-9]{2,3}[a-z]?$")]
Degree = Annotated[int, Field(ge=1, le=64)]
SmCount = Annotated[int, Field(ge=1, le=1024)]
# operands are addressed in 32 bits, and a vector of 8 bf16 is 16 bytes
Width = Annotated[int, Field(ge=64, le=2**17, multiple_of=8)]


_LEAST_FLOAT = 2.0**-126
_LARGEST_NUMBER = 1e6


def _hold_as_float(value: float) -> float:
    """Programs hold it as a float: below the least normal one, C++ reads 0 or a number that kernels may flush to 0."""
    if 0 < value < _LEAST_FLOAT:
        raise ValueError(f"a float of C++ holds {_LEAST_FLOAT:.9g} or more; {value!r} would be 0 or flushed to it")
    return value


class Section(BaseModel):
    """One table of an export file: no unknown key, no conversion, no change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RequestsSection(Section):
    """`[requests]`: the largest request that must resolve to a program."""

    max_tokens: Annotated[int, Field(ge=1, le=2**20)]
    max_partials: Annotated[int, Field(ge=1, le=1024)]


class TargetSection(Section):
    """`[[targets]]`: one architecture, its TP degrees, and its SM counts (its known parts where left out)."""

    arch: ArchName
    tp_degrees: Annotated[tuple[Degree, ...], Field(min_length=1)]
    sm_counts: Annotated[tuple[SmCount, ...], Field(min_length=1)] | None = None


@functools.cache
def section_of(record: type) -> type[Section]:
    """The strict section of a rules' dataclass, nested tables included: its fields, their bounds, their reasons."""
    fields: dict[str, Any] = {}
    for field in rule_fields(record):
        kind = _kind(field.kind, field.meaning)
        fields[field.name] = (kind | None, None) if field.optional else (kind, ...)
    return create_model(f"{record.__name__}Section", __base__=Section, **fields)


def _kind(kind: Any, meaning: Meaning) -> Any:
    table = nested_table(kind)
    item = _bounded(meaning) if table is None else section_of(table)
    if kind is int or kind is table:
        return item
    several = types.GenericAlias(tuple, (item, ...))
    return Annotated[several, Field(min_length=1)]


def _bounded(meaning: Meaning) -> Any:
    if meaning.one_of:
        return Literal[meaning.one_of]
    return Annotated[int, Field(ge=meaning.at_least, le=meaning.at_most, multiple_of=meaning.multiple_of)]


@functools.cache
def model_section(block: Block) -> type[Section]:
    """`[model]` of a block's exports: its extents, and the numbers that its functions and scales name."""
    below = dict.fromkeys(block.scales, _LARGEST_NUMBER)
    for call in block.calls:
        for parameter, argument in zip(parameters_of(call), call.arguments, strict=True):
            if isinstance(argument, str):
                below[argument] = min(parameter.below, below.get(argument, parameter.below))
    fields: dict[str, Any] = dict.fromkeys(block.widths, (Width, ...))
    for name, limit in below.items():
        fields[name] = (Annotated[float, Field(gt=0, lt=limit), AfterValidator(_hold_as_float)], ...)
    return create_model("ModelSection", __base__=Section, **fields)
