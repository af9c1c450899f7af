"""The runtime on a real device: streams, threads, captures, and the report of a stuck wait."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.gpu.cases import Case, Checks, FrontCase, TailCase, Weights, make_weights, spans
from support.gpu.checks import capture_beside
from support.runtime.operands import front_operands

from cakegen.errors import LaunchError
from cakegen.runtime import LatentMoe, generated_program_available, kimi_k3_latent_moe
from cakegen.runtime.control import SLOT_SIZES
from cakegen.runtime.device import open_device
from cakegen.runtime.prepared import Runner
from cakegen.runtime.runner import ProgramRunner

ROOT = Path(__file__).resolve().parents[2]
Record = Callable[[str, object], None]


@pytest.fixture
def tiny(warm: dict[str, LatentMoe]) -> LatentMoe:
    """The tiny model."""
    return warm["tiny"]


@pytest.fixture
def tiny_weights(tiny: LatentMoe, device: torch.device) -> Weights:
    """Its weights."""
    return make_weights(tiny.model, device, 5)


def test_device_facts_are_the_drivers(warm: dict[str, LatentMoe], record_property: Record) -> None:
    opened = open_device(0)
    properties = torch.cuda.get_device_properties(0)
    assert opened.sm_count == properties.multi_processor_count
    assert opened.max_dynamic_smem_bytes == properties.shared_memory_per_block_optin
    assert 0 < opened.resident_pairs <= opened.sm_count // 2
    record_property("resident_pairs", opened.resident_pairs)


def test_published_export_serves_every_decode_request(warm: dict[str, LatentMoe]) -> None:
    for tp in (1, 2, 4, 8, 16):
        for tokens in range(1, 193):
            assert generated_program_available("cuda", "front", tp, tokens)
            assert all(generated_program_available("cuda", "tail", tp, tokens, partials) for partials in (1, 2, 3))
    assert not generated_program_available("cuda", "front", 3, 1)


def test_warm_prepare_and_call_are_cheap(
    warm: dict[str, LatentMoe], device: torch.device, record_property: Record
) -> None:
    """Host time, best of many: a busy host does not decide. Operands as large as the product's."""
    moe = warm["kimi"]
    weights = make_weights(moe.model, device, 1)
    cases: list[Case] = [FrontCase(moe, weights, 8), TailCase(moe, weights, 8, 3, 1)]
    for stage, case in zip(("front", "tail"), cases, strict=True):
        prepared, called = [], []
        for _ in range(50):
            case.prepare(8)
            torch.cuda.synchronize()
            operands = prepare_again(case)
            start = time.perf_counter()
            runner = operands()
            middle = time.perf_counter()
            runner()
            called.append(time.perf_counter() - middle)
            prepared.append(middle - start)
        record_property(f"{stage}_prepare_us", round(min(prepared) * 1e6, 1))
        record_property(f"{stage}_call_us", round(min(called) * 1e6, 1))
        assert min(prepared) < 0.5e-3


def prepare_again(case: Case, tokens: int = 8) -> Callable[[], Runner]:
    """A preparation without the poisoning around it, its views already made."""
    if isinstance(case, FrontCase):
        views = [output.view(tokens) for output in case.outputs]
        x = case.x[:tokens]
        return lambda: case.moe.prepare_front(x, *case.weights, *views)
    y, out = (output.view(tokens) for output in case.outputs)
    operands = (case.routed[:, :tokens], case.norm, case.up, case.shared_act[:tokens], case.shared_down, out)
    return lambda: case.moe.prepare_tail(*operands, tp=case.tp, rank=case.rank, y_workspace=y)


