"""What of a declared block programs do not have yet. Imports the block's records; each line goes with what it names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from cakegen.block import Block, Call, Product, Segment, parse_call
from cakegen.functions import ACTIVATIONS, NORMS
from cakegen.spec.block import block_file, read_block

BUILT_IN = "latent_moe"
"""The block whose names of stages, operands and numbers programs, operators and the runtime know."""


def missing_parts(block: Block) -> tuple[str, ...]:
    """What is declared and no body of a program does, in the order of the declaration.

    A block that asks for nothing else must also have the names and the order of the one that is built in.
    """
    return tuple(dict.fromkeys(_missing(block))) or tuple(_other_names(block, read_block(block_file(BUILT_IN)), ""))


def _other_names(got: Any, known: Any, where: str) -> Iterator[str]:
    """Where two records differ, of which the second is built in; functions may be any that bodies have."""
    if type(got) is type(known) and isinstance(got, tuple) and len(got) == len(known):
        for index, (mine, other) in enumerate(zip(got, known, strict=True)):
            yield from _other_names(mine, other, f"{where}.{index}")
    elif type(got) is type(known) and dataclasses.is_dataclass(got):
        for field in (field for field in dataclasses.fields(got) if field.name not in ("activation", "norm")):
            mine, other = getattr(got, field.name), getattr(known, field.name)
            yield from _other_names(mine, other, f"{where}.{field.name}" if where else field.name)
    elif got != known:
        yield f"{where} = {got!r}; {known!r} is built in (block {BUILT_IN})"


def _missing(block: Block) -> Iterator[str]:
    forms = [stage.form for stage in block.stages]
    if forms != ["rows", "sum"]:
        yield f"stages of the forms {', '.join(forms)}; programs are written for one rows stage, then one sum stage"
    for stage in block.rows_stages:
        if len(stage.products) != 3:
            yield (f"{stage.name}: {len(stage.products)} products; bodies walk the tiles of three (fp32, plain, gated)")
        for product in stage.products:
            yield from (f"{stage.name}: {product.output}: {each}" for each in _of_product(product))
    for sum_stage in block.sum_stages:
        if len(sum_stage.segments) != 2:
            yield f"{sum_stage.name}: segments: {len(sum_stage.segments)}; bodies add two (a normed sum, an activation)"
        for segment in sum_stage.segments:
            yield from (f"{sum_stage.name}: {segment.weight}: {each}" for each in _of_segment(segment, block))


def _of_product(product: Product) -> Iterator[str]:
    if product.weight_dtype == "fp32":
        yield "a weight in fp32 (its two bf16 parts, in one accumulation)"
    if product.scale:
        yield f"a scale, {product.scale}"
    if product.activation:
        call = _call(product.activation)
        if not ACTIVATIONS[call.function].functor:
            gated = "gated" if product.gated else "not gated"
            yield f"the activation {call.function} ({gated})"
        if product.dtype == "fp32":
            yield "an activation that is stored in fp32"
    if product.norm:
        yield f"a norm behind a product, {_call(product.norm).function} (it needs the whole row)"
    if (product.split == "rows") != bool(product.activation):
        yield f"split = {product.split!r} of a product {'with' if product.activation else 'without'} an activation"


def _of_segment(segment: Segment, block: Block) -> Iterator[str]:
    if segment.split != "k":
        yield f"split = {segment.split!r}"
    prepared = segment.prepared
    if prepared is None:
        if segment.operand not in {product.output for product in block.products}:
            yield f"an operand, {segment.operand}, that no product of the block writes"
    elif not prepared.norm:
        yield "a sum of partials without a norm"
    elif not NORMS[_call(prepared.norm).function].in_bodies:
        yield f"the norm {_call(prepared.norm).function} behind a sum of partials"
    elif not prepared.output:
        yield "a normed sum that is not written"
    elif segment.held == "slice" and segment.split == "k":
        yield "a normed sum of which a rank holds its columns of the weight alone"


def _call(text: str) -> Call:
    call = parse_call(text)
    assert call is not None  # whoever read the block has refused others
    return call
