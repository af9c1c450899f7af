"""`backend="emulator"`: the public functions on CPU tensors."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cakegen import runtime
from cakegen.emulator import Fault, Options
from cakegen.emulator.launches.backend import EmulatedRunner
from cakegen.emulator.launches.cases import Case, compare, make_operands
from cakegen.errors import CompileError, LaunchError
from cakegen.model import DeviceFacts
from cakegen.registry import Registry
from cakegen.runtime import LatentMoe, driver
from cakegen.runtime.emulation import prepare_emulated
from cakegen.runtime.validate import validate_front

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.emulator


@pytest.fixture
def moe(registry: Registry) -> LatentMoe:
    return LatentMoe(registry)


def prepare(moe: LatentMoe, case: Case, operands: dict[str, torch.Tensor], **options: Any) -> EmulatedRunner:
    if case.stage == "front":
        runner = moe.prepare_front(**operands, backend="emulator", **options)
    else:
        runner = moe.prepare_tail(**operands, tp=case.tp, rank=case.rank, backend="emulator", **options)
    assert isinstance(runner, EmulatedRunner)
    return runner


@pytest.mark.parametrize(
    "case", [Case("front", 8, 5), Case("tail", 8, 5, partials=2, rank=6), Case("tail", 8, 140)], ids=str
)
def test_runner_reads_fresh_values_from_the_same_buffers(moe: LatentMoe, case: Case) -> None:
    operands = make_operands(moe.model, case)
    runner = prepare(moe, case, operands)
    assert runner.plan == case.plan(moe.model)
    for seed in range(2):
        fresh = make_operands(moe.model, case, seed)
        for name, tensor in operands.items():
            tensor.copy_(fresh[name])
        outputs = runner()
        assert all(output is kept for output, kept in zip(outputs, runner.outputs, strict=True))
        assert compare(moe.model, case, operands)[1] == []
    assert [report.key for report in runner.reports] == [launch.key for launch in case.plan(moe.model).launches]


def test_options_of_a_runner_name_the_schedule(moe: LatentMoe) -> None:
    case = Case("tail", 8, 3)
    runner = prepare(moe, case, make_operands(moe.model, case))
    hashes = []
    for options in (Options("random", 1), Options("random", 1), Options("late")):
        runner.options = options
        runner()
        hashes.append(runner.reports[0].schedule_hash)
    assert hashes[0] == hashes[1] != hashes[2]


def test_device_to_plan_for_is_an_architecture_or_facts(moe: LatentMoe, registry: Registry) -> None:
    case = Case("front", 8, 3)
    operands = make_operands(moe.model, case)
    target = moe.model.target("sm_90a")
    assert target is not None
    assert prepare(moe, case, operands, arch="sm_90a").plan.device == DeviceFacts.nominal(  # type: ignore[union-attr]
        "sm_90a", max(target.sm_counts)
    )
    facts = DeviceFacts.nominal("sm_90a", 6)
    assert prepare(moe, case, operands, arch=facts).plan.device == facts  # type: ignore[union-attr]
    given = LatentMoe(registry, device_facts=facts)
    assert prepare(given, case, operands).plan.device == facts  # type: ignore[union-attr]


def test_refusals_say_what_is_wrong(moe: LatentMoe, registry: Registry) -> None:
    case = Case("front", 8, 3)
    operands = make_operands(moe.model, case)
    with pytest.raises(LaunchError, match="architecture 'sm_80' is not supported"):
        prepare(moe, case, operands, arch="sm_80")
    request = dataclasses.replace(validate_front(moe.model, **operands), device=torch.device("meta"))
    with pytest.raises(LaunchError, match="runs on the CPU and needs CPU tensors; got tensors on meta"):
        prepare_emulated(registry, request, DeviceFacts.nominal("sm_90a", 132), ())
    with pytest.raises(LaunchError, match="gate_weight must be contiguous"):
        prepare(moe, case, operands | {"gate_weight": operands["gate_weight"].half()})
    empty = LatentMoe(dataclasses.replace(registry, kernels={}))
    with pytest.raises(LaunchError, match=r"on an emulated sm_90a \(\d+ SMs, \d+ resident pairs\) needs decode:"):
        prepare(empty, case, operands)
    with pytest.raises(CompileError, match="no-such-option"):
        prepare(LatentMoe(registry, compile_flags=("--no-such-option",)), case, operands)


def test_call_of_no_tokens_runs_nothing(moe: LatentMoe) -> None:
    operands = make_operands(moe.model, Case("front", 8, 0))
    assert [len(output) for output in moe.front(**operands, backend="emulator")] == [0, 0, 0]


def test_call_inside_a_graph_capture_is_refused(moe: LatentMoe, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("front", 8, 3)
    runner = prepare(moe, case, make_operands(moe.model, case))
    monkeypatch.setattr(driver, "is_capturing", lambda: True)
    with pytest.raises(LaunchError, match="the graph would hold nothing of this call"):
        runner()


def test_fault_of_a_program_comes_out_of_the_call(moe: LatentMoe, planted: Any) -> None:
    case = Case("tail", 8, 3)
    runner = prepare(moe, case, make_operands(moe.model, case))
    runner._load = planted("griddepcontrol_launch_dependents();", 'if (threadIdx.x == 0) asm volatile("trap;");')
    with pytest.raises(Fault, match="the program gave up"):
        runner()


def test_module_functions_take_the_backend(monkeypatch: pytest.MonkeyPatch, registry: Registry) -> None:
    """Of the published export; here with the small model behind them, whose shapes are as free."""
    monkeypatch.setattr(runtime, "kimi_k3_latent_moe", lambda: LatentMoe(registry))
    case = Case("front", 8, 2)
    operands = make_operands(registry.model, case)
    runtime.kimi_k3_latent_moe_front(**operands, backend="emulator", arch="sm_90a")
    assert compare(registry.model, case, operands)[1] == []
    case = Case("tail", 8, 2)
    operands = make_operands(registry.model, case)
    runtime.kimi_k3_latent_moe_tail(**operands, tp=8, rank=0, backend="emulator")
    assert compare(registry.model, case, operands)[1] == []


def test_other_backends_load_no_emulator() -> None:
    code = (
        "import sys, cakegen.runtime as r; print(r.__file__, [m for m in sys.modules if m.startswith('cakegen.emul')])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert shown.stdout.split() == [runtime.__file__, "[]"]


def test_emulated_call_refuses_an_operand_that_moved_and_takes_it_when_it_is_rebound(moe: LatentMoe) -> None:
    """The call reads memory by address: it is always checked here."""
    operands = make_operands(moe.model, Case("front", 8, 5))
    runner = moe.prepare_front(**operands, backend="emulator")
    expected = [value.clone() for value in runner()]
    operands["x"].set_(operands["x"].clone())
    with pytest.raises(LaunchError, match="front: x must be where it was prepared"):
        runner()
    runner.rebind()
    for value in runner.outputs:
        value.fill_(float("nan"))
    assert all(map(torch.equal, runner(), expected))
