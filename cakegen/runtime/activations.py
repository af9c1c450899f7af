"""Activations of `cakegen.functions` in torch, in the precision of their operands. Imports torch and model."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from cakegen.model import NamedFunction


def _situ(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    bounded_gate = beta * torch.tanh(gate / beta)
    return bounded_gate * torch.sigmoid(gate) * (linear_beta * torch.tanh(up / linear_beta))


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate * torch.sigmoid(gate) * up


def _geglu_tanh(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return 0.5 * gate * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3))) * up


GATED: dict[str, Callable[..., torch.Tensor]] = {"situ": _situ, "swiglu": _swiglu, "geglu_tanh": _geglu_tanh}


def activate(activation: NamedFunction, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """A gated activation of two tensors of one shape and dtype, not rounded between its steps beyond that dtype."""
    return GATED[activation.name](gate, up, *activation.numbers)
