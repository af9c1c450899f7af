"""A whole measurement, rehearsed on the CPU: the tiny model, the torch reference as our arm, and a scripted clock."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.bench.fakes import FakeClock, FakeProbe
from support.models import kimi_k3_model

from cakegen.bench import arms, host_cost, layer_chain, measure, rivals, session
from cakegen.bench.measure import Bench, Settings, measure_rows
from cakegen.bench.operands import Case, find_faults, make_operands, rank_of
from cakegen.bench.products import Cublas
from cakegen.bench.records import RowRecord
from cakegen.bench.rows import Row
from cakegen.errors import BenchError, LaunchError
from cakegen.registry import load_registry
from cakegen.runtime import LatentMoe

CPU = torch.device("cpu")
SETTINGS = Settings(repeats=3, backend="reference", compile_rivals=False)


@pytest.fixture(autouse=True)
def cpu_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one cuBLAS call that the CPU lacks."""

    def multiply(products: Cublas, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x.float() @ weight.float().T)

    monkeypatch.setattr(Cublas, "multiply_fp32", multiply)


@pytest.fixture(scope="module")
def moe() -> LatentMoe:
    return LatentMoe(load_registry("tiny_latent_moe"))


@pytest.fixture
def bench(moe: LatentMoe) -> Bench:
    return Bench(moe, CPU, FakeClock(l2_bytes=2**20), FakeProbe(), SETTINGS)  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", ["front", "tail"])
@pytest.mark.parametrize("tp", [1, 8, 16])
def test_decode_row_is_checked_timed_and_limited_by_the_probe(bench: Bench, stage: str, tp: int) -> None:
    (record,) = measure_rows(bench, [Row(stage, tp, 5)])
    assert (record.status, record.problem, record.unavailable) == ("timed", None, {})
    chains = {"separate", "separate_fp32", "joined", "joined_fp32" if stage == "front" else "joined_copied"}
    ours = {"ours", "ours again", "ours packed", "floor", "stream 128x128", "stream 128x64", "stream 64x64"}
    assert set(record.arms) == ours | {f"rival {name} eager" for name in chains}
    for value in (record.ours_us, record.rival_us, record.ratio, record.noise, record.packed_us, record.floor_us):
        assert value is not None
    assert None not in (record.rotation_us, record.rival_rotation_us)
    assert str(record.limit).startswith("stream ")
    assert record.arms["ours"]["count"] == 3


