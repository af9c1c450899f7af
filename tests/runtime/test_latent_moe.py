"""Prepared calls on a fake machine: routes, residency, threads, errors, and the cost of a warm prepare."""

from __future__ import annotations

import ctypes
import re
import threading
from typing import Any

import pytest
import torch
from cuda.bindings import driver as real
from support.call_counts import calls_of
from support.models import tiny_model
from support.runtime.fakes import CONTEXTS, Machine
from support.runtime.operands import front_operands, tail_operands
from support.runtime.prepare import on_gpu, prepare_front, prepare_tail

from cakegen.errors import CakeError, LaunchError, PlanError
from cakegen.model import DeviceFacts
from cakegen.registry import Registry
from cakegen.runtime import LatentMoe, control
from cakegen.runtime.prepared import Runner
from cakegen.runtime.reference import reference_front, reference_tail
from cakegen.runtime.runner import ProgramRunner

MODEL = tiny_model()


def test_front_runner_launches_its_program_on_the_current_stream(machine: Machine, tiny_registry: Registry) -> None:
    runner = prepare_front(LatentMoe(tiny_registry))
    machine.driver.calls.clear()
    outputs = runner()
    (launched,) = machine.driver.launches
    assert launched.symbol == tiny_registry.program(runner.plan.launches[0].key).kernel_symbol
    assert (launched.stream, launched.context) == (machine.stream, CONTEXTS[0])
    assert launched.grid_ctas == runner.plan.launches[0].grid_ctas
    assert outputs is runner.outputs
    assert set(machine.driver.calls) <= {"cuCtxGetCurrent", "cuCtxSetCurrent", "cuLaunchKernelEx"}


def test_packed_parameters_are_the_pitches_and_counts(machine: Machine, tiny_registry: Registry) -> None:
    operands = front_operands(MODEL, 2, 5)
    operands["latent"] = torch.empty(5, 520, dtype=torch.bfloat16)[:, :512]
    runner = LatentMoe(tiny_registry).prepare_front(**on_gpu(operands))
    assert isinstance(runner, ProgramRunner)
    block = runner.launches[0].block
    values = {
        argument.name: ctypes.c_int32.from_address(address or 0).value
        for argument, address in zip(block.arguments, block.table, strict=True)
        if argument.kind == "parameter"
    }
    pitches = {"logits_pitch": 384, "latent_pitch": 520, "shared_act_pitch": 512}
    assert values == {"num_tokens": 5, **pitches, "weights_ahead": 3}
    pointers = {argument.name: argument.value for argument in block.arguments if argument.kind == "buffer"}
    assert pointers["latent"] == operands["latent"].data_ptr()
    assert pointers["wait_record"] == control.opened_control(0).wait_record.device_address  # type: ignore[union-attr]


def test_overlap_lets_decode_launches_run_ahead_and_leaves_prefill_as_it_is(
    machine: Machine, tiny_registry: Registry
) -> None:
    moe = LatentMoe(tiny_registry)
    for tokens, programmatic, ahead in ((5, True, 7), (100, True, 3), (200, False, None)):
        ordinary = moe.prepare_front(**on_gpu(front_operands(MODEL, 2, tokens)))
        runner = moe.prepare_front(**on_gpu(front_operands(MODEL, 2, tokens)), overlap=True)
        assert isinstance(runner, ProgramRunner)
        assert isinstance(ordinary, ProgramRunner)
        assert not ordinary.launches[0].record.programmatic
        (bound,) = runner.launches
        assert bound.record.programmatic is programmatic
        values = [
            ctypes.c_int32.from_address(address or 0).value
            for argument, address in zip(bound.block.arguments, bound.block.table, strict=True)
            if argument.name == "weights_ahead"
        ]
        assert values == ([] if ahead is None else [ahead])
        assert ahead != 6 or bound.launch.form.num_stages == ahead  # type: ignore[union-attr]


