"""Prefill launches behind each other: programmatic order, streams, workspaces and captures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.gpu.cases import Checks, FrontCase, Guarded, TailCase, Weights, make_weights, spans
from support.gpu.checks import capture_beside
from support.gpu.prefill import cut_tokens, edited_tree, plan_of

from cakegen.errors import LaunchError
from cakegen.plan.records import NormForm
from cakegen.runtime import LatentMoe, Workspace, driver
from cakegen.runtime.device import open_device
from cakegen.runtime.prepared import Runner
from cakegen.runtime.runner import ProgramRunner
from cakegen.runtime.workspace import stream_workspace

Record = Callable[[str, object], None]


@pytest.fixture
def tiny(warm_prefill: dict[str, LatentMoe]) -> LatentMoe:
    """The tiny model."""
    return warm_prefill["tiny"]


@pytest.fixture
def cut_weights(tiny: LatentMoe, device: torch.device) -> Weights:
    """Its weights, with as many rows as a cut front needs."""
    return make_weights(tiny.model, device, 5, tokens=cut_tokens(tiny, "front", 4))


@dataclass
class Chain:
    """Layers behind each other: a front's latent is its tail's routed, a tail's out the next front's x."""

    runners: list[Runner]
    outputs: list[Guarded]
    tokens: int

    def values(self) -> list[torch.Tensor]:
        """Copies of every output of every layer."""
        return [output.view(self.tokens).clone() for output in self.outputs]

    def poison(self) -> None:
        """Fill every output."""
        for output in self.outputs:
            output.poison()


def make_chain(moe: LatentMoe, layers: list[Weights], tp: int, tokens: int, workspace: Workspace) -> Chain:
    """Prepare front and tail of every layer; the first layer's x starts it."""
    x = layers[0].x[:tokens]
    chain = Chain([], [], tokens)
    for weights in layers:
        front, tail = FrontCase(moe, weights, tp), TailCase(moe, weights, tp, 0, 1)
        logits, latent, shared_act = (output.view(tokens) for output in front.outputs)
        y, out = (output.view(tokens) for output in tail.outputs)
        chain.runners.append(moe.prepare_front(x, *front.weights, logits, latent, shared_act, workspace=workspace))
        operands = (latent.unsqueeze(0), tail.norm, tail.up, shared_act, tail.shared_down, out)
        chain.runners.append(moe.prepare_tail(*operands, tp=tp, rank=0, y_workspace=y, workspace=workspace))
        chain.outputs += [*front.outputs, *tail.outputs]
        x = out
    return chain


@pytest.mark.parametrize("tokens", [300, 1000, 4096])
@pytest.mark.parametrize("tp", [1, 8, 16])
def test_captured_layers_equal_eager_steps(
    prefill_moe: LatentMoe,
    prefill_weights: Weights,
    device: torch.device,
    tp: int,
    tokens: int,
    record_property: Record,
) -> None:
    """Two layers, each launch alone and then waited for; all behind each other; a graph of them, many times; chaos."""
    checks = Checks()
    layers = [prefill_weights, make_weights(prefill_moe.model, device, 1, tokens=tokens)]
    workspace = Workspace(device)
    chain = make_chain(prefill_moe, layers, tp, tokens, workspace)
    chain.poison()
    for runner in chain.runners:
        runner()
        torch.cuda.synchronize()
    expected = chain.values()
    assert all(value.isfinite().all() for value in expected)

    def compare(run: Callable[[], object], made: Chain, label: str) -> None:
        made.poison()
        run()
        for index, (value, other) in enumerate(zip(made.values(), expected, strict=True)):
            checks.equal(f"{label} output {index}", value, other)
        for output in made.outputs:
            checks.zero(f"{label} guards", output.faults(tokens))

    def call(made: Chain) -> None:
        for runner in made.runners:
            runner()

    for turn in range(5):
        compare(lambda: call(chain), chain, f"eager {turn}")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(chain)
    for turn in range(20):
        compare(graph.replay, chain, f"replay {turn}")
    chaotic = LatentMoe(prefill_moe.registry, compile_flags=("-DCAKEGEN_CHAOS",))
    slow = make_chain(chaotic, layers, tp, tokens, workspace)
    record = prefill_moe.wait_record(device)
    for seed in range(1, 4):
        torch.cuda.synchronize()
        record.write_chaos_seed(seed)
        compare(lambda: call(slow), slow, f"chaos {seed}")
    torch.cuda.synchronize()
    record.write_chaos_seed(0)
    record_property("cases", checks.settle())


