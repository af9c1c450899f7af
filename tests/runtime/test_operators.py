"""The torch operators: what torch checks of them, compiled graphs, and the runners that they keep, without a GPU."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import tiny_model
from support.runtime.fakes import FakeTensor, Machine
from support.runtime.operands import front_operands, tail_operands
from support.runtime.operator_cases import front_case, tail_case, tiny_latent_moe, tiny_operators

from cakegen.errors import LaunchError
from cakegen.model import DeviceFacts
from cakegen.plan import plan_route
from cakegen.registry import Registry, load_registry
from cakegen.runtime import LatentMoe, operators, pack_weight
from cakegen.runtime.operators import PreparedCalls
from cakegen.runtime.reference import reference_front, reference_tail
from cakegen.runtime.runner import plan_partials

MODEL = tiny_model()
TP, RANK = 2, 1


def front_partials(tokens: int) -> int:
    facts = DeviceFacts.nominal("sm_90a", 132)
    return plan_partials(plan_route(MODEL, stage="front", tp=TP, tokens=tokens, partials=1, device=facts))


# a front whose plan cuts tiles
CUT = next(tokens for tokens in range(200, MODEL.max_tokens, 256) if front_partials(tokens))
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


def expected_front(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return reference_front(MODEL.dims, *inputs)


def expected_tail(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return reference_tail(MODEL.dims, *inputs, tp=TP, rank=RANK)


def test_published_operators_are_defined_by_the_import() -> None:
    assert torch.ops.cakegen.kimi_k3_latent_moe_front.default is operators.KIMI_K3.front
    assert torch.ops.cakegen.kimi_k3_latent_moe_tail.out is operators.KIMI_K3.tail_out


def test_published_schemas_declare_what_is_written() -> None:
    front, tail = operators.KIMI_K3.front_out._schema, operators.KIMI_K3.tail_out._schema
    written = {a.name for schema in (front, tail) for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    assert written == {"logits", "latent", "shared_act", "y_workspace", "out"}
    assert str(operators.KIMI_K3.tail._schema) == (
        "cakegen::kimi_k3_latent_moe_tail(Tensor routed, Tensor norm_weight, Tensor up_weight, Tensor shared_act, "
        "Tensor shared_down_weight, *, int tp, int rank, bool overlap=False) -> (Tensor y, Tensor out)"
    )


@pytest.mark.parametrize("tokens", [5, 0])
def test_functional_operators_equal_the_reference(tokens: int) -> None:
    ops = tiny_operators()
    inputs, _ = front_case(TP, tokens)
    for value, expected in zip(ops.front(*inputs), expected_front(inputs), strict=True):
        assert torch.equal(value, expected)
        assert value.dtype == expected.dtype
    inputs, _ = tail_case(TP, tokens)
    for value, expected in zip(ops.tail(*inputs, tp=TP, rank=RANK), expected_tail(inputs), strict=True):
        assert torch.equal(value, expected)


def test_operators_take_packed_weights() -> None:
    ops = tiny_operators()
    inputs, _ = front_case(TP)
    packed = (inputs[0], *map(pack_weight, inputs[1:]))
    for value, expected in zip(ops.front(*packed), expected_front(inputs), strict=True):
        assert torch.equal(value, expected)
    shapes = [value.shape for value in ops.front(*(tensor.to("meta") for tensor in packed))]
    assert shapes == [expected.shape for expected in expected_front(inputs)]
    (routed, norm, up, shared_act, down), _ = tail_case(TP)
    values = ops.tail(routed, norm, pack_weight(up), shared_act, pack_weight(down), tp=TP, rank=RANK)
    assert all(map(torch.equal, values, expected_tail((routed, norm, up, shared_act, down))))


def test_out_operators_fill_the_callers_tensors() -> None:
    ops = tiny_operators()
    inputs, outputs = front_case(TP)
    assert ops.front_out(*inputs, **outputs) is None
    assert all(map(torch.equal, outputs.values(), expected_front(inputs)))
    inputs, outputs = tail_case(TP)
    ops.tail_out(*inputs, tp=TP, rank=RANK, **outputs)
    assert all(map(torch.equal, outputs.values(), expected_tail(inputs)))


@pytest.mark.slow
@pytest.mark.parametrize("pitched", [False, True])
def test_torch_accepts_the_operators(pitched: bool) -> None:
    """Schemas, fake kernels, aliasing and dynamic shapes: torch.library.opcheck."""
    ops, options = tiny_operators(), {"tp": TP, "rank": RANK, "overlap": pitched}
    (x, *weights), front = front_case(TP)
    (routed, *rest), tail = tail_case(TP)
    if pitched:
        x, routed = (torch.nn.functional.pad(t, (0, 64))[..., : t.shape[-1]] for t in (x, routed))
    torch.library.opcheck(ops.front, (x, *weights), {"overlap": pitched})
    torch.library.opcheck(ops.front_out, (x, *weights), {"overlap": pitched, **front})
    torch.library.opcheck(ops.tail, (routed, *rest), options)
    torch.library.opcheck(ops.tail_out, (routed, *rest), {**options, **tail})


def test_tensors_without_values_have_the_shapes_of_the_results() -> None:
    inputs, _ = front_case(TP)
    results = tiny_operators().front(*(tensor.to("meta") for tensor in inputs))
    assert [(value.shape, value.dtype) for value in results] == [
        (value.shape, value.dtype) for value in expected_front(inputs)
    ]


def block(x: torch.Tensor, front: tuple[torch.Tensor, ...], tail: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A layer whose experts halve the latent rows; the torch operations around it are there to be fused."""
    ops = torch.ops.cakegen
    logits, latent, shared_act = ops.tiny_latent_moe_front(x * 2, *front)
    norm_weight, up_weight, shared_down_weight = tail
    routed = torch.stack((latent / 2, latent / 4))
    out = torch.empty_like(x)
    ops.tiny_latent_moe_tail.out(
        routed, norm_weight, up_weight, shared_act, shared_down_weight, tp=TP, rank=RANK,
        y_workspace=torch.empty_like(latent), out=out,
    )  # fmt: skip
    return out * 2, logits * 2


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dynamic"), [("aot_eager", False), ("inductor", True)])
def test_compiled_layer_is_one_graph_and_equals_eager(backend: str, dynamic: bool) -> None:
    tiny_operators()
    (_, *front), _ = front_case(TP)
    (_, norm, up, _, down), _ = tail_case(TP)
    compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=dynamic)
    for tokens in (5, 7) if dynamic else (5,):
        (x, *_), _ = front_case(TP, tokens)
        with torch.inference_mode():
            values, expected = (call(x, tuple(front), (norm, up, down)) for call in (compiled, block))
        assert all(map(torch.equal, values, expected))