def test_every_request_is_served(machine: Machine, kimi_registry: Registry) -> None:
    moe = LatentMoe(kimi_registry)
    for tp in (1, 2, 4, 8, 16):
        for tokens in (1, 4, 8, 9, 16, 17, 33, 65, 128, 129, 256, 257, 1000, 4096, 16384):
            assert moe.program_available("cuda:0", "front", tp, tokens)
            for partials in (1, 2, 3):
                assert moe.program_available("cuda:0", "tail", tp, tokens, partials)
    assert machine.compiler.compiled == []


def test_program_available_is_false_where_nothing_serves(machine: Machine, tiny_registry: Registry) -> None:
    moe = LatentMoe(tiny_registry)
    assert not moe.program_available("cpu", "front", 2, 5)
    assert not moe.program_available("cuda:0", "front", 3, 5)
    assert not moe.program_available("cuda:0", "middle", 2, 5)
    assert not moe.program_available("cuda:0", "front", 2, MODEL.max_tokens + 1)
    assert moe.program_available("cuda:0", "front", 2, 0)


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)])
def test_unsupported_device_is_refused_by_name(
    machine: Machine, tiny_registry: Registry, capability: tuple[int, int]
) -> None:
    machine.driver.capability = capability
    with pytest.raises(LaunchError, match=rf"Fake H200\): compute capability {capability[0]}\.{capability[1]} .*9\.0"):
        prepare_front(LatentMoe(tiny_registry))


def test_unexported_tp_and_long_prompts_are_refused(machine: Machine, tiny_registry: Registry) -> None:
    moe = LatentMoe(tiny_registry)
    with pytest.raises(PlanError, match="TP 32"):
        prepare_front(moe, tp=32)
    long = MODEL.max_tokens + 1
    with pytest.raises(PlanError, match=rf"T = {long} is outside 1 … {MODEL.max_tokens}"):
        prepare_front(moe, tokens=long)


def test_key_outside_the_export_names_the_sm_count(machine: Machine, tiny_registry: Registry) -> None:
    bare = Registry(tiny_registry.root, "tiny", MODEL, tiny_registry.programs, {}, {})
    with pytest.raises(LaunchError, match=r"132 SMs, 66 resident pairs\) needs decode:.*it is for .*132 SMs"):
        prepare_front(LatentMoe(bare))