@pytest.mark.parametrize("stage", ["front", "tail"])
def test_two_runners_on_two_streams_overlap_and_agree(
    tiny: LatentMoe, tiny_weights: Weights, stage: str, record_property: Record
) -> None:
    """The tiny model's grids fill a part of the device, so the launches of two streams can run side by side.

    That they did is read from events: both streams' launches are queued behind one kernel of about 10 ms, and their
    intervals overlap. How much time that saved against one stream after the other is left in the summary.
    """
    launches, tokens = 200, 64
    cases: list[Case] = [
        FrontCase(tiny, tiny_weights, 4) if stage == "front" else TailCase(tiny, tiny_weights, 4, 0, 2)
        for _ in range(2)
    ]
    runners = [case.prepare(tokens) for case in cases]
    expected = [value.clone() for value in runners[0]()]
    for case in cases:
        case.poison()
    streams = [torch.cuda.Stream() for _ in runners]
    alone = [spans([runner], [stream], launches)[0] for runner, stream in zip(runners, streams, strict=True)]
    (begin_0, end_0), (begin_1, end_1) = spans(runners, streams, launches)
    assert max(begin_0, begin_1) < min(end_0, end_1), "the two streams' launches did not overlap"
    together = max(end_0, end_1) - min(begin_0, begin_1)
    record_property("together_over_alone", round(together / sum(end - begin for begin, end in alone), 3))
    checks = Checks()
    for case, runner in zip(cases, runners, strict=True):
        for name, value, other in zip(case.names, runner.outputs, expected, strict=True):
            checks.equal(f"{stage} {name}", value, other)
        for output in case.outputs:
            checks.zero(f"{stage} guards", output.faults(tokens))
    record_property("cases", checks.settle())


def test_fresh_threads_prepare_and_run(tiny: LatentMoe, tiny_weights: Weights, record_property: Record) -> None:
    """Threads that never touched CUDA, a cold table of programs between them, each with its own outputs."""
    cold = LatentMoe(tiny.registry)
    reference = FrontCase(tiny, tiny_weights, 2)
    expected = [value.clone() for value in reference.prepare(33)()]
    torch.cuda.synchronize()
    outcomes: list[Checks] = []
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            case = FrontCase(cold, tiny_weights, 2)
            runner = case.prepare(33)
            # the operands were made on this thread's default stream, as the launches are
            for _ in range(20):
                runner()
            torch.cuda.synchronize()
            checks = Checks()
            for name, value, other in zip(case.names, runner.outputs, expected, strict=True):
                checks.equal(f"thread {index} {name}", value, other)
            outcomes.append(checks)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures, failures
    record_property("cases", sum(checks.settle() for checks in outcomes))