def test_probe_streams_exactly_the_weights_that_a_row_reads(bench: Bench) -> None:
    list(measure_rows(bench, [Row("front", 8, 1), Row("tail", 8, 1)]))
    dims = bench.moe.model.dims
    probe: Any = bench.probe
    i_local = dims.shared_intermediate // 8
    front = [(dims.experts, dims.hidden), (dims.latent, dims.hidden), (2 * i_local, dims.hidden)]
    tail = [(dims.hidden, dims.latent // 8), (dims.hidden, i_local)]
    assert probe.streamed == [front] * 3 + [tail] * 3


def test_prefill_row_is_limited_by_the_gemm(bench: Bench) -> None:
    (record,) = measure_rows(bench, [Row("tail", 1, 200)])
    assert record.limit == "gemm"
    assert not any(name.startswith("stream") for name in record.arms)


def test_rows_of_a_group_share_operands_and_come_out_largest_first(bench: Bench) -> None:
    found = [record.tokens for record in measure_rows(bench, [Row("tail", 1, t) for t in (1, 3, 16, 17)])]
    assert found == [16, 3, 1, 17]


def spoiled(build: Callable[..., Any], output: str) -> Callable[..., Any]:
    """An arm whose last row of one output is never written, which only poison shows."""

    def build_spoiled(*arguments: Any, **options: Any) -> Any:
        arm = build(*arguments, **options)
        value = arm.outputs[output]

        def call() -> None:
            kept = value[-1].clone()
            arm.call()
            value[-1] = kept

        return arms.Arm(call, arm.outputs, arm.keys)

    return build_spoiled


def test_wrong_program_is_not_timed_and_the_rivals_are(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "build_ours", spoiled(measure.build_ours, "latent"))
    (record,) = measure_rows(bench, [Row("front", 8, 4)])
    assert record.status == "wrong"
    assert record.problem == "latent: 512 of 2048 elements outside atol = rtol = 0.01"
    assert (record.ours_us, record.ratio) == (None, None)
    assert "ours" not in record.arms
    assert record.rival_us is not None


def test_wrong_rival_is_recorded_and_not_timed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"tail": {"joined": spoiled(rivals.tail_joined, "out"), "separate": rivals.tail_separate}}
    monkeypatch.setattr(measure, "RIVALS", broken)
    (record,) = measure_rows(bench, [Row("tail", 1, 2)])
    assert record.rival == "separate eager"
    assert record.unavailable["rival joined eager"].startswith("WrongResult: out: ")


@pytest.mark.parametrize(("stage", "output"), [("front", "shared_act"), ("tail", "out")])
def test_chain_that_rounds_once_errs_less_than_one_that_rounds_between_its_kernels(
    bench: Bench, stage: str, output: str
) -> None:
    dims = bench.moe.model.dims
    case = make_operands(dims, Row(stage, 8, 100), CPU, 0).case
    pointwise = measure.pointwise_to_try(bench, case.weights)[0]
    errors = {}
    for name in ("separate", rivals.SEPARATE_FP32):
        arm = rivals.RIVALS[stage][name](case, pointwise)
        arm.call()
        assert find_faults(arm.outputs, case.expected, rivals.tolerances_of(case.dims, name)) == []
        errors[name] = float((arm.outputs[output].double() - case.expected[output]).norm())
    assert errors["separate"] > 1.1 * errors[rivals.SEPARATE_FP32]


def enlarged(build: Callable[..., Any], output: str) -> Callable[..., Any]:
    """An arm one of whose outputs is 2 % too large: within a rival's tolerance, outside of ours."""

    def build_enlarged(*arguments: Any) -> Any:
        arm = build(*arguments)

        def call() -> None:
            arm.call()
            arm.outputs[output].mul_(1.02)

        return arms.Arm(call, arm.outputs, arm.keys)

    return build_enlarged


@pytest.mark.parametrize(("stage", "output"), [("front", "shared_act"), ("tail", "out")])
def test_chain_that_rounds_as_we_do_is_held_to_our_tolerances(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, stage: str, output: str
) -> None:
    build = enlarged(rivals.RIVALS[stage]["separate"], output)
    monkeypatch.setattr(measure, "RIVALS", {stage: {"separate": build, rivals.SEPARATE_FP32: build}})
    (record,) = measure_rows(bench, [Row(stage, 1, 4)])
    assert "rival separate eager" in record.arms
    wrong = record.unavailable["rival separate_fp32 eager"]
    assert wrong.startswith(f"WrongResult: {output}: ")
    assert "outside atol = rtol = 0.01" in wrong


def test_rival_that_can_not_run_leaves_its_reason(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(products: Cublas, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        raise NotImplementedError("no fp32 output here")

    monkeypatch.setattr(Cublas, "multiply_fp32", missing)
    (record,) = measure_rows(bench, [Row("front", 1, 1)])
    assert (record.rival, record.ratio) == (None, None)
    assert record.ours_us is not None
    assert set(record.unavailable.values()) == {"NotImplementedError: no fp32 output here"}


def test_unserved_row_is_a_record_with_the_reason(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise LaunchError("no program for this")

    monkeypatch.setattr(measure, "build_ours", refuse)
    (record,) = measure_rows(bench, [Row("front", 8, 4)])
    assert (record.status, record.problem) == ("unserved", "no program for this")
    assert record.limit_us is not None


def test_lost_device_ends_the_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> list[float]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def broken(*_: Any) -> None:
        raise RuntimeError("launch failed")

    monkeypatch.setattr(Cublas, "multiply_fp32", broken)
    monkeypatch.setattr(bench.clock, "settle", lost)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        list(measure_rows(bench, [Row("front", 8, 4)]))


def test_missing_probe_leaves_rows_without_a_limit(moe: LatentMoe) -> None:
    bench = Bench(moe, CPU, FakeClock(l2_bytes=2**20), None, SETTINGS, {"stream": "no NVRTC"})
    (record,) = measure_rows(bench, [Row("tail", 8, 4)])
    assert (record.limit, record.floor_us) == (None, None)
    assert record.unavailable == {"stream": "no NVRTC"}
    with pytest.raises(BenchError, match="no NVRTC"):
        measure.check_flush(bench)


def test_rivals_can_be_left_out(moe: LatentMoe) -> None:
    settings = Settings(repeats=3, rivals=False, rotation=False, backend="reference")
    bench = Bench(moe, CPU, FakeClock(), FakeProbe(), settings)  # type: ignore[arg-type]
    (record,) = measure_rows(bench, [Row("tail", 8, 4)])
    assert (record.rival, record.ratio, record.rotation_us) == (None, None, None)
    assert record.ours_us is not None


def test_tp_that_does_not_divide_is_refused(bench: Bench) -> None:
    with pytest.raises(BenchError, match="TP must divide"):
        list(measure_rows(bench, [Row("front", 3, 1)]))


def test_unaligned_rank_is_measured() -> None:
    assert [rank_of(tp) for tp in (1, 2, 16)] == [0, 1, 1]


def test_chain_that_loses_a_link_is_wrong(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tail that reads another shared_act than its front wrote: what a stale buffer does."""
    build_ours = layer_chain.build_ours

    def stale(moe: LatentMoe, case: Case, backend: str, overlap: bool = False) -> arms.Arm:
        if case.row.stage == "tail":
            case = dataclasses.replace(
                case, inputs={**case.inputs, "shared_act": torch.ones_like(case.inputs["shared_act"])}
            )
        return build_ours(moe, case, backend, overlap)

    monkeypatch.setattr(layer_chain, "build_ours", stale)
    (chain,) = layer_chain.measure_chains(bench, [16], [1])
    assert chain["status"] == "wrong"
    assert "layer 0 of a chain of 4" in chain["unavailable"]["ours"]
    assert chain["rival_us"] is not None


def test_operands_repeat_with_their_seed(moe: LatentMoe) -> None:
    made = [make_operands(moe.model.dims, Row("tail", 2, 3), CPU, seed).case for seed in (1, 1, 2)]
    assert torch.equal(made[0].inputs["routed"], made[1].inputs["routed"])
    assert not torch.equal(made[0].inputs["routed"], made[2].inputs["routed"])
    assert torch.equal(made[0].expected["out"], made[1].expected["out"])


def test_faults_count_nan_wrong_bits_and_large_errors() -> None:
    wanted = torch.ones(4, dtype=torch.float64)
    near = torch.tensor([1.0, 1.015, 1.03, float("nan")])
    assert find_faults({"out": near}, {"out": wanted}, kimi_k3_model().dims.tolerances) == [
        "out: 2 of 4 elements outside atol = rtol = 0.01"
    ]
    bits = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    other = torch.tensor([1.0, 2.015625], dtype=torch.bfloat16)
    assert find_faults({"y": bits}, {"y": bits.clone()}, kimi_k3_model().dims.tolerances) == []
    assert find_faults({"y": other}, {"y": bits}, kimi_k3_model().dims.tolerances) == [
        "y: 1 of 2 elements outside equal bits"
    ]


def test_flush_check_compares_clean_dirty_and_rotation(bench: Bench) -> None:
    found = measure.check_flush(bench)
    assert set(found) == {"probe", "weight_bytes", "clean_us", "dirty_us", "rotation_us"}
    clock: Any = bench.clock
    assert {"flush", "dirty"} == {event for event in clock.events if isinstance(event, str)}


@pytest.fixture
def quick_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """No new process, and few repetitions."""
    monkeypatch.setattr(host_cost, "_measure_first_result", lambda bench, tp: {"first_result_s": 0.5, "tp": tp})
    monkeypatch.setattr(host_cost, "_BATCHES", 2)
    monkeypatch.setattr(host_cost, "_BATCH_CALLS", 2)
    monkeypatch.setattr(host_cost, "_PREPARES", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_host")
def test_whole_run_yields_every_kind_as_json(bench: Bench) -> None:
    rows = tuple(Row(stage, 8, tokens) for stage in ("front", "tail") for tokens in (1, 16))
    said: list[str] = []
    results = list(session.measure_all(bench, session.Run(rows, SETTINGS), said.append))
    assert [kind for kind, _ in results] == ["protocol", *["row"] * 4, *["chain"] * 2, *["host"] * 5]
    for _, record in results:
        json.dumps(vars(record) if isinstance(record, RowRecord) else record)
    chains: list[Any] = [record for kind, record in results if kind == "chain"]
    assert [(chain["tp"], chain["tokens"], chain["status"]) for chain in chains] == [(8, 16, "timed"), (8, 1, "timed")]
    for chain in chains:
        assert chain["unavailable"] == {}
        assert {"ours", "rival separate", "rival joined"} < set(chain["layer_us"])
        assert chain["ours_us"] > 0
    hosts: list[Any] = [record for kind, record in results if kind == "host"]
    assert [host.get("stage") for host in hosts] == ["front", "front", "tail", "tail", None]
    assert all(host["call_us"] > 0 and host["graph_us"] > 0 for host in hosts[:4])


@pytest.mark.usefixtures("quick_host")
def test_run_of_one_stage_has_no_chain(bench: Bench) -> None:
    run = session.Run((Row("front", 8, 1),), SETTINGS, host=False)
    assert [kind for kind, _ in session.measure_all(bench, run, lambda _: None)] == ["protocol", "row"]


def without_tp_8(moe: LatentMoe) -> LatentMoe:
    """The small export for TP 1 and 4 alone."""
    targets = tuple(dataclasses.replace(target, tp_degrees=(1, 4)) for target in moe.model.targets)
    model = dataclasses.replace(moe.model, targets=targets)
    return LatentMoe(dataclasses.replace(moe.registry, model=model))


@pytest.mark.usefixtures("quick_host")
def test_hosts_costs_are_measured_at_a_degree_that_the_export_has(bench: Bench) -> None:
    bench.moe = without_tp_8(bench.moe)
    records = list(host_cost.measure_host(bench))
    assert [record["tp"] for record in records] == [4] * 5
    assert not any("problem" in record for record in records)


def test_first_result_that_fails_is_told_in_a_line(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cost, "_FIRST_RESULT", "raise ValueError('no such device')")
    assert host_cost._measure_first_result(bench, 4) == {"problem": "first result: ValueError: no such device"}