def test_export_keeps_the_operators() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, *weights: torch.Tensor) -> Any:
            return torch.ops.cakegen.tiny_latent_moe_front(x, *weights)

    inputs, _ = front_case(TP)
    program = torch.export.export(Layer(), inputs)
    assert tiny_operators().front in {node.target for node in program.graph.nodes}


def test_refusals_are_the_runtimes() -> None:
    inputs, _ = front_case(TP)
    with pytest.raises(LaunchError, match=r"front: down_weight must be contiguous \[512, 512\]"):
        tiny_operators().front(inputs[0], inputs[1], inputs[1], inputs[3])


def test_second_latent_moe_of_an_export_is_refused() -> None:
    assert operators.define_operators(tiny_latent_moe()) is tiny_operators()
    with pytest.raises(LaunchError, match="tiny_latent_moe_front is defined over another LatentMoe"):
        operators.define_operators(LatentMoe(load_registry("tiny_latent_moe")))


def test_second_backend_of_cpu_tensors_is_refused_and_no_wish_takes_the_first() -> None:
    assert operators.define_operators(tiny_latent_moe(), cpu_backend="reference") is tiny_operators()
    with pytest.raises(LaunchError, match="tiny_latent_moe_front is defined with cpu_backend='reference'"):
        operators.define_operators(tiny_latent_moe(), cpu_backend="emulator")
    with pytest.raises(LaunchError, match="cpu_backend is reference or emulator; got 'auto'"):
        operators.define_operators(tiny_latent_moe(), cpu_backend="auto")