def test_no_tokens_launch_nothing_even_in_a_capture(tiny: LatentMoe, tiny_weights: Weights) -> None:
    front, tail = FrontCase(tiny, tiny_weights, 2), TailCase(tiny, tiny_weights, 2, 1, 1)
    assert front.prepare(0)()[0].shape == (0, tiny.model.dims.experts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        front.prepare(8)  # poisons in the capture; something to replay
        empty = front.prepare(0)()
        tail.prepare(0)()
    graph.replay()
    assert empty[1].shape == (0, tiny.model.dims.latent)
    checks = Checks()
    for output in (*front.outputs, *tail.outputs):
        checks.zero("guards", output.faults(0))
    checks.settle()


def test_cold_prepare_in_a_capture_is_refused_and_leaves_the_capture_usable(
    tiny: LatentMoe, tiny_weights: Weights
) -> None:
    case = FrontCase(tiny, tiny_weights, 2)
    runner = case.prepare(17)
    expected = [value.clone() for value in runner()]
    cold = LatentMoe(tiny.registry)
    x, views = tiny_weights.x[:17], [output.view(17) for output in case.outputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(LaunchError, match="being captured"):
            cold.prepare_front(x, *case.weights, *views)
        runner()
    case.poison()
    graph.replay()
    checks = Checks()
    for name, value, other in zip(case.names, runner.outputs, expected, strict=True):
        checks.equal(name, value, other)
    checks.settle()


def test_warm_prepare_works_inside_a_capture(tiny: LatentMoe, tiny_weights: Weights) -> None:
    case = TailCase(tiny, tiny_weights, 4, 1, 2)
    expected = [value.clone() for value in case.prepare(50)()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runner = case.prepare(50)
        runner()
    case.poison()
    graph.replay()
    checks = Checks()
    for name, value, other in zip(case.names, runner.outputs, expected, strict=True):
        checks.equal(name, value, other)
    checks.settle()


def test_cold_load_while_another_thread_captures(tiny: LatentMoe, tiny_weights: Weights) -> None:
    """A global-mode capture forbids allocations in every thread; a cold prepare must neither fail nor break it."""
    case = FrontCase(tiny, tiny_weights, 2)
    runner = case.prepare(9)
    expected = [value.clone() for value in runner()]
    fresh = FrontCase(LatentMoe(tiny.registry), tiny_weights, 2)
    fresh.poison()
    x, views = tiny_weights.x[:9], [output.view(9) for output in fresh.outputs]
    torch.cuda.synchronize()
    graph = capture_beside(runner, lambda: fresh.moe.prepare_front(x, *fresh.weights, *views))
    case.poison()
    graph.replay()
    checks = Checks()
    for name, value, other in zip(case.names, runner.outputs, expected, strict=True):
        checks.equal(name, value, other)
    checks.settle()


def test_words_come_back_while_another_thread_captures(tiny: LatentMoe, tiny_weights: Weights) -> None:
    """Runners that come and go take words back, which waits; a global-mode capture elsewhere must survive that."""
    tokens, elsewhere = 128, torch.cuda.Stream()
    captured, churned = (TailCase(tiny, tiny_weights, 1, 0, 2) for _ in range(2))
    runner = captured.prepare(tokens)
    assert isinstance(runner, ProgramRunner)
    assert runner._words is not None
    expected = [value.clone() for value in runner()]
    churned.prepare(tokens)()
    prepare = prepare_again(churned, tokens)
    torch.cuda.synchronize()

    def churn() -> None:
        with torch.cuda.stream(elsewhere):
            for _ in range(2 * SLOT_SIZES[0][1]):
                prepare()()

    graph = capture_beside(runner, churn)
    elsewhere.synchronize()
    captured.poison()
    graph.replay()
    checks = Checks()
    for case in (captured, churned):
        for name, output, other in zip(case.names, case.outputs, expected, strict=True):
            checks.equal(name, output.view(tokens), other)
    checks.settle()


STUCK = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
import torch
from support.gpu.cases import TailCase, make_weights
from cakegen.errors import LaunchError
from cakegen.registry import load_registry
from cakegen.runtime import LatentMoe, driver

moe = LatentMoe(load_registry({tree!r}))
case = TailCase(moe, make_weights(moe.model, torch.device("cuda", 0)), 1, 0, 2)
runner = case.prepare(128)
runner()
torch.cuda.synchronize()
# arrivals that nobody made: the counter wraps early, and the last CTAs wait for a zero that never comes
driver.call("cuMemsetD32", runner._words.address, 2, 1)
runner()
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
try:
    runner()
except LaunchError as error:
    print(error)
"""


def test_stuck_wait_traps_in_time_and_is_named(tiny: LatentMoe) -> None:
    """In a process of its own, since a trap ends its context."""
    script = STUCK.format(root=str(ROOT), tests=str(ROOT / "tests"), tree=str(tiny.registry.root))
    environment = {**os.environ, "CAKEGEN_WAIT_SECONDS": "0.3"}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=90, env=environment, check=False
    )
    text = result.stdout
    assert "A wait gave up after 0.3 s: program cake_tiny_latent_moe_" in text, text + result.stderr
    assert "the grid's arrival counter to return to 0" in text
    assert "decode_tail" in text


def test_public_functions_share_one_export() -> None:
    assert kimi_k3_latent_moe() is kimi_k3_latent_moe()


def test_rebound_runner_reads_reloaded_weights_and_writes_other_outputs(
    tiny: LatentMoe, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor maps are encoded anew at the address to which launches are bound; then a tensor moves and is noticed."""
    monkeypatch.setenv("CAKEGEN_CHECK_CALLS", "1")
    for tokens in (5, 300):
        first, second = (
            {name: value.to(device) for name, value in front_operands(tiny.model, 2, tokens, seed=seed).items()}
            for seed in (0, 1)
        )
        runner = tiny.prepare_front(**first)
        kept = [value.clone() for value in runner()]
        expected = [value.clone() for value in tiny.front(**second)]
        for name in ("logits", "latent", "shared_act"):
            second[name].zero_()
        runner.rebind(**second)
        assert all(map(torch.equal, runner(), expected))
        assert all(map(torch.equal, (first["logits"], first["latent"], first["shared_act"]), kept))
        second["gate_weight"].set_(second["gate_weight"].clone())
        with pytest.raises(LaunchError, match="front: gate_weight must be where it was prepared"):
            runner()
        runner.rebind()
        assert all(map(torch.equal, runner(), expected))
