"""The torch operators and the module on a real device: bits, compiled graphs, captures, streams, and what they keep."""

from __future__ import annotations

import gc
import importlib.util
import shutil
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.runtime.operator_cases import checkpoint, front_case, tail_case, tiny_latent_moe, tiny_operators

from cakegen.errors import LaunchError
from cakegen.plan import plan_route
from cakegen.runtime.control import SLOT_SIZES
from cakegen.runtime.device import open_device
from cakegen.runtime.operators import Operators, PreparedCalls
from cakegen.runtime.prepared import Runner
from cakegen.runtime.projections import LatentMoeProjections
from cakegen.runtime.reference import reference_front, reference_tail
from cakegen.runtime.runner import plan_partials

TP, RANK = 2, 1
needs_inductor = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or shutil.which("gcc") is None,
    reason="torch.compile on a GPU needs triton and a C compiler",
)


@pytest.fixture
def ops(device: torch.device) -> Operators:
    """The tiny export's operators, with every decode program of TP 2 loaded."""
    tiny_latent_moe().warm_up(device, TP, partials=(1, 2))
    return tiny_operators()


@pytest.fixture
def cut(ops: Operators, device: torch.device) -> int:
    """A token count whose front keeps fp32 partials here; its programs are loaded."""
    model, facts = tiny_latent_moe().model, open_device(0).facts

    def partials(tokens: int) -> int:
        return plan_partials(plan_route(model, stage="front", tp=TP, tokens=tokens, partials=1, device=facts))

    tokens = next(tokens for tokens in range(200, model.max_tokens, 256) if partials(tokens))
    tiny_latent_moe().warm_up(device, TP, tokens=(tokens,), partials=(1, 2))
    return tokens


@pytest.fixture(params=["decode", "prefill"])
def tokens(request: pytest.FixtureRequest, cut: int) -> int:
    """A call of each kind; the second has partials."""
    return 24 if request.param == "decode" else cut


def made_layer(device: torch.device, *, overlap: bool = False) -> LatentMoeProjections:
    layer = LatentMoeProjections(tp=TP, rank=RANK, moe=tiny_latent_moe(), device=device, overlap=overlap)
    layer.load_weights(checkpoint(tiny_latent_moe().model.dims).items())
    return layer