def late_rows(moe: LatentMoe, tp: int) -> int:
    """Rows whose norm needs a second wave of CTAs on a quarter of the multiprocessors.

    On the others the norm's CTAs have drained while that wave runs, so the GEMM's CTAs start there, long before `y` is
    complete.
    """
    opened = open_device(0)
    norm = plan_of(moe, "tail", tp, 1024, partials=2).launches[0]
    assert isinstance(norm.form, NormForm)
    loaded = moe._programs.load(opened, norm.key)
    resident = driver.max_active_ctas_per_sm(loaded.kernel, loaded.program.launch) * opened.sm_count
    return norm.form.rows_per_cta * (resident + opened.sm_count // 4)


def differing(case: TailCase, runner: Runner, expected: list[torch.Tensor], times: int) -> int:
    """Calls whose outputs have other bits than expected; `y` is poisoned with NaN before each."""
    wrong = 0
    for _ in range(times):
        case.poison()
        values = runner()
        pairs = zip(values, expected, strict=True)
        wrong += not all(torch.equal(value.view(torch.int16), other.view(torch.int16)) for value, other in pairs)
    return wrong


def test_gemm_must_wait_for_the_norm(
    warm_prefill: dict[str, LatentMoe], device: torch.device, tmp_path: Path, record_property: Record
) -> None:
    """Without its `griddepcontrol.wait` before the up blocks the GEMM multiplies rows that the norm has not written.

    The norm adds up the most partials, so that its second wave takes far longer than the GEMM's shared-down blocks.
    The program as it is never does so.
    """
    moe = warm_prefill["kimi"]
    pattern = r"griddepcontrol_wait\(\);(\s*norm_done = true;)"
    header = "cake_kernels_tail_gemm_sm90.cuh"
    broken = LatentMoe(edited_tree(moe.registry, tmp_path, header, pattern, r"\1"))
    tp, tokens = 8, late_rows(moe, 8)
    weights = make_weights(moe.model, device, 2, tokens=tokens, partials=moe.model.max_partials)
    case = TailCase(moe, weights, tp, 0, moe.model.max_partials)
    runner = case.prepare(tokens)
    assert isinstance(runner, ProgramRunner)
    for launch in runner.launches:
        assert launch.bind_stream(driver.current_stream(0))() == 0
        torch.cuda.synchronize()
    expected = [value.clone() for value in runner.outputs]
    checks = Checks()
    checks.equal("y", expected[0], case.expected()[0])
    checks.close("out", expected[1], case.expected()[1], 1e-2)
    checks.settle()
    assert differing(case, runner, expected, 20) == 0
    early = case.prepare(tokens, moe=broken)
    wrong = differing(case, early, expected, 20)
    record_property("calls_without_the_wait_that_differ_of_20", wrong)
    assert wrong > 0, "the removed wait was never missed: nothing here proves that the program needs it"


def test_one_workspace_on_two_busy_streams_is_refused(tiny: LatentMoe, cut_weights: Weights) -> None:
    workspace = Workspace(cut_weights.x.device)
    tokens = cut_weights.x.shape[0]
    cases = [FrontCase(tiny, cut_weights, 4) for _ in range(2)]
    first, second = (prepare_in(case, tokens, workspace) for case in cases)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(200_000_000)
        first()
    with torch.cuda.stream(streams[1]), pytest.raises(LaunchError, match="Make a Workspace for each stream"):
        second()
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[1]):
        second()
    torch.cuda.synchronize()
    checks = Checks()
    for name, value, other in zip(FrontCase.names, first.outputs, second.outputs, strict=True):
        checks.equal(name, value, other)
    checks.settle()


def prepare_in(case: FrontCase, tokens: int, workspace: Workspace | None) -> ProgramRunner:
    """A runner of a cut front in a workspace, with poisoned outputs."""
    case.poison()
    views = (output.view(tokens) for output in case.outputs)
    runner = case.moe.prepare_front(case.x[:tokens], *case.weights, *views, workspace=workspace)
    assert isinstance(runner, ProgramRunner)
    assert runner._workspace is not None, "the example is not cut"
    return runner


