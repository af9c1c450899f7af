"""Decode launches that overlap the one before, and packed weights: the bits of ordinary calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.gpu.cases import Checks, FrontCase, TailCase, Weights

from cakegen.runtime import LatentMoe, pack_weight
from cakegen.runtime.prepared import Runner
from cakegen.runtime.runner import ProgramRunner

Record = Callable[[str, object], None]
LAYERS = 6


@pytest.mark.parametrize("tp", [1, 8])
def test_packed_weights_give_the_same_bits(moe: LatentMoe, weights: Weights, tp: int, record_property: Record) -> None:
    checks = Checks()
    front, tail = FrontCase(moe, weights, tp), TailCase(moe, weights, tp, tp - 1, 1)
    packed_front = [pack_weight(weight) for weight in front.weights]
    up, shared_down = pack_weight(tail.up), pack_weight(tail.shared_down)
    for tokens in (1, 4, 9, 33, 64, 128, 192):
        plain = [value.clone() for value in (*front.prepare(tokens)(), *tail.prepare(tokens)())]
        front.poison()
        tail.poison()
        views = [output.view(tokens) for output in front.outputs]
        values = list(moe.prepare_front(front.x[:tokens], *packed_front, *views)())
        y, out = (output.view(tokens) for output in tail.outputs)
        runner = moe.prepare_tail(
            tail.routed[:, :tokens], tail.norm, up, tail.shared_act[:tokens], shared_down, out,
            tp=tp, rank=tp - 1, y_workspace=y,
        )  # fmt: skip
        for index, (value, expected) in enumerate(zip([*values, *runner()], plain, strict=True)):
            checks.equal(f"TP {tp} T {tokens} output {index}", value, expected)
    record_property("cases", checks.settle())


class Chain:
    """Layers in which a front's latent is its tail's routed, and a tail's out the next front's x."""

    def __init__(self, moe: LatentMoe, case: tuple[FrontCase, TailCase], tokens: int, **options: Any) -> None:
        front, tail = case
        dims, x = moe.model.dims, front.x[:tokens]
        self.outputs: list[torch.Tensor] = []
        self.runners: list[Runner] = []
        for _ in range(LAYERS):
            logits = self._empty(x, dims.experts, torch.float32)
            latent, shared_act = self._empty(x, dims.latent), self._empty(x, dims.i_local(front.tp))
            self.runners.append(moe.prepare_front(x, *front.weights, logits, latent, shared_act, **options))
            y, out = self._empty(x, dims.latent), self._empty(x, dims.hidden)
            self.runners.append(
                moe.prepare_tail(
                    latent.unsqueeze(0),
                    tail.norm,
                    tail.up,
                    shared_act,
                    tail.shared_down,
                    out,
                    tp=tail.tp,
                    rank=tail.rank,
                    y_workspace=y,
                    **options,
                )
            )
            x = out

    def _empty(self, x: torch.Tensor, cols: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        self.outputs.append(torch.empty(x.shape[0], cols, dtype=dtype, device=x.device))
        return self.outputs[-1]

    def poison(self) -> None:
        """NaN in all outputs, in stream order."""
        for output in self.outputs:
            output.fill_(float("nan"))

    def __call__(self) -> None:
        """Launch all layers."""
        for runner in self.runners:
            runner()


@pytest.mark.parametrize("tp", [1, 8])
def test_overlapped_chain_has_the_bits_of_launches_apart(
    moe: LatentMoe, weights: Weights, tp: int, record_property: Record
) -> None:
    checks = Checks()
    case = FrontCase(moe, weights, tp), TailCase(moe, weights, tp, 0, 1)
    for tokens in (1, 4, 8, 16, 64, 128, 160):
        apart, overlapped = Chain(moe, case, tokens), Chain(moe, case, tokens, overlap=True)
        first = overlapped.runners[0]
        assert isinstance(first, ProgramRunner)
        assert first.launches[0].record.programmatic
        apart()
        graph = torch.cuda.CUDAGraph()
        overlapped()
        with torch.cuda.graph(graph):
            overlapped()
        for repeat in range(8):
            overlapped.poison()
            (graph.replay if repeat % 2 else overlapped)()
            for index, (value, expected) in enumerate(zip(overlapped.outputs, apart.outputs, strict=True)):
                checks.equal(f"TP {tp} T {tokens} repeat {repeat} output {index}", value, expected)
    record_property("cases", checks.settle())
