"""The elementwise parts of a stock chain, fused by torch.compile or eager. Imports torch, errors and model.

Each writes into a tensor of the caller: a chain allocates nothing, and a compiled kernel stores straight there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from cakegen.errors import BenchError
from cakegen.model import ModelDims
from cakegen.runtime.activations import activate

BF16 = torch.bfloat16
Function = Callable[..., None]


@dataclass(frozen=True)
class Pointwise:
    """The activation and the norm of a stock chain.

    Parameters
    ----------
    how
        `compiled` or `eager`.
    activate
        (gate_up `[T, 2 * I_LOCAL]`, shared_act) -> writes shared_act.
    activate_cast
        (products `[T, latent + 2 * I_LOCAL]` fp32, latent, shared_act) -> writes both.
    norm
        (routed `[P, T, latent]`, norm_weight, y) -> writes all of y.
    norm_slice
        (routed, norm_weight, columns of y) -> writes only this rank's columns; those of `Pointwise`'s slice.
    norm_join
        (routed, norm_weight, shared_act, tokens `[T, latent / TP + I_LOCAL]`) -> writes this rank's columns, and behind
        them shared_act.
    """

    how: str
    activate: Function
    activate_cast: Function
    norm: Function
    norm_slice: Function
    norm_join: Function


def make_pointwise(dims: ModelDims, columns: slice, *, compiled: bool) -> Pointwise:
    """The functions for one rank's columns of `y`.

    Compiled functions take any T from 2 on, and are compiled again for T = 1; nothing is compiled before they are
    called. Kernels that earlier calls compiled are dropped, since torch.compile keeps at most 8 for one function and
    would refuse the next.

    Raises
    ------
    BenchError
        The block has no norm, or its shared expert no gate.
    """
    eps = dims.norm_eps
    if eps is None or not dims.rows_stage.gated:
        raise BenchError("stock chains are written for a norm behind the experts and a gated shared expert alone")
    if compiled:
        torch._dynamo.reset()
        # a handful of kernels: no pool of compiler processes beside a measurement
        import_module("torch._inductor.config").compile_threads = 1  # type: ignore[attr-defined]

    def finish(function: Function) -> Function:
        return _compiled(function) if compiled else function

    def activate_into(gate_up: torch.Tensor, shared_act: torch.Tensor) -> None:
        gate, up = gate_up.float().chunk(2, dim=1)
        shared_act.copy_(activate(dims.activation, gate, up))

    def activate_cast_into(products: torch.Tensor, latent: torch.Tensor, shared_act: torch.Tensor) -> None:
        latent.copy_(products[:, : dims.latent])
        gate, up = products[:, dims.latent :].chunk(2, dim=1)
        shared_act.copy_(activate(dims.activation, gate, up))

    def norm_into(routed: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
        y.copy_(_norm(routed, weight, eps))

    def norm_slice_into(routed: torch.Tensor, weight: torch.Tensor, part: torch.Tensor) -> None:
        part.copy_(_norm(routed, weight, eps)[:, columns])

    def norm_join_into(
        routed: torch.Tensor, weight: torch.Tensor, shared_act: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        norm = _norm(routed, weight, eps)[:, columns]
        tokens.copy_(torch.cat((norm, shared_act), dim=1))

    parts = (activate_into, activate_cast_into, norm_into, norm_slice_into, norm_join_into)
    return Pointwise("compiled" if compiled else "eager", *(finish(function) for function in parts))


def _norm(routed: torch.Tensor, weight: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """RMSNorm as one writes it in torch: its own order of summation."""
    total = routed.float().sum(0).to(BF16).float()
    rstd = torch.rsqrt(total.square().mean(1, keepdim=True) + norm_eps)
    return weight * (total * rstd).to(BF16)


def _compiled(function: Function) -> Function:
    """torch.compile with the token dimension dynamic and all others fixed: one kernel for many T, aligned accesses."""
    fused = torch.compile(function, fullgraph=True)
    mark: Any = torch._dynamo.maybe_mark_dynamic

    def call(*tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if tensor.dim() > 1:
                mark(tensor, tensor.dim() - 2)
        fused(*tensors)

    return call
