"""What of a declared block programs do not have yet. Imports the block's records; each line goes with what it names."""

from __future__ import annotations

from collections.abc import Iterator

from cakegen.block import Block, Call, Product, RowsStage, Segment, SumStage, parse_call
from cakegen.functions import ACTIVATIONS, NORMS

STAGE_NAMES = ("front", "tail")
PRODUCTS = ("fp32 without an activation", "bf16 without an activation", "bf16 behind an activation")
"""What the three classes of a front's tiles are, in their order."""
RESERVED = frozenset(
    (
        "arch",
        "backend",
        "overlap",
        "rank",
        "tp",
        "workspace",
        "counters",
        "full_items",
        "grid_x",
        "grid_y",
        "grid_z",
        "m_tiles",
        "norm_first_rows",
        "num_items",
        "num_partials",
        "num_tokens",
        "partials",
        "sk_ipc",
        "sk_max_seg",
        "sk_total",
        "up_col0",
        "wait_record",
        "weights_ahead",
    )
)
"""What calls and launches call their own options and arguments: no operand can have one of these names."""


def missing_parts(block: Block) -> tuple[str, ...]:
    """What is declared and no body of a program does, in the order of the declaration; then names that are taken."""
    return tuple(dict.fromkeys(_missing(block))) or tuple(_misnamed(block))


def _missing(block: Block) -> Iterator[str]:
    forms = [stage.form for stage in block.stages]
    if forms != ["rows", "sum"]:
        yield f"stages of the forms {', '.join(forms)}; programs are written for one rows stage, then one sum stage"
    for stage in block.rows_stages:
        for product in stage.products:
            yield from (f"{stage.name}: {product.output}: {each}" for each in _of_product(product))
        kinds = tuple(_kind(product) for product in stage.products)
        if kinds != PRODUCTS:
            yield f"{stage.name}: products that are {', '.join(kinds)}; bodies walk the tiles of {', '.join(PRODUCTS)}"
    for sum_stage in block.sum_stages:
        for segment in sum_stage.segments:
            yield from (f"{sum_stage.name}: {segment.weight}: {each}" for each in _of_segment(segment, block))
        prepared = [segment.prepared is not None for segment in sum_stage.segments]
        if prepared != [True, False]:
            said = ", ".join("prepared" if each else "as given" for each in prepared)
            yield f"{sum_stage.name}: segments whose operands are {said}; bodies add two, prepared and as given"


def _kind(product: Product) -> str:
    return f"{product.dtype} {'behind' if product.activation else 'without'} an activation"


def _misnamed(block: Block) -> Iterator[str]:
    """Names that programs, operators and the runtime can't take."""
    (rows,), (total,) = block.rows_stages, block.sum_stages
    for name, known in zip((rows.name, total.name), STAGE_NAMES, strict=True):
        if name != known:
            yield f"a stage named {name}; routes and operators call it {known}"
    for got, known in (
        *zip((rows.k, total.n), ("hidden", "hidden"), strict=True),
        *zip((product.rows for product in rows.products), ("experts", "latent", "shared_intermediate"), strict=True),
        *zip((segment.k for segment in total.segments), ("latent", "shared_intermediate"), strict=True),
    ):
        if got != known:
            yield f"an extent named {got}; plans call it {known}"
    yield from (
        f"an operand named {name}, as calls and launches call what is their own" for name in _taken(rows, total)
    )


def _taken(rows: RowsStage, total: SumStage) -> list[str]:
    names = [rows.input, total.output]
    for product in rows.products:
        names += [product.weight, product.output]
    for segment in total.segments:
        names += [segment.weight, segment.operand]
        if segment.prepared is not None:
            names += [segment.prepared.sum_of, segment.prepared.norm_weight, segment.prepared.result]
    return sorted(RESERVED & set(names))


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
    prepared = segment.prepared
    if segment.split == "rows" or (segment.split == "none" and prepared is None):
        yield f"split = {segment.split!r}{'' if segment.split == 'rows' else ' of an operand as it is given'}"
    if prepared is None:
        if segment.operand not in {product.output for product in block.products}:
            yield f"an operand, {segment.operand}, that no product of the block writes"
        if segment.held == "whole":
            yield "a weight that is held whole, of an operand as it is given"
        return
    if prepared.norm and not NORMS[_call(prepared.norm).function].in_bodies:
        yield f"the norm {_call(prepared.norm).function} behind a sum of partials"
    if prepared.norm and segment.split == "none":
        yield "split = 'none' of a normed sum: the ranks' outputs do not add up to the norm of the whole"
    if bool(prepared.norm) != prepared.output:
        yield (
            "a normed sum that is not written" if prepared.norm else "a sum of partials without a norm that is written"
        )
    if segment.held == "slice" and segment.split == "k":
        yield "a prepared sum of which a rank holds its columns of the weight alone"


def _call(text: str) -> Call:
    call = parse_call(text)
    assert call is not None  # whoever read the block has refused others
    return call