def noting_library(kernels: dict[tuple[str, str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What torch's dispatcher would call, by operator and key."""
    monkeypatch.setattr(torch.library, "register_fake", lambda *arguments, **options: None)
    return SimpleNamespace(
        define=lambda schema, tags: None, impl=lambda name, kernel, key: kernels.update({(name, key): kernel})
    )


@pytest.mark.parametrize("backend", operators.CPU_BACKENDS)
def test_kernels_for_cpu_tensors_ask_for_their_backend(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: dict[tuple[str, str], Any] = {}
    library = noting_library(kernels, monkeypatch)
    asked: list[tuple[str, str, bool]] = []

    def note(stage: str) -> Any:
        return lambda *inputs, **options: asked.append((stage, options["backend"], options["overlap"]))

    calls = {"front": note("front"), "tail": note("tail")}
    moe: Any = SimpleNamespace(model=MODEL, **calls, prepare_front=None, prepare_tail=None)
    for stage in calls:
        operators._define_stage(library, stage, stage, moe, PreparedCalls(), backend)
    kernels["front", "CPU"](*front_case(TP)[0])
    kernels["tail", "CPU"](*tail_case(TP)[0], tp=TP, rank=RANK, overlap=True)
    assert asked == [("front", backend, False), ("tail", backend, True)]


class Front:
    """A front on fake device memory, run through prepared calls."""

    def __init__(self, machine: Machine, registry: Registry, tokens: int = 5, most: int = 8) -> None:
        self.moe, self.calls, self.machine, self.prepared = LatentMoe(registry), PreparedCalls(most), machine, 0
        self.tensors = front_operands(MODEL, TP, tokens)

    def prepare(self, *operands: Any, **options: Any) -> Any:
        self.prepared += 1
        return self.moe.prepare_front(*operands, **options)

    def run(self, **changed: torch.Tensor) -> None:
        on_gpu: dict[str, Any] = {name: FakeTensor(tensor) for name, tensor in {**self.tensors, **changed}.items()}
        outputs = {name: on_gpu.pop(name) for name in ("logits", "latent", "shared_act")}
        self.calls.run(self.prepare, tuple(on_gpu.values()), outputs)


def test_call_of_known_operands_prepares_nothing(machine: Machine, tiny_registry: Registry) -> None:
    front = Front(machine, tiny_registry)
    for _ in range(3):
        front.run()
    assert (front.prepared, len(machine.driver.launches)) == (1, 3)


def test_activations_on_the_cpu_with_weights_on_a_device_are_refused_by_name(tiny_registry: Registry) -> None:
    """torch sends such a call to the CUDA kernel, since one operand is there."""
    tensors = front_operands(MODEL, TP, 5)
    x, *outputs = (tensors.pop(name) for name in ("x", "logits", "latent", "shared_act"))
    options: dict[str, Any] = dict(zip(("logits", "latent", "shared_act"), outputs, strict=True))
    weights: tuple[Any, ...] = tuple(map(FakeTensor, tensors.values()))
    with pytest.raises(
        LaunchError, match=r"front: gate_weight must be .* on cpu; got .* on cuda:0\. All operands of a"
    ):
        PreparedCalls().run(LatentMoe(tiny_registry).prepare_front, (x, *weights), options)


def test_other_address_shape_or_stream_is_another_runner(machine: Machine, tiny_registry: Registry) -> None:
    front = Front(machine, tiny_registry)
    front.run()
    front.run(x=front.tensors["x"].clone())
    front.run(latent=torch.empty(5, 576, dtype=torch.bfloat16)[:, :512])
    machine.stream += 1
    front.run()
    assert (front.prepared, len(front.calls)) == (4, 4)
    assert [launch.stream for launch in machine.driver.launches] == [machine.stream - 1] * 3 + [machine.stream]
    assert machine.driver.order == []


def test_kept_runners_are_bounded_and_keep_no_tensor(machine: Machine, tiny_registry: Registry) -> None:
    front = Front(machine, tiny_registry, most=2)
    tensors = [torch.empty_like(front.tensors["logits"]) for _ in range(5)]
    for tensor in tensors:
        front.run(logits=tensor)
    assert len(front.calls) == 2
    weights = [weakref.ref(tensor) for tensor in (*front.tensors.values(), *tensors)]
    del tensor
    tensors.clear()
    front.tensors.clear()
    gc.collect()
    assert [weight() for weight in weights] == [None] * len(weights)


def test_least_recently_used_runner_is_dropped(machine: Machine, tiny_registry: Registry) -> None:
    front = Front(machine, tiny_registry, most=2)
    first, second, third = (torch.empty_like(front.tensors["logits"]) for _ in range(3))
    for tensor in (first, second, first, third, first):
        front.run(logits=tensor)
    assert front.prepared == 3


def test_eight_threads_prepare_each_call_once(machine: Machine, tiny_registry: Registry) -> None:
    front, failures = Front(machine, tiny_registry), []
    start = threading.Barrier(8)

    def work(logits: torch.Tensor) -> None:
        try:
            start.wait(10)
            for _ in range(50):
                front.run(logits=logits)
        except Exception as error:
            failures.append(error)

    outputs = [torch.empty_like(front.tensors["logits"]) for _ in range(8)]
    threads = [threading.Thread(target=work, args=(output,)) for output in outputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert (len(front.calls), len(machine.driver.launches)) == (8, 400)
    prepared = sorted(launch.pointers for launch in machine.driver.launches)
    assert len(set(prepared)) == 8


def test_no_tokens_keep_no_runner(machine: Machine, tiny_registry: Registry) -> None:
    front = Front(machine, tiny_registry, tokens=0)
    front.run()
    assert (len(front.calls), machine.driver.calls) == (0, [])


def test_split_call_has_partials_of_its_own_and_is_bound_again_where_they_moved(
    machine: Machine, tiny_registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake device's memory comes from a list, so that the test says where the partials are."""
    memory = [torch.empty(front_partials(CUT)) for _ in range(2)]
    places = iter([0, 0, 1, 1])
    monkeypatch.setattr(operators.CallWorkspace, "reserve", lambda self, elems: place(self, memory[next(places)]))

    def place(workspace: Any, partials: torch.Tensor) -> torch.Tensor:
        if workspace._partials is None:
            workspace._partials = partials
        return workspace._partials

    front = Front(machine, tiny_registry, tokens=CUT)
    front.run()
    front.run()
    assert front.prepared == 1
    front.run()
    assert front.prepared == 2
    assert len(front.calls) == 1
    assert len(machine.driver.launches) == 3


def test_kernels_for_cuda_tensors_launch_into_new_outputs_and_into_the_callers(
    machine: Machine, tiny_registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels: dict[tuple[str, str], Any] = {}
    library = noting_library(kernels, monkeypatch)
    moe, calls = LatentMoe(tiny_registry), PreparedCalls()
    for stage in ("front", "tail"):
        operators._define_stage(library, stage, stage, moe, calls, "reference")

    def on_gpu(operands: dict[str, Any], *outputs: str) -> tuple[list[Any], dict[str, Any]]:
        placed: dict[str, Any] = {name: FakeTensor(tensor) for name, tensor in operands.items()}
        return [placed[name] for name in placed if name not in outputs], {name: placed[name] for name in outputs}

    inputs, outputs = on_gpu(front_operands(MODEL, TP, 5), "logits", "latent", "shared_act")
    results = kernels["front", "CUDA"](*inputs)
    assert [(value.shape, value.dtype) for value in results] == [(v.shape, v.dtype) for v in outputs.values()]
    assert kernels["front.out", "CUDA"](*inputs, **outputs) is None
    inputs, outputs = on_gpu(tail_operands(MODEL, TP, 64), "y_workspace", "out")
    y, out = kernels["tail", "CUDA"](*inputs, tp=TP, rank=RANK)
    assert [y.shape, out.shape] == [(64, 512), (64, 512)]
    kernels["tail.out", "CUDA"](*inputs, tp=TP, rank=RANK, **outputs)
    assert len(calls) == len(machine.driver.launches) == 4
    kernels["tail.out", "CUDA"](*inputs, tp=TP, rank=RANK, overlap=True, **outputs)
    kernels["tail", "CUDA"](*inputs, tp=TP, rank=RANK, overlap=True)
    kernels["front", "CUDA"](*on_gpu(front_operands(MODEL, TP, 5), "logits", "latent", "shared_act")[0], overlap=True)
    programmatic = [runner.launches[0].record.programmatic for runner, _, _ in calls._kept.values()]
    assert programmatic == [False] * 4 + [True] * 3


def test_cold_call_in_a_capture_is_refused_before_the_driver(machine: Machine, tiny_registry: Registry) -> None:
    front = Front(machine, tiny_registry)
    machine.capturing = True
    with pytest.raises(LaunchError, match=r'Add before the capture: moe.warm_up\("cuda:0", 2, tokens=\(5,\)'):
        front.run()
    assert machine.driver.calls == []


def test_warm_layers_of_one_graph_keep_words_apart(machine: Machine, tiny_registry: Registry) -> None:
    """More tails in one capture than the reserve of control words: each has its own, and the graph keeps them."""
    moe, calls = LatentMoe(tiny_registry), PreparedCalls()
    moe.warm_up("cuda:0", TP, tokens=(64,))
    machine.capturing = True
    words = set()

    def prepare(*operands: Any, **options: Any) -> Any:
        runner = moe.prepare_tail(*operands, **options)
        words.add(runner._words.address)
        return runner

    layers = [tail_operands(MODEL, TP, 64) for _ in range(40)]
    for layer in layers:
        on_gpu: dict[str, Any] = {name: FakeTensor(tensor) for name, tensor in layer.items()}
        outputs = {name: on_gpu.pop(name) for name in ("out", "y_workspace")}
        calls.run(prepare, tuple(on_gpu.values()), {**outputs, "tp": TP, "rank": 0})
    assert len(words) == len(layers)
