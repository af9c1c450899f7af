"""Leaf module: what a rule's field means, its unit and its bounds, and how they are read off a dataclass."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any

MOST = 2**20
"""Of any count, where nothing narrower bounds it."""


@dataclass(frozen=True)
class Meaning:
    """What stands beside a field: the one place for its text, its unit and its bounds. A table's is its docstring.

    Parameters
    ----------
    text
        What the field is for, as one sentence without its full stop.
    unit
        What a value counts; empty where the text says it.
    at_least, at_most, multiple_of
        Bounds of a whole number, or of each item of a list.
    one_of
        The only values, where they are few.
    why
        What the bounds come from.
    """

    text: str
    unit: str = ""
    at_least: int | None = None
    at_most: int | None = None
    multiple_of: int | None = None
    one_of: tuple[int, ...] = ()
    why: str = ""

    @property
    def comment(self) -> str:
        """The text with its unit, and with its bounds where they are narrow."""
        if self.one_of:
            return f"{self.text}: {' or '.join(map(str, self.one_of))} {self.unit}"
        if self.at_most in (None, MOST):
            return f"{self.text} ({self.unit})" if self.unit else self.text
        step = f", in steps of {self.multiple_of}" if self.multiple_of else ""
        return f"{self.text}: {self.at_least} to {self.at_most} {self.unit}{step}"


@dataclass(frozen=True)
class RuleField:
    """A field of a rules' dataclass.

    Parameters
    ----------
    kind
        Its type without the `None` of an optional one: `int`, a tuple, or a dataclass (a nested table).
    optional
        Whether it may be left out, which means never.
    """

    name: str
    kind: Any
    optional: bool
    meaning: Meaning

    @property
    def table(self) -> type | None:
        """The dataclass of a nested table, or of each entry of a list of tables."""
        return nested_table(self.kind)


def rule_fields(record: type) -> tuple[RuleField, ...]:
    """The fields of a rules' dataclass, in their order, each with its meaning."""
    hints = typing.get_type_hints(record, include_extras=True)
    return tuple(_rule_field(field.name, hints[field.name]) for field in dataclasses.fields(record))


def field_meaning(record: type, name: str) -> Meaning:
    """What one field means."""
    return next(field.meaning for field in rule_fields(record) if field.name == name)


def nested_table(kind: Any) -> type | None:
    """The dataclass that a type is, or holds a tuple of."""
    if typing.get_origin(kind) is tuple:
        kind = typing.get_args(kind)[0]
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def _rule_field(name: str, hint: Any) -> RuleField:
    kind, meaning = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint, None)
    optional = isinstance(kind, types.UnionType)
    if optional:
        (kind,) = (each for each in typing.get_args(kind) if each is not type(None))
    table = nested_table(kind)
    assert (meaning is None) == (table is not None), f"{name}: a number says what it means, a table in its docstring"
    if meaning is None:
        text = (table.__doc__ or "").strip()
        meaning = Meaning(" ".join(text.split()).removesuffix("."))
    return RuleField(name, kind, optional, meaning)


def count(text: str, unit: str, why: str = "") -> Meaning:
    """Of a whole number from 0 on."""
    return Meaning(text, unit, 0, MOST, why=why)


def positive(text: str, unit: str, why: str = "") -> Meaning:
    """Of a whole number from 1 on."""
    return Meaning(text, unit, 1, MOST, why=why)


def stages(text: str) -> Meaning:
    """Of stages of a ring."""
    return Meaning(text, "stages", 1, 32)


def percent(text: str) -> Meaning:
    """Of a share."""
    return Meaning(text, "percent", 0, 100)


def token_tile(text: str) -> Meaning:
    """Of a token tile that a rule starts or ends at."""
    return Meaning(text, "tokens", 8, 384, 8)


def half_tile(text: str) -> Meaning:
    """Of a token tile that is halved."""
    return Meaning(text, "tokens", 16, 384, 16, why="halves are whole groups of 8 tokens")


def raster(text: str) -> Meaning:
    """Of row tiles that pass a weight tile together."""
    return Meaning(text, "row tiles", 2, MOST, 2, why="a pair of CTAs has two row tiles")


def norm_rows() -> Meaning:
    """Of the norm that is a launch of its own."""
    return Meaning(
        "rows of a CTA of the stand-alone norm", "rows", 1, 32, why="a row a warp; a CTA has at most 32 warps"
    )
