"""Leaf module: a block as formulas with shapes, for people. Imports the block's records and functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from cakegen.block import Block, Call, Product, RowsStage, Segment, SumStage, parse_call
from cakegen.functions import ACTIVATIONS, NORMS, Activation, RowNorm

Numbers = Mapping[str, int | float]
_OVER_TP = " / TP"
_PRODUCT_SPLITS = {
    "replicated": "every rank computes all rows",
    "rows": "a rank computes its share of rows",
}
_SEGMENT_SPLITS = {
    "k": "a rank multiplies its share of {k}; the ranks' outputs add up",
    "none": "a rank multiplies all of {k}, of its own operand; the ranks' outputs add up",
    "rows": "a rank multiplies its share of the weight's rows",
}


def formula_lines(block: Block, numbers: Numbers) -> Iterator[str]:
    """One stage after another: what it computes, from what, and what is split over TP.

    Parameters
    ----------
    numbers
        Values of the block's symbols: a symbol is followed by its value where it is first used.
    """
    text = _Text(numbers)
    for stage in block.stages:
        lines = text.rows_stage(stage) if isinstance(stage, RowsStage) else text.sum_stage(stage, block)
        yield from lines


class _Text:
    """Knows the values of symbols."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers

    def rows_stage(self, stage: RowsStage) -> Iterator[str]:
        yield f"{stage.name}, of {stage.input} {self._shape('T', stage.k)} bf16:"
        for product in stage.products:
            yield from (f"  {line}" for line in self._product(product, stage))

    def sum_stage(self, stage: SumStage, block: Block) -> Iterator[str]:
        yield f"{stage.name}, one fp32 accumulation, rounded once:"
        for segment in stage.segments:
            yield from (f"  {line}" for line in self._prepared(segment))
        columns = stage.n + _OVER_TP if stage.segments[0].split == "rows" else stage.n
        terms = " + ".join(self._term(segment) for segment in stage.segments)
        yield f"  {stage.output} {self._shape('T', columns)} bf16 = {terms}"
        for segment in stage.segments:
            sliced = _is_sliced(segment)
            columns = segment.k + _OVER_TP if sliced else segment.k
            rows = stage.n + _OVER_TP if segment.split == "rows" else stage.n
            yield f"    {segment.operand} {self._shape('T', columns)} bf16"
            yield f"    {segment.weight} {self._shape(rows, columns)} bf16"
            yield f"    TP: {_SEGMENT_SPLITS[segment.split].format(k=segment.k)}"

    def _product(self, product: Product, stage: RowsStage) -> Iterator[str]:
        rows = product.rows + _OVER_TP if product.split == "rows" else product.rows
        weight_rows = f"2 * {rows}" if product.gated else rows
        multiplied = f"{stage.input} @ {product.weight}.T"
        if product.scale:
            multiplied = f"{product.scale} * ({multiplied})"
        yield f"{product.output} {self._shape('T', rows)} {product.dtype} = {self._applied(product, multiplied)}"
        if product.activation:
            yield from self._function(product.activation, ACTIVATIONS)
        if product.norm:
            yield from self._function(product.norm, NORMS)
            yield f"  w = {product.norm_weight} {self._shape(rows)} bf16"
        yield f"  {product.weight} {self._shape(weight_rows, stage.k)} {product.weight_dtype}"
        if product.scale:
            yield f"  {product.scale} = {self.numbers[product.scale]}"
        yield f"  TP: {_PRODUCT_SPLITS[product.split]}"

    def _applied(self, product: Product, multiplied: str) -> str:
        if product.activation:
            halves = "gate rows, up rows of " if product.gated else ""
            multiplied = f"{_called(product.activation).function}({halves}{multiplied})"
        return f"{_called(product.norm).function}({multiplied})" if product.norm else multiplied

    def _prepared(self, segment: Segment) -> Iterator[str]:
        prepared = segment.prepared
        if prepared is None:
            return
        total = f"sum of {prepared.sum_of} over P"
        value = f"{_called(prepared.norm).function}({total})" if prepared.norm else total
        written = "" if prepared.output else ", not written"
        yield f"{segment.operand} {self._shape('T', segment.k)} bf16 = {value}{written}"
        yield f"  {prepared.sum_of} {self._shape('P', 'T', segment.k)} bf16; added in fp32, p = 0, 1, …, rounded once"
        if prepared.norm:
            yield from self._function(prepared.norm, NORMS)
            yield f"  w = {prepared.norm_weight} {self._shape(segment.k)} bf16"

    def _term(self, segment: Segment) -> str:
        if segment.split == "k" and not _is_sliced(segment):
            return f"{segment.operand}[:, of this rank] @ {segment.weight}[:, of this rank].T"
        return f"{segment.operand} @ {segment.weight}.T"

    def _function(self, text: str, known: Mapping[str, Activation] | Mapping[str, RowNorm]) -> Iterator[str]:
        call = _called(text)
        function = known[call.function]
        taken = ", ".join(function.operands) if isinstance(function, Activation) else "r"
        what = "" if isinstance(function, Activation) else "; m the mean of squares of the row r"
        yield f"  {call.function}({taken}) = {self._formula(function, call)}{what}"
        yield f"    rounded to bf16: {function.rounding}"

    def _formula(self, function: Activation | RowNorm, call: Call) -> str:
        """With numbers in the place of parameters."""
        values = {
            parameter.name: self.numbers[argument] if isinstance(argument, str) else argument
            for parameter, argument in zip(function.parameters, call.arguments, strict=True)
        }
        return re.sub(r"[a-z_]+", lambda word: str(values.get(word[0], word[0])), function.formula)

    def _shape(self, *extents: str) -> str:
        return f"[{', '.join(self._extent(extent) for extent in extents)}]"

    def _extent(self, extent: str) -> str:
        """`hidden 7168`, `2 * shared 2 * 6144 / TP`: a symbol with its value behind it."""
        return re.sub(r"[a-z_0-9]*[a-z_]+[a-z_0-9]*", lambda word: self._valued(word[0]), extent)

    def _valued(self, symbol: str) -> str:
        return f"{symbol} {self.numbers[symbol]}" if symbol in self.numbers else symbol


def _is_sliced(segment: Segment) -> bool:
    return segment.split == "k" and segment.held == "slice"


def _called(text: str) -> Call:
    call = parse_call(text)
    assert call is not None  # whoever read the block has refused others
    return call
