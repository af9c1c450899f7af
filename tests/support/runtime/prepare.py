"""Calls of a model on the fake machine's devices, prepared."""

from __future__ import annotations

from typing import Any

from support.runtime.fakes import FakeTensor
from support.runtime.operands import front_operands, tail_operands

from cakegen.runtime import LatentMoe


def on_gpu(operands: dict[str, Any], ordinal: int = 0) -> dict[str, Any]:
    """Operands that say they are on a device."""
    return {name: FakeTensor(tensor, ordinal) for name, tensor in operands.items()}


def prepare_front(moe: LatentMoe, tp: int = 2, tokens: int = 5, ordinal: int = 0) -> Any:
    return moe.prepare_front(**on_gpu(front_operands(moe.model, tp, tokens), ordinal))


def prepare_tail(moe: LatentMoe, tp: int = 2, tokens: int = 64, partials: int = 1, rank: int = 0) -> Any:
    return moe.prepare_tail(**on_gpu(tail_operands(moe.model, tp, tokens, partials)), tp=tp, rank=rank)
