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


def _relu2(up: torch.Tensor) -> torch.Tensor:
    return torch.square(torch.relu(rounded(up)))


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "situ": _situ,
    "swiglu": _swiglu,
    "geglu_tanh": _geglu_tanh,
    "relu2": _relu2,
}


def rounded(values: torch.Tensor) -> torch.Tensor:
    """fp32 values rounded to bf16, where a function says so before its end; fp64 is left as it is."""
    return values if values.dtype == torch.float64 else values.to(torch.bfloat16).to(values.dtype)


def activate(activation: NamedFunction, *operands: torch.Tensor) -> torch.Tensor:
    """An activation of tensors of one shape and dtype, gate and up or up alone.

    Rounded between its steps where its declaration says so, and at the end by whoever stores it.
    """
    return FUNCTIONS[activation.name](*operands, *activation.numbers)
