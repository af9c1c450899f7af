"""The front and the tail in plain torch, on any device: what every program is compared with. Imports torch and model.

`reference_norm` defines the bits of `y`. The matrix products come in fp32 (rounded as the contract says) and in fp64
(not rounded, to compare with a tolerance).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cakegen.errors import LaunchError
from cakegen.model import ModelDims
from cakegen.operands import RowsStage, Segment, returned
from cakegen.runtime.activations import activate
from cakegen.runtime.packing import unpack_weight

LANES = 32
VECTOR = 8


def reference_norm(routed: torch.Tensor, norm_weight: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """KimiRMSNorm of the sum of the partials, with the bits that every program must produce.

    Parameters
    ----------
    routed
        `[P, T, latent]` bf16 partials.
    norm_weight
        `[latent]` bf16.
    norm_eps
        Added to the mean of squares, in fp32.

    Returns
    -------
    torch.Tensor
        `y [T, latent]` bf16.

    Raises
    ------
    LaunchError
        The width is no multiple of 8.

    Notes
    -----
    The partials are added as `sum_partials` does. A row is read as vectors of 8 elements;
    lane l of 32 owns vectors l, l + 32, … and adds its squares in ascending order (the product of two bf16 is exact
    in fp32, so a fused multiply-add gives the same bits); an xor butterfly over 16, 8, 4, 2, 1 joins the lanes. Where
    the vectors are not a multiple of 32, the last lanes own one fewer. Division and square root are those of IEEE.
    """
    _, tokens, latent = routed.shape
    if latent % VECTOR:
        raise LaunchError(f"reference_norm: the latent width must be a multiple of {VECTOR} (vectors); got {latent}.")
    rounded = sum_partials(routed)
    squares = _sum_of_squares(rounded.float().view(tokens, latent // VECTOR, VECTOR))
    # tensor by tensor: torch turns a division by a number into a product with its reciprocal
    mean = squares / torch.full_like(squares, latent)
    rstd = torch.ones_like(mean) / ieee_sqrt(mean + norm_eps)
    scaled = (rounded.float() * rstd[:, None]).to(torch.bfloat16)
    return (norm_weight.float() * scaled.float()).to(torch.bfloat16)


def sum_partials(partials: torch.Tensor) -> torch.Tensor:
    """`[P, T, N]` bf16 -> `[T, N]` bf16: added in fp32 in ascending order, rounded once."""
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial.float()
    return total.to(torch.bfloat16)


def ieee_sqrt(values: torch.Tensor) -> torch.Tensor:
    """Square roots of fp32 values, rounded to nearest.

    `torch.sqrt` of fp32 is not, on a CPU: with torch 2.13 and AVX-512 a fifth of all roots were an ulp off (measured).
    A root in fp64 rounds to the right one: none lies within 2^-49, relative, of the middle between two fp32 numbers.
    """
    return torch.sqrt(values.double()).float()


def _sum_of_squares(vectors: torch.Tensor) -> torch.Tensor:
    """`[T, vectors, 8]` fp32 -> `[T]`, in the order of `reference_norm`."""
    tokens, count, _ = vectors.shape
    lane_sums = vectors.new_zeros(tokens, LANES)
    for first in range(0, count, LANES):
        owned = vectors[:, first : first + LANES]
        lanes = owned.shape[1]
        for element in range(VECTOR):
            value = owned[:, :, element]
            lane_sums[:, :lanes] = lane_sums[:, :lanes] + value * value
    lane = torch.arange(LANES, device=vectors.device)
    for offset in (16, 8, 4, 2, 1):
        lane_sums = lane_sums + lane_sums[:, lane ^ offset]
    return lane_sums[:, 0]


def reference_outputs(
    stage: str,
    dims: ModelDims,
    operands: Mapping[str, torch.Tensor],
    *,
    tp: int,
    rank: int,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """What one rank of a stage gives, by result, from operands by name; `dtype` as in `reference_front`."""
    table = dims.stages[stage]
    inputs = [operands[spec.name] for spec in table.inputs]
    if isinstance(table, RowsStage):
        return returned(table.outputs, reference_front(dims, *inputs, dtype=dtype))
    return returned(table.outputs, reference_tail(dims, *inputs, tp=tp, rank=rank, dtype=dtype))


def reference_front(
    dims: ModelDims, x: torch.Tensor, *weights: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    """The products of a rows stage, `[T, rows]` each, of `x [T, hidden]` and its weights in the stage's order.

    With `dtype=torch.float32` they have the dtypes of the contract (logits fp32, all others bf16), each rounded once
    from fp32, and where its activation says so; with `torch.float64` all are fp64 and nothing is rounded.
    """
    wide = x.to(dtype)
    outputs = []
    for product, weight in zip(dims.rows_stage.products, weights, strict=True):
        value = wide @ unpack_weight(weight).to(dtype).T
        if product.activated:
            value = activate(dims.activation, *(value.chunk(2, dim=1) if product.gated else (value,)))
        rounds = dtype != torch.float64 and not product.output.fp32
        outputs.append(value.to(torch.bfloat16) if rounds else value)
    return tuple(outputs)


def reference_tail(
    dims: ModelDims, *inputs: torch.Tensor, tp: int, rank: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    """The outputs of one rank's sum stage, from its inputs in the stage's order.

    Prepared tokens `[T, latent]` that it writes are bf16 with their defined bits; `out [T, hidden]` is bf16, or fp64
    unrounded.
    """
    stage = dims.sum_stage
    given = dict(zip((spec.name for spec in stage.inputs), inputs, strict=True))
    written, total = [], None
    for segment in stage.segments:
        tokens, weight = _tokens(dims, segment, given), unpack_weight(given[segment.weight.name])
        if segment.prepared is not None and segment.prepared.written:
            written.append(tokens)
        if segment.shares_k:
            begin, width = dims.latent_begin(tp, rank), dims.latent_slice(tp)
            tokens, weight = tokens[:, begin : begin + width], weight[:, begin : begin + width]
        product = tokens.to(dtype) @ weight.to(dtype).T
        total = product if total is None else total + product
    assert total is not None  # a sum has segments
    return (*written, total if dtype == torch.float64 else total.to(torch.bfloat16))


def _tokens(dims: ModelDims, segment: Segment, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    prepared = segment.prepared
    if prepared is None:
        return given[segment.tokens.name]
    partials = given[prepared.partials.name]
    if prepared.weight is None:
        return sum_partials(partials)
    assert dims.norm_eps is not None  # whoever has a norm's weight has its constant
    return reference_norm(partials, given[prepared.weight.name], dims.norm_eps)
