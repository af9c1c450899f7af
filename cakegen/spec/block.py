"""Reads the declaration of a block: TOML tables -> `Block`; what fits together in it. Imports the block's records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from cakegen import paths
from cakegen.block import Block, Call, Prepared, Product, RowsStage, Segment, SumStage, is_symbol, parse_call
from cakegen.errors import SpecError
from cakegen.functions import ACTIVATIONS, NORMS, Activation, RowNorm
from cakegen.spec.faults import explain
from cakegen.toml_file import read_toml

_FORMS: dict[str, TypeAdapter[Any]] = {"rows": TypeAdapter(RowsStage), "sum": TypeAdapter(SumStage)}
_LARGEST = 32
"""Stages of a block, and products or segments of a stage."""


def block_file(name: str) -> Path:
    """A block that exports share.

    Raises
    ------
    SpecError
        There is none of that name.
    """
    folder = paths.exports_root() / "blocks"
    file = folder / f"{name}.toml"
    if not is_symbol(name) or not file.is_file():
        known = ", ".join(sorted(each.stem for each in folder.glob("*.toml")))
        raise SpecError(
            f"block = {name!r}: no such block; there is: {known}. Name one, or a file beside the export such as"
            " 'block.toml', or declare [[block.stages]] in it"
        )
    return file


def parse_block(table: Any) -> Block:
    """The block of a table `stages`.

    Raises
    ------
    SpecError
        A key is unknown, missing or none of its values, or stages do not fit together: a line a fault.
    """
    if not isinstance(table, dict) or set(table) != {"stages"}:
        got = sorted(table) if isinstance(table, dict) else type(table).__name__
        raise SpecError(f"block: needs [[stages]] and nothing else; got {got}")
    stages = table["stages"]
    if not isinstance(stages, (list, tuple)) or not 1 <= len(stages) <= _LARGEST:
        raise SpecError(
            f"block.stages: needs 1 to {_LARGEST} tables [[stages]], in the order in which a layer calls them"
        )
    block = Block(tuple(_stage(stage, f"block.stages.{index}") for index, stage in enumerate(stages)))
    faults = list(_faults(block))
    if faults:
        raise SpecError("\n".join(faults))
    return block


def read_block(file: Path) -> Block:
    """The block of a file.

    Raises
    ------
    SpecError
        As `parse_block`; or the file is missing or not TOML.
    """
    table = read_toml(file, "a block is a file exports/blocks/<name>.toml, or lies beside its export")
    try:
        return parse_block(table)
    except SpecError as error:
        where = f"{file.parent.name}/{file.name}"
        raise SpecError("\n".join(f"{where}: {line}" for line in str(error).splitlines())) from None


def _stage(table: Any, where: str) -> RowsStage | SumStage:
    form = table.get("form") if isinstance(table, dict) else None
    if not isinstance(form, str) or form not in _FORMS:
        raise SpecError(
            f"{where}.form = {form!r}: needs 'rows' (one input, several products) or 'sum' (one output, several"
            " segments of K)"
        )
    try:
        # as JSON, since a strict reader takes tables for records from there alone
        stage: RowsStage | SumStage = _FORMS[form].validate_json(json.dumps(table, default=repr))
    except ValidationError as error:
        raise SpecError("\n".join(f"{where}.{explain(entry)}" for entry in error.errors())) from None
    parts: tuple[Product, ...] | tuple[Segment, ...] = (
        stage.products if isinstance(stage, RowsStage) else stage.segments
    )
    if not 1 <= len(parts) <= _LARGEST:
        what = "products" if isinstance(stage, RowsStage) else "segments"
        raise SpecError(f"{where}.{what}: needs 1 to {_LARGEST}; got {len(parts)}")
    return stage


def _faults(block: Block) -> Iterator[str]:
    """What is wrong with names first: behind a wrong name other faults say little."""
    faults = [*_name_faults(block), *_repeats(block)]
    if not faults:
        faults = [*_call_faults(block), *_segment_faults(block)]
    yield from faults


def _name_faults(block: Block) -> Iterator[str]:
    for where, name in _names(block):
        if not is_symbol(name):
            yield f"{where} = {name!r}: a name is a lower-case letter, then up to 47 of a-z, 0-9 and _"


def _names(block: Block) -> Iterator[tuple[str, str]]:
    """Each field that holds a name, with its value; those that may be left out only where they are given."""
    for s, stage in enumerate(block.stages):
        at = f"block.stages.{s}"
        yield f"{at}.name", stage.name
        if isinstance(stage, RowsStage):
            yield from ((f"{at}.input", stage.input), (f"{at}.k", stage.k))
            for p, product in enumerate(stage.products):
                yield from _set_names(
                    product, ("weight", "rows", "output"), ("scale", "norm_weight"), f"{at}.products.{p}"
                )
            continue
        yield from ((f"{at}.output", stage.output), (f"{at}.n", stage.n))
        for g, segment in enumerate(stage.segments):
            yield from _set_names(segment, ("weight", "k", "operand"), (), f"{at}.segments.{g}")
            if segment.prepared is not None:
                yield from _set_names(
                    segment.prepared, ("sum_of",), ("norm_weight", "result"), f"{at}.segments.{g}.prepared"
                )


def _set_names(
    record: object, needed: tuple[str, ...], optional: tuple[str, ...], where: str
) -> Iterator[tuple[str, str]]:
    for name in (*needed, *(name for name in optional if getattr(record, name))):
        yield f"{where}.{name}", getattr(record, name)


def _repeats(block: Block) -> Iterator[str]:
    """An operand is written once, and a stage or a weight has one name."""
    written = [product.output for product in block.products] + [stage.output for stage in block.sum_stages]
    written += [segment.operand for segment in block.segments if segment.prepared is not None]
    weights = [product.weight for product in block.products] + [segment.weight for segment in block.segments]
    weights += [norm.norm_weight for norm in _normed(block) if norm.norm_weight]
    for what, names in (
        ("a stage", [stage.name for stage in block.stages]),
        ("what a block computes", written),
        ("a weight", weights),
    ):
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"block: {name} names {what} {names.count(name)} times; give each a name of its own"
    for name in sorted(set(written) & set(weights)):
        yield f"block: {name} names a weight and what a block computes; give each a name of its own"


def _normed(block: Block) -> Iterator[Product | Prepared]:
    yield from block.products
    yield from (segment.prepared for segment in block.segments if segment.prepared is not None)


def _call_faults(block: Block) -> Iterator[str]:
    for name in sorted(set(block.widths) & set(block.numbers)):
        yield f"block: {name} is an extent, and a number of a function or a scale; give each a name of its own"
    for product in block.products:
        yield from _call_fault(f"block: {product.output}: activation", product.activation, ACTIVATIONS)
    for record in _normed(block):
        whose = record.output if isinstance(record, Product) else record.sum_of
        yield from _call_fault(f"block: {whose}: norm", record.norm, NORMS)
        if bool(record.norm) != bool(record.norm_weight):
            yield (
                f"block: {whose}: norm = {record.norm!r}, norm_weight = {record.norm_weight!r}; a norm needs a"
                " weight, and only a norm has one. Give both or neither"
            )


def _call_fault(where: str, text: str, known: dict[str, Any]) -> Iterator[str]:
    if not text:
        return
    call = parse_call(text)
    if call is None:
        yield f"{where} = {text!r}: needs a call such as 'situ(situ_beta, 25.0)': a name, and numbers or symbols"
    elif call.function not in known:
        yield f"{where} = {text!r}: there is no {call.function}; use one of {', '.join(known)}"
    else:
        yield from _argument_faults(where, call, known[call.function])


def _argument_faults(where: str, call: Call, function: Activation | RowNorm) -> Iterator[str]:
    names = [parameter.name for parameter in function.parameters]
    if len(call.arguments) != len(names):
        taken = f"{len(names)} numbers ({', '.join(names) or 'none'})"
        yield f"{where}: {call.function} takes {taken}; got {len(call.arguments)}"
        return
    for parameter, argument in zip(function.parameters, call.arguments, strict=True):
        if not isinstance(argument, str) and not 0 < argument < parameter.below:
            yield f"{where}: {parameter.name} = {argument!r} must lie between 0 and {parameter.below:g}"


def _segment_faults(block: Block) -> Iterator[str]:
    products = {product.output: product for product in block.products}
    for segment in block.segments:
        where = f"block: {segment.weight}"
        product = products.get(segment.operand)
        if segment.held == "whole" and segment.split != "k":
            yield f"{where}: held = 'whole' says how split = 'k' is held; with split = {segment.split!r} leave it out"
        if product is None:
            continue
        if product.rows != segment.k:
            yield f"{where}: k = {segment.k}, but its operand {segment.operand} has {product.rows} columns"
        sliced = segment.split == "k" and segment.held == "slice"
        if (product.split == "rows") != sliced:
            has = f"a rank's share of {product.rows}" if product.split == "rows" else f"all of {product.rows}"
            wants = "split = 'k', held = 'slice'" if product.split == "rows" else "held = 'whole', or another split"
            yield f"{where}: its operand {segment.operand} holds {has}; that needs {wants}"
