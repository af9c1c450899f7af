"""A caller of the published functions, with one import line changed: TP 1 and 8, T to 16384, graphs, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.compat.flashinfer_caller import Layer, call_block, refusals

from cakegen.compat import flashinfer

TOKENS = (1, 8, 16, 127, 128, 129, 256, 300, 511, 4096, 16384)


@pytest.fixture(scope="module", params=[1, 8])
def layer(request: pytest.FixtureRequest) -> Layer:
    return Layer(torch.device("cuda", 0), request.param, request.param - 1)


def replay(call: Callable[[], object]) -> None:
    """Capture a call into a graph, and replay it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("tokens", TOKENS)
def test_caller_of_the_published_functions_is_served(layer: Layer, tokens: int) -> None:
    for stage in ("front", "tail"):
        assert flashinfer.generated_program_available(layer.device, stage, layer.tp, tokens)
    front, tail = call_block(flashinfer, layer, tokens, replay)
    for runner in (front, tail):
        assert isinstance(runner, flashinfer.KimiK3LatentMoeRunner)
        assert runner.arch == "sm_90a" or runner.route == ("decode" if tokens <= 128 else "prefill")
        assert runner.launch_count == len(runner.kernel_keys) == len(runner.module_names)


def test_every_required_request_has_its_programs(layer: Layer) -> None:
    assert flashinfer.generated_program_available(layer.device)


@pytest.mark.parametrize("number", range(15))
def test_refusals_are_the_published_ones(layer: Layer, number: int) -> None:
    error, call = refusals(flashinfer, layer)[number]
    with pytest.raises(error):
        call()