def two_partials(logits: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
    return torch.stack((latent * 0.75, latent * 0.25))


def same_bits(values: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(value, other) for value, other in zip(values, expected, strict=True))


def test_operators_have_the_bits_of_a_runner_and_the_values_of_the_reference(ops: Operators, tokens: int) -> None:
    moe = tiny_latent_moe()
    inputs, outputs = front_case(TP, tokens, "cuda")
    values = ops.front(*inputs)
    assert same_bits(values, moe.front(*inputs, **outputs))
    ops.front_out(*inputs, **{name: output.zero_() for name, output in outputs.items()})
    assert same_bits(tuple(outputs.values()), values)
    for value, exact in zip(values, reference_front(moe.model.dims, *inputs, dtype=torch.float64), strict=True):
        torch.testing.assert_close(value.double(), exact, atol=1e-2, rtol=1e-2)
    inputs, outputs = tail_case(TP, tokens, 2, "cuda")
    values = ops.tail(*inputs, tp=TP, rank=RANK)
    assert same_bits(values, moe.tail(*inputs, **outputs, tp=TP, rank=RANK))
    y, out = reference_tail(moe.model.dims, *inputs, tp=TP, rank=RANK, dtype=torch.float64)
    assert torch.equal(values[0], y)
    torch.testing.assert_close(values[1].double(), out, atol=1e-2, rtol=1e-2)


def test_torch_accepts_the_operators_on_a_device(ops: Operators, tokens: int) -> None:
    options = {"tp": TP, "rank": RANK}
    inputs, front = front_case(TP, tokens, "cuda")
    torch.library.opcheck(ops.front, inputs)
    torch.library.opcheck(ops.front_out, inputs, front)
    inputs, tail = tail_case(TP, tokens, 2, "cuda")
    torch.library.opcheck(ops.tail, inputs, options)
    torch.library.opcheck(ops.tail_out, inputs, {**options, **tail})


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"backend": "cudagraphs"}, id="cudagraphs"),
        pytest.param({"mode": "default"}, id="inductor", marks=needs_inductor),
        pytest.param({"mode": "reduce-overhead"}, id="reduce-overhead", marks=needs_inductor),
    ],
)
def test_compiled_layers_equal_eager_ones(
    ops: Operators, device: torch.device, tokens: int, options: dict[str, str]
) -> None:
    """Two layers in one compiled graph; as CUDA-graph trees it warms up, is recorded, and then replayed."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layers = [made_layer(device) for _ in range(2)]

    def model(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = x + layer(x, two_partials)
        return x

    compiled = torch.compile(model, fullgraph=True, **options)
    with torch.inference_mode():
        for seed in range(5):
            make = torch.Generator(device).manual_seed(seed)
            x = torch.randn(tokens, 512, generator=make, device=device).bfloat16()
            torch.compiler.cudagraph_mark_step_begin()
            value = compiled(x).clone()
            assert torch.equal(value, model(x)), f"step {seed}"
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("captured", [False, True])
def test_overlapped_layers_have_the_bits_of_layers_apart(
    ops: Operators, device: torch.device, tokens: int, captured: bool
) -> None:
    """Three layers behind each other, whose launches read their weights early; weights are loaded just before."""
    apart, overlapped = ([made_layer(device, overlap=overlap) for _ in range(3)] for overlap in (False, True))
    make = torch.Generator(device).manual_seed(4)
    x = torch.randn(tokens, 512, generator=make, device=device).bfloat16()

    def run(layers: list[LatentMoeProjections]) -> torch.Tensor:
        values = x
        for layer in layers:
            values = layer(values, two_partials)
        return values

    with torch.inference_mode():
        assert torch.equal(run(overlapped), run(apart))
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                out = run(overlapped)
        for _ in range(5):
            x.copy_(torch.randn(tokens, 512, generator=make, device=device))
            if captured:
                graph.replay()
            else:
                out = run(overlapped)
            assert torch.equal(out, run(apart))


def test_captured_layer_replays_for_new_values(ops: Operators, device: torch.device, tokens: int) -> None:
    layer, make = made_layer(device), torch.Generator(device).manual_seed(3)
    x = torch.randn(tokens, 512, generator=make, device=device).bfloat16()
    with torch.inference_mode():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x, two_partials)
        for _ in range(3):
            x.copy_(torch.randn(tokens, 512, generator=make, device=device))
            graph.replay()
            assert torch.equal(out, layer(x, two_partials))


def test_one_graph_holds_more_tails_than_a_slab_has_control_words(ops: Operators, device: torch.device) -> None:
    """Each tail of a graph has words of its own; when they run out in the capture, more are allocated there."""
    count = SLOT_SIZES[0][1] + 50
    (routed, *rest), _ = tail_case(TP, 64, 1, "cuda")
    expected = ops.tail(routed, *rest, tp=TP, rank=RANK)
    # what other tests left may not be destroyed inside: that can end a capture, and so many calls collect it
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [ops.tail(routed, *rest, tp=TP, rank=RANK) for _ in range(count)]
    for values in kept:
        for value in values:
            value.zero_()
    graph.replay()
    assert all(same_bits(values, expected) for values in kept)


def test_cold_operator_in_a_capture_is_refused_with_the_line_to_add(ops: Operators) -> None:
    inputs, _ = front_case(16, 24, "cuda")
    warm = front_case(TP, 24, "cuda")[0]
    expected = ops.front(*warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(LaunchError, match=r'Add before the capture: moe\.warm_up\("cuda:0", 16, tokens=\(24,\)'):
            ops.front(*inputs)
        values = ops.front(*warm)
    graph.replay()
    assert same_bits(values, expected)
    moe = tiny_latent_moe()
    eval('moe.warm_up("cuda:0", 16, tokens=(24,), stages=("front",))', {"moe": moe})
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        ops.front(*inputs)


def test_two_streams_at_once_have_partials_of_their_own(ops: Operators, cut: int) -> None:
    inputs, _ = front_case(TP, cut, "cuda")
    expected = ops.front(*inputs)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results: list[tuple[torch.Tensor, ...]] = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(ops.front(*inputs))
    torch.cuda.synchronize()
    assert all(same_bits(values, expected) for values in results)


def test_runner_on_a_second_stream_runs_behind_the_first(ops: Operators) -> None:
    inputs, outputs = tail_case(TP, 64, 1, "cuda")
    runner = tiny_latent_moe().prepare_tail(*inputs, **outputs, tp=TP, rank=RANK)
    runner()
    streams = [torch.cuda.Stream() for _ in range(2)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in streams]
    torch.cuda.synchronize()
    for stream, end, cycles in zip(streams, ends, (20_000_000, 0), strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            runner()
            end.record()
    torch.cuda.synchronize()
    assert ends[0].elapsed_time(ends[1]) > 0


def test_operators_keep_no_memory_of_a_call(ops: Operators, tokens: int) -> None:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    inputs, expected = front_case(TP, tokens, "cuda")
    for _ in range(3):
        ops.front(*inputs)
    inputs, expected = tail_case(TP, tokens, 2, "cuda")
    ops.tail(*inputs, tp=TP, rank=RANK)
    del inputs, expected
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_steady_calls_cost_the_host_little(ops: Operators, record_property: Callable[[str, object], None]) -> None:
    """Host time, the best of many, beside that of a runner; the stream is drained before each call."""
    moe, options = tiny_latent_moe(), {"tp": TP, "rank": RANK}
    (front, outputs), (tail, results) = front_case(TP, 24, "cuda"), tail_case(TP, 24, 2, "cuda")
    calls = {
        "front_runner_us": moe.prepare_front(*front, **outputs),
        "front_us": lambda: ops.front(*front),
        "front_out_us": lambda: ops.front_out(*front, **outputs),
        "tail_runner_us": moe.prepare_tail(*tail, **results, **options),
        "tail_us": lambda: ops.tail(*tail, **options),
        "tail_out_us": lambda: ops.tail_out(*tail, **options, **results),
    }
    for name, call in calls.items():
        seconds = []
        for _ in range(200):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        record_property(name, round(min(seconds) * 1e6, 1))
        assert min(seconds) < 100e-6, name


def test_steady_calls_find_their_runner(ops: Operators, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator hands the same outputs and partials out again, so a steady call is bound once."""
    kept: list[Runner] = []
    original = PreparedCalls._keep

    def keep(calls: PreparedCalls, key: Any, runner: Any, workspace: Any) -> None:
        kept.append(runner)
        original(calls, key, runner, workspace)

    monkeypatch.setattr(PreparedCalls, "_keep", keep)
    inputs, _ = front_case(TP, cut, "cuda")
    for _ in range(10):
        ops.front(*inputs)
    assert len(kept) <= 2
