"""Operands of a model's front and tail, for tests: real tensors on any device."""

from __future__ import annotations

from typing import Any

import torch

from cakegen.model import Model

BF16 = torch.bfloat16


def front_operands(model: Model, tp: int, tokens: int, *, seed: int = 0) -> dict[str, Any]:
    """Keyword operands of a front, random where they are read."""
    dims, make = model.dims, torch.Generator().manual_seed(seed)
    i_local = dims.i_local(tp)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make).mul_(shape[-1] ** -0.25).to(BF16)

    return {
        "x": values(tokens, dims.hidden),
        "gate_weight": values(dims.experts, dims.hidden),
        "down_weight": values(dims.latent, dims.hidden),
        "shared_gate_up_weight": values(2 * i_local, dims.hidden),
        "logits": torch.empty(tokens, dims.experts),
        "latent": torch.empty(tokens, dims.latent, dtype=BF16),
        "shared_act": torch.empty(tokens, i_local, dtype=BF16),
    }


def tail_operands(model: Model, tp: int, tokens: int, partials: int = 1, *, seed: int = 0) -> dict[str, Any]:
    """Keyword operands of a tail without `tp` and `rank`."""
    dims, make = model.dims, torch.Generator().manual_seed(seed)
    i_local = dims.i_local(tp)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make).mul_(shape[-1] ** -0.25).to(BF16)

    return {
        "routed": values(partials, tokens, dims.latent),
        "norm_weight": values(dims.latent),
        "up_weight": values(dims.hidden, dims.latent),
        "shared_act": values(tokens, i_local),
        "shared_down_weight": values(dims.hidden, i_local),
        "out": torch.empty(tokens, dims.hidden, dtype=BF16),
        "y_workspace": torch.empty(tokens, dims.latent, dtype=BF16),
    }
