"""Leaf module: the records of a block's declaration. Imports functions.

A block is its stages. A rows stage multiplies one input `[T, K]` by several weights `[rows, K]`, whose rows are one
space of tiles. A sum stage adds several products `[T, K] x [N, K]` up in one fp32 accumulation and rounds it once.

Extents are symbols: each is a number of an export's `[model]`. Functions are calls of `cakegen.functions`, such as
`situ(situ_beta, 25.0)`, whose arguments are symbols or numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from cakegen.functions import ACTIVATIONS, NORMS, Parameter

Dtype = Literal["bf16", "fp32"]
_CALL = re.compile(r"([a-z][a-z0-9_]*)(?:\((.*)\))?")
# what pydantic, where it reads these records, holds them to
_STRICT: dict[str, Any] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}


@dataclass(frozen=True)
class Call:
    """A named function and its arguments: symbols of the model, or numbers."""

    function: str
    arguments: tuple[str | float, ...]


def parse_call(text: str) -> Call | None:
    """`situ(situ_beta, 25.0)` in parts, or None where it is no call."""
    match = _CALL.fullmatch(text)
    if match is None:
        return None
    words = [word.strip() for word in match[2].split(",")] if match[2] else []
    arguments: list[str | float] = []
    for word in words:
        if is_symbol(word):
            arguments.append(word)
            continue
        try:
            arguments.append(float(word))
        except ValueError:
            return None
    return Call(match[1], tuple(arguments))


def parameters_of(call: Call) -> tuple[Parameter, ...]:
    """Of the function that a call names."""
    function = (ACTIVATIONS | NORMS)[call.function]
    return function.parameters


def is_symbol(text: str) -> bool:
    """Whether a text can name a number, an operand or a stage."""
    return re.fullmatch(r"[a-z][a-z0-9_]{0,47}", text) is not None


@dataclass(frozen=True)
class Product:
    """A weight of a rows stage, and what becomes of the product with it.

    Parameters
    ----------
    weight
        `[rows, K]`; behind a gated activation `[2 * rows, K]`, gate rows and then up rows.
    output
        `[T, rows]`.
    scale
        A symbol that the product is multiplied by, before anything else; empty: none.
    activation, norm
        Calls; empty: none. A norm is of the whole row of what the activation gives.
    norm_weight
        `[rows]`, of a norm alone.
    split
        Over TP: `replicated`, every rank computes all rows; `rows`, a rank computes its share of rows.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    weight: str
    rows: str
    output: str
    dtype: Dtype = "bf16"
    weight_dtype: Dtype = "bf16"
    scale: str = ""
    activation: str = ""
    norm: str = ""
    norm_weight: str = ""
    split: Literal["replicated", "rows"] = "replicated"

    @property
    def gated(self) -> bool:
        """Whether its weight has gate rows, then up rows."""
        call = parse_call(self.activation)
        return call is not None and call.function in ACTIVATIONS and ACTIVATIONS[call.function].gated


@dataclass(frozen=True)
class RowsStage:
    """One input `[T, k]` and its products."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    form: Literal["rows"]
    name: str
    input: str
    k: str
    products: tuple[Product, ...]


@dataclass(frozen=True)
class Prepared:
    """How an operand comes about, before the launch or in it: P partials `[P, T, k]` are added, and maybe normed.

    The sum is of fp32, in the order p = 0, 1, …, and rounded once to bf16.

    Parameters
    ----------
    norm
        A call; empty: none.
    norm_weight
        `[k]`, of a norm alone.
    output
        Whether the stage writes it, to memory of the caller.
    result
        What it is called as a result; empty: by the operand's name.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    sum_of: str
    norm: str = ""
    norm_weight: str = ""
    output: bool = True
    result: str = ""


@dataclass(frozen=True)
class Segment:
    """A part of a sum's K: an operand `[T, k]` and a weight `[N, k]`.

    Parameters
    ----------
    split
        Over TP: `k`, a rank multiplies its columns of both; `none`, a rank multiplies all columns, of an operand of its
        own; `rows`, a rank multiplies its rows of the weight.
    held
        Of split `k`: `slice`, a rank has its columns of the weight alone; `whole`, it has all and reads its own.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    weight: str
    k: str
    operand: str
    prepared: Prepared | None = None
    split: Literal["k", "none", "rows"] = "k"
    held: Literal["slice", "whole"] = "slice"


@dataclass(frozen=True)
class SumStage:
    """One output `[T, n]`, to which all segments add up."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    form: Literal["sum"]
    name: str
    output: str
    n: str
    segments: tuple[Segment, ...]


Stage = RowsStage | SumStage


@dataclass(frozen=True)
class Block:
    """The stages in the order in which a layer calls them; experts may stand between any two."""

    stages: tuple[Stage, ...]

    @property
    def rows_stages(self) -> tuple[RowsStage, ...]:
        """Those of one input."""
        return tuple(stage for stage in self.stages if isinstance(stage, RowsStage))

    @property
    def sum_stages(self) -> tuple[SumStage, ...]:
        """Those of one output."""
        return tuple(stage for stage in self.stages if isinstance(stage, SumStage))

    @property
    def products(self) -> tuple[Product, ...]:
        """Those of all rows stages."""
        return tuple(product for stage in self.rows_stages for product in stage.products)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Those of all sum stages."""
        return tuple(segment for stage in self.sum_stages for segment in stage.segments)

    @property
    def widths(self) -> tuple[str, ...]:
        """Symbols of extents, in the order of their first use."""
        return tuple(dict.fromkeys(self._extents()))

    @property
    def calls(self) -> tuple[Call, ...]:
        """Of activations and norms."""
        texts = [text for product in self.products for text in (product.activation, product.norm)]
        texts += [segment.prepared.norm for segment in self.segments if segment.prepared is not None]
        calls = (parse_call(text) for text in texts if text)
        return tuple(call for call in calls if call is not None)

    @property
    def scales(self) -> tuple[str, ...]:
        """Symbols of numbers that products are multiplied by."""
        return tuple(dict.fromkeys(product.scale for product in self.products if product.scale))

    @property
    def numbers(self) -> tuple[str, ...]:
        """Symbols of numbers that are no extents, in the order of their first use: scales and functions' arguments."""
        arguments = (each for call in self.calls for each in call.arguments if isinstance(each, str))
        return tuple(dict.fromkeys((*self.scales, *arguments)))

    def _extents(self) -> Iterator[str]:
        for stage in self.stages:
            if isinstance(stage, RowsStage):
                yield stage.k
                yield from (product.rows for product in stage.products)
            else:
                yield stage.n
                yield from (segment.k for segment in stage.segments)