def test_two_workspaces_on_two_streams_overlap_and_agree(
    tiny: LatentMoe, cut_weights: Weights, record_property: Record
) -> None:
    """Cut fronts of two streams at once; as in decode, the overlap is read from events."""
    tokens, device = cut_weights.x.shape[0], cut_weights.x.device
    cases = [FrontCase(tiny, cut_weights, 4) for _ in range(2)]
    runners = [prepare_in(case, tokens, Workspace(device)) for case in cases]
    streams = [torch.cuda.Stream() for _ in runners]
    torch.cuda.synchronize()
    # on its own stream from the first call, since `spans` keeps the default stream busy
    for stream, runner in zip(streams, runners, strict=True):
        with torch.cuda.stream(stream):
            runner()
    torch.cuda.synchronize()
    expected = [value.clone() for value in runners[0].outputs]
    for case in cases:
        case.poison()
    (begin_0, end_0), (begin_1, end_1) = spans(list(runners), streams, 200)
    assert max(begin_0, begin_1) < min(end_0, end_1), "the two streams' launches did not overlap"
    checks = Checks()
    for case, runner in zip(cases, runners, strict=True):
        for name, value, other in zip(case.names, runner.outputs, expected, strict=True):
            checks.equal(name, value, other)
        for output in case.outputs:
            checks.zero("guards", output.faults(tokens))
    record_property("cases", checks.settle())


def test_default_workspace_follows_the_stream(tiny: LatentMoe, cut_weights: Weights) -> None:
    tokens, case = cut_weights.x.shape[0], FrontCase(tiny, cut_weights, 4)
    here = prepare_in(case, tokens, None)
    assert here._workspace is stream_workspace(0) is prepare_in(case, tokens, None)._workspace
    with torch.cuda.stream(torch.cuda.Stream()):
        assert prepare_in(case, tokens, None)._workspace is stream_workspace(0) is not here._workspace
    torch.cuda.synchronize()


def test_growth_in_a_capture_is_refused_and_leaves_the_capture_usable(tiny: LatentMoe, cut_weights: Weights) -> None:
    tokens, case = cut_weights.x.shape[0], FrontCase(tiny, cut_weights, 4)
    workspace, empty = Workspace(cut_weights.x.device), Workspace(cut_weights.x.device)
    runner = prepare_in(case, tokens, workspace)
    expected = [value.clone() for value in runner()]
    x, views = case.x[:tokens], [output.view(tokens) for output in case.outputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(LaunchError, match="Prepare the runner before the capture"):
            tiny.prepare_front(x, *case.weights, *views, workspace=empty)
        tiny.prepare_front(x, *case.weights, *views, workspace=workspace)()
    case.poison()
    graph.replay()
    checks = Checks()
    for name, value, other in zip(case.names, views, expected, strict=True):
        checks.equal(name, value, other)
    checks.settle()


def test_stream_change_is_checked_while_another_thread_captures(tiny: LatentMoe, cut_weights: Weights) -> None:
    """The query of the stream before must neither fail nor break a global-mode capture elsewhere."""
    tokens, workspace = cut_weights.x.shape[0], Workspace(cut_weights.x.device)
    captured, called = (FrontCase(tiny, cut_weights, 4) for _ in range(2))
    graphed = prepare_in(captured, tokens, Workspace(cut_weights.x.device))
    expected = [value.clone() for value in graphed()]
    runner = prepare_in(called, tokens, workspace)
    runner()
    called.poison()
    torch.cuda.synchronize()
    elsewhere = torch.cuda.Stream()

    def work() -> None:
        with torch.cuda.stream(elsewhere):
            runner()

    graph = capture_beside(graphed, work)
    elsewhere.synchronize()
    captured.poison()
    graph.replay()
    checks = Checks()
    for name, value, called_value, other in zip(captured.names, graphed.outputs, runner.outputs, expected, strict=True):
        checks.equal(f"{name} of the graph", value, other)
        checks.equal(f"{name} of the other thread", called_value, other)
    checks.settle()
