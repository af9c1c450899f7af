"""The tiny export's operators for tests, on any device: torch knows an operator once a process, so they are shared."""

from __future__ import annotations

from typing import Any

import torch
from support.models import tiny_model
from support.runtime.operands import front_operands, tail_operands

from cakegen.model import ModelDims
from cakegen.runtime import LatentMoe, shared_latent_moe
from cakegen.runtime.operators import Operators, define_operators

FRONT_OUTPUTS = ("logits", "latent", "shared_act")
TAIL_OUTPUTS = ("y_workspace", "out")


def tiny_latent_moe() -> LatentMoe:
    """The committed tiny export."""
    return shared_latent_moe("tiny_latent_moe")


def tiny_operators() -> Operators:
    """Its operators."""
    return define_operators(tiny_latent_moe())


Case = tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]


def front_case(tp: int = 2, tokens: int = 5, device: str = "cpu") -> Case:
    """Inputs in order, and outputs by name."""
    return _split(front_operands(tiny_model(), tp, tokens), FRONT_OUTPUTS, device)


def tail_case(tp: int = 2, tokens: int = 5, partials: int = 2, device: str = "cpu") -> Case:
    """Inputs in order, and outputs by name."""
    return _split(tail_operands(tiny_model(), tp, tokens, partials), TAIL_OUTPUTS, device)


def _split(operands: dict[str, Any], outputs: tuple[str, ...], device: str) -> Case:
    placed = {name: tensor.to(device) for name, tensor in operands.items()}
    return tuple(placed[name] for name in placed if name not in outputs), {name: placed[name] for name in outputs}


def checkpoint(dims: ModelDims, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Whole tensors of one layer by their checkpoint names, scaled so that products are of order 1."""
    make = torch.Generator().manual_seed(seed)

    def weight(rows: int, cols: int) -> torch.Tensor:
        return torch.randn(rows, cols, generator=make).mul_(cols**-0.5).bfloat16()

    return {
        "gate.weight": weight(dims.experts, dims.hidden),
        "routed_expert_down_proj.weight": weight(dims.latent, dims.hidden),
        "routed_expert_norm.weight": 1 + torch.randn(dims.latent, generator=make).mul_(0.1).bfloat16(),
        "routed_expert_up_proj.weight": weight(dims.hidden, dims.latent),
        "shared_experts.gate_proj.weight": weight(dims.shared_intermediate, dims.hidden),
        "shared_experts.up_proj.weight": weight(dims.shared_intermediate, dims.hidden),
        "shared_experts.down_proj.weight": weight(dims.hidden, dims.shared_intermediate),
    }
