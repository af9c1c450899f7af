"""The front and the tail in plain torch, on any device: what every program is compared with. Imports torch and model.

`reference_norm` defines the bits of `y`. The matrix products come in fp32 (rounded as the contract says) and in fp64
(not rounded, to compare with a tolerance).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from cakegen.errors import LaunchError
from cakegen.model import ModelDims
from cakegen.operands import STAGES, returned
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
    The partials are added in fp32 in ascending order and rounded once to bf16. A row is read as vectors of 8 elements;
    lane l of 32 owns vectors l, l + 32, … and adds its squares in ascending order (the product of two bf16 is exact
    in fp32, so a fused multiply-add gives the same bits); an xor butterfly over 16, 8, 4, 2, 1 joins the lanes. Where
    the vectors are not a multiple of 32, the last lanes own one fewer. Division and square root are those of IEEE.
    """
    partials, tokens, latent = routed.shape
    if latent % VECTOR:
        raise LaunchError(f"reference_norm: the latent width must be a multiple of {VECTOR} (vectors); got {latent}.")
    total = routed[0].float()
    for index in range(1, partials):
        total = total + routed[index].float()
    rounded = total.to(torch.bfloat16)
    squares = _sum_of_squares(rounded.float().view(tokens, latent // VECTOR, VECTOR))
    # tensor by tensor: torch turns a division by a number into a product with its reciprocal
    mean = squares / torch.full_like(squares, latent)
    rstd = torch.ones_like(mean) / ieee_sqrt(mean + norm_eps)
    scaled = (rounded.float() * rstd[:, None]).to(torch.bfloat16)
    return (norm_weight.float() * scaled.float()).to(torch.bfloat16)


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
    inputs = [operands[spec.name] for spec in STAGES[stage].inputs]
    of_rank = {} if stage == "front" else {"tp": tp, "rank": rank}
    compute: Callable[..., tuple[torch.Tensor, ...]] = reference_front if stage == "front" else reference_tail
    results = compute(dims, *inputs, **of_rank, dtype=dtype)
    return returned(STAGES[stage].outputs, results)


def reference_front(
    dims: ModelDims,
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    down_weight: torch.Tensor,
    shared_gate_up_weight: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(logits, latent, shared_act)` of `x [T, hidden]`.

    With `dtype=torch.float32` they have the dtypes of the contract (fp32, bf16, bf16), each rounded once from fp32;
    with `torch.float64` all are fp64 and nothing is rounded.
    """
    gate_weight, down_weight = unpack_weight(gate_weight), unpack_weight(down_weight)
    shared_gate_up_weight = unpack_weight(shared_gate_up_weight)
    wide = x.to(dtype)
    logits = wide @ gate_weight.to(dtype).T
    latent = wide @ down_weight.to(dtype).T
    gate, up = (wide @ shared_gate_up_weight.to(dtype).T).chunk(2, dim=1)
    shared_act = activate(dims.activation, gate, up)
    if dtype == torch.float64:
        return logits, latent, shared_act
    return logits, latent.to(torch.bfloat16), shared_act.to(torch.bfloat16)


def reference_tail(
    dims: ModelDims,
    routed: torch.Tensor,
    norm_weight: torch.Tensor,
    up_weight: torch.Tensor,
    shared_act: torch.Tensor,
    shared_down_weight: torch.Tensor,
    *,
    tp: int,
    rank: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(y, out)` of one rank: `y [T, latent]` bf16 with its defined bits; `out [T, hidden]` bf16, or fp64 unrounded."""
    up_weight, shared_down_weight = unpack_weight(up_weight), unpack_weight(shared_down_weight)
    y = reference_norm(routed, norm_weight, dims.norm_eps)
    width = dims.latent_slice(tp)
    columns = slice(rank * width, (rank + 1) * width)
    out = y[:, columns].to(dtype) @ up_weight[:, columns].to(dtype).T
    out = out + shared_act.to(dtype) @ shared_down_weight.to(dtype).T
    return y, out if dtype == torch.float64 else out.to(torch.bfloat16)