def test_warm_up_reports_each_program_compiled_and_loaded(machine: Machine, tiny_registry: Registry) -> None:
    moe, reports = LatentMoe(tiny_registry), []
    keys = moe.warm_up("cuda:0", 2, tokens=(1, 5, 64), on_progress=lambda done, total: reports.append((done, total)))
    assert reports == [(done, 2 * len(keys)) for done in range(1, 2 * len(keys) + 1)]
    again: list[Any] = []
    moe.warm_up("cuda:0", 2, tokens=(1, 5, 64), on_progress=lambda done, total: again.append((done, total)))
    assert again == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": 8}, "tokens must be whole numbers in a tuple, list or range; got int '8'"),
        ({"partials": 2}, "partials must be whole numbers in a tuple, list or range; got int '2'"),
        ({"tokens": (1, 2.5)}, "tokens must be a whole number; got float '2.5'"),
        ({"tokens": "12"}, "tokens must be whole numbers in a tuple, list or range; got str '12'"),
        ({"tp": "2"}, "tp must be a whole number; got str '2'"),
        ({"stages": "middle"}, "middle"),
    ],
    ids=str,
)
def test_warm_up_refuses_arguments_of_the_wrong_kind(
    machine: Machine, tiny_registry: Registry, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(CakeError, match=re.escape(words)):
        LatentMoe(tiny_registry).warm_up("cuda:0", **{"tp": 2, "tokens": (1,), **options})
    assert machine.compiler.compiled == []


def test_warm_up_of_one_stage_takes_its_name(machine: Machine, tiny_registry: Registry) -> None:
    moe = LatentMoe(tiny_registry)
    assert moe.warm_up("cuda:0", 2, tokens=[5], stages="tail") == moe.warm_up("cuda:0", 2, tokens=[5], stages=["tail"])


def test_fewer_resident_pairs_lower_the_figure_and_replan(machine: Machine, tiny_registry: Registry) -> None:
    machine.driver.resident_clusters = 1
    moe = LatentMoe(tiny_registry)
    runner = prepare_tail(moe, 1, 32)
    assert moe._open(0).resident_pairs == 1
    expected = DeviceFacts("sm_90a", 132, 1, 232448)
    assert runner.plan.device == expected
    waiting = [launch.form for launch in runner.plan.launches if launch.form.needs_residency]
    assert [form.cluster_ctas for form in waiting] == [1]


def test_more_resident_pairs_never_raise_the_figure(machine: Machine, tiny_registry: Registry) -> None:
    machine.driver.resident_clusters = 500
    moe = LatentMoe(tiny_registry)
    prepare_tail(moe, 1, 32)
    assert moe._open(0).resident_pairs == 66


def test_residency_that_the_device_lacks_is_refused(machine: Machine, tiny_registry: Registry) -> None:
    facts = DeviceFacts.nominal("sm_90a", 132)
    moe = LatentMoe(tiny_registry, device_facts=facts)
    machine.driver.resident_clusters = 1
    with pytest.raises(
        LaunchError, match=r"must be resident at once; cuda:0 \(Fake H200\) holds 2, with clusters of 2"
    ):
        prepare_tail(moe, 1, 32)


def test_prefill_tail_that_normalises_must_be_resident_too(machine: Machine, tiny_registry: Registry) -> None:
    """Its CTAs wait for each other's rows; the GEMM behind a norm of its own waits for no other CTA."""
    moe = LatentMoe(tiny_registry, device_facts=DeviceFacts.nominal("sm_90a", 132))
    machine.driver.resident_clusters = 1
    with pytest.raises(LaunchError, match=r"tail_gemm:tp2f1.*@sm_90a: .* so all \d+ must be resident .* holds 2, with"):
        prepare_tail(moe, tokens=400)
    assert len(prepare_tail(moe, tokens=400, partials=2).plan.launches) == 2


def test_prefill_tail_that_normalises_is_planned_again_for_fewer_pairs(
    machine: Machine, tiny_registry: Registry
) -> None:
    machine.driver.resident_clusters = 1
    runner = prepare_tail(LatentMoe(tiny_registry), tokens=400)
    (launch,) = runner.plan.launches
    assert (launch.form.fused_norm, launch.grid_ctas) == (True, (2, 1, 1))


def test_small_device_facts_reach_the_two_launch_tail(machine: Machine, tiny_registry: Registry) -> None:
    moe = LatentMoe(tiny_registry, device_facts=DeviceFacts.nominal("sm_90a", 3))
    runner = prepare_tail(moe)
    runner()
    roles = [moe.registry.program(launch.key).role for launch in runner.plan.launches]
    assert roles == ["tail_norm", "decode_tail"]
    assert len(machine.driver.launches) == 2


def test_device_facts_of_another_architecture_are_refused(machine: Machine, tiny_registry: Registry) -> None:
    moe = LatentMoe(tiny_registry, device_facts=DeviceFacts.nominal("sm_100a", 148))
    with pytest.raises(LaunchError, match="device_facts are of sm_100a; cuda:0"):
        prepare_front(moe)


def test_threads_that_meet_a_cold_program_load_it_once(machine: Machine, tiny_registry: Registry) -> None:
    moe = LatentMoe(tiny_registry)
    threads = [threading.Thread(target=prepare_front, args=(moe,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(machine.compiler.compiled) == 1
    assert machine.driver.calls.count("cuLibraryLoadData") == 1
    assert machine.driver.calls.count("cuDevicePrimaryCtxRetain") == 1
    assert machine.driver.calls.count("cuMemHostAlloc") == 1


def test_launch_failure_names_the_launch_and_appends_the_wait_report(machine: Machine, tiny_registry: Registry) -> None:
    runner = prepare_tail(LatentMoe(tiny_registry))
    program = tiny_registry.program(runner.plan.launches[-1].key)
    record = control.opened_control(0).wait_record  # type: ignore[union-attr]
    record._words[2:9] = [1, int(program.name.rsplit("_", 1)[-1][:8], 16), 3, 2, 0, 1, 0]
    machine.driver.failures["cuLaunchKernelEx"] = real.CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(LaunchError) as error:
        runner()
    text = str(error.value)
    for part in (
        "cuLaunchKernelEx failed: CUDA_ERROR_LAUNCH_FAILED",
        program.name,
        "grid_ctas",
        "cluster",
        "bytes of dynamic",
    ):
        assert part in text
    assert "A wait gave up after 2 s" in text
    assert "CTA 3, warp 2" in text


def test_unknown_backends_are_refused_in_words(machine: Machine, tiny_registry: Registry) -> None:
    moe = LatentMoe(tiny_registry)
    operands = front_operands(MODEL, 2, 5)
    with pytest.raises(LaunchError, match=r"backend='auto' .*needs CUDA tensors; got tensors on cpu.*'reference'"):
        moe.prepare_front(**operands)
    with pytest.raises(LaunchError, match="backend must be one of auto, emulator, reference; got 'fast'"):
        moe.prepare_front(**operands, backend="fast")
    with pytest.raises(LaunchError, match="arch='sm_90a' says what backend='emulator' plans for; backend='auto' takes"):
        moe.prepare_front(**on_gpu(operands), arch="sm_90a")
    for odd in ("no", "", 1, None):
        for backend in ("auto", "emulator", "reference"):
            with pytest.raises(LaunchError, match=f"front: overlap must be True or False; got {odd!r}"):
                moe.prepare_front(**operands, backend=backend, overlap=odd)


def test_call_without_its_operands_is_refused_with_their_names(tiny_registry: Registry) -> None:
    moe, operands = LatentMoe(tiny_registry), front_operands(MODEL, 2, 5)
    x, *others = operands.values()
    with pytest.raises(
        TypeError, match=r"^front: takes x, gate_weight, .* by position or by name; got 1 by position of"
    ):
        moe.prepare_front(x, backend="reference")
    with pytest.raises(TypeError, match=r"at most 7\. given twice: x$"):
        moe.prepare_front(x, *others, x=x, backend="reference")
    with pytest.raises(TypeError, match=r"unknown: bias$"):
        moe.prepare_front(**operands, bias=x, backend="reference")
    tail = tail_operands(MODEL, 2, 5)
    workspace = tail.pop("y_workspace")
    with pytest.raises(TypeError, match=r"and y_workspace by name; .*missing: y_workspace$"):
        moe.prepare_tail(**tail, tp=2, rank=0, backend="reference")
    with pytest.raises(TypeError, match=r"^tail: takes .*got 7 by position of at most 6"):
        moe.prepare_tail(*tail.values(), workspace, tp=2, rank=0, backend="reference")


def test_refused_operand_is_a_value_error_and_a_wrong_kind_a_type_error(tiny_registry: Registry) -> None:
    """As the published operation refuses, and as whoever wraps another library's call expects."""
    moe, operands = LatentMoe(tiny_registry), front_operands(MODEL, 2, 5)
    for change in (
        {"x": operands["x"].float()},
        {"latent": operands["latent"][:3]},
        {"gate_weight": operands["gate_weight"].T},
        {"logits": operands["x"]},
        {"backend": "fast"},
        {"backend": "auto"},
    ):
        with pytest.raises(ValueError, match=r"^front: ") as caught:
            moe.prepare_front(**{"backend": "reference", **operands, **change})
        assert isinstance(caught.value, LaunchError)
    tail = tail_operands(MODEL, 2, 5)
    for tp, rank in ((3, 0), (2, 2)):
        with pytest.raises(ValueError, match=r"^tail: "):
            moe.prepare_tail(**tail, tp=tp, rank=rank, backend="reference")
    for change in ({"x": [1.0]}, {"overlap": "no"}, {"workspace": 3}):
        with pytest.raises(TypeError, match=r"^front: ") as wrong:
            moe.prepare_front(**{"backend": "reference", **operands, **change})
        assert isinstance(wrong.value, LaunchError)
    with pytest.raises(TypeError, match="tail: tp must be a whole number"):
        moe.prepare_tail(**tail, tp="2", rank=0, backend="reference")


@pytest.mark.parametrize(("tokens", "route", "launches"), [(5, "decode", 1), (3000, "prefill", 1)])
def test_runner_tells_its_route_keys_and_launches(
    machine: Machine, tiny_registry: Registry, tokens: int, route: str, launches: int
) -> None:
    runner = prepare_tail(LatentMoe(tiny_registry), tokens=tokens)
    assert (runner.stage, runner.route, runner.num_tokens, runner.rank) == ("tail", route, tokens, 0)
    assert runner.launch_count == len(runner.kernel_keys) == launches
    assert runner.kernel_keys == tuple(launch.key for launch in runner.plan.launches)
    runner()
    assert len(machine.driver.launches) == launches


@pytest.mark.parametrize(("tokens", "route"), [(5, "reference"), (0, "empty")])
def test_runner_without_programs_says_so(tiny_registry: Registry, tokens: int, route: str) -> None:
    runner = LatentMoe(tiny_registry).prepare_front(**front_operands(MODEL, 2, tokens), backend="reference")
    assert (runner.stage, runner.tp, runner.rank, runner.route) == ("front", 2, 0, route)
    assert (runner.kernel_keys, runner.launch_count) == ((), 0)


def test_loading_and_plans_are_logged(
    machine: Machine, tiny_registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="cakegen")
    runner = prepare_front(LatentMoe(tiny_registry))
    (key,) = runner.kernel_keys
    told = {(record.name, record.levelname): record.getMessage() for record in caplog.records}
    assert re.fullmatch(
        rf"{re.escape(key)}: loaded on cuda:0, (compiled|from the cache), in [\d.]+ ms",
        told["cakegen.runtime.programs", "INFO"],
    )
    assert told["cakegen.runtime.routes", "DEBUG"].endswith(f": {key}")


def test_reference_backend_fills_the_callers_outputs(tiny_registry: Registry) -> None:
    moe = LatentMoe(tiny_registry)
    front = front_operands(MODEL, 2, 5)
    outputs = moe.front(**front, backend="reference")
    inputs = [front[name] for name in ("x", "gate_weight", "down_weight", "shared_gate_up_weight")]
    for output, given, expected in zip(
        outputs,
        (front["logits"], front["latent"], front["shared_act"]),
        reference_front(MODEL.dims, *inputs),
        strict=True,
    ):
        assert output is given
        assert torch.equal(output, expected)
    tail = tail_operands(MODEL, 4, 5, partials=2)
    moe.tail(**tail, tp=4, rank=3, backend="reference")
    inputs = [tail[name] for name in ("routed", "norm_weight", "up_weight", "shared_act", "shared_down_weight")]
    y, out = reference_tail(MODEL.dims, *inputs, tp=4, rank=3)
    assert torch.equal(tail["y_workspace"], y)
    assert torch.equal(tail["out"], out)


def test_compile_flags_reach_the_compiler(machine: Machine, tiny_registry: Registry) -> None:
    seen: list[Any] = []
    original = machine.compiler.request_for
    machine.compiler.request_for = lambda *a: seen.append(a[3]) or original(*a)  # type: ignore[method-assign, func-returns-value]
    prepare_front(LatentMoe(tiny_registry, compile_flags=("-DCAKEGEN_CHAOS",)))
    assert seen == [("-DCAKEGEN_CHAOS",)]


def test_warm_prepare_makes_few_calls(machine: Machine, kimi_registry: Registry) -> None:
    moe = LatentMoe(kimi_registry)
    front = on_gpu(front_operands(moe.model, 8, 8))
    tail = on_gpu(tail_operands(moe.model, 8, 8))
    keep: list[Runner] = []
    for prepare in (lambda: moe.prepare_front(**front), lambda: moe.prepare_tail(**tail, tp=8, rank=3)):
        keep.extend(prepare() for _ in range(5))
        # 640 of the front: a third of a millisecond
        assert calls_of(lambda prepare=prepare: keep.append(prepare())) < 900
