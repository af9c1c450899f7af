"""The published functions' names, arguments and refusals; a caller of theirs, on the reference and on the emulator."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import pytest
import torch
from support.compat.flashinfer_caller import Layer, call_block, refusals
from support.runtime.operands import front_operands, tail_operands
from support.runtime.operator_cases import tiny_latent_moe

from cakegen.compat import flashinfer
from cakegen.errors import LaunchError, OperandError, PlanError, UnregisteredError
from cakegen.runtime import LatentMoe, shared_latent_moe

CPU = torch.device("cpu")


class OnCpu:
    """An export whose calls take CPU tensors, by another backend than CUDA's."""

    def __init__(self, moe: LatentMoe, backend: str) -> None:
        self.model, self.registry = moe.model, moe.registry
        self.prepare_front = functools.partial(moe.prepare_front, backend=backend)
        self.prepare_tail = functools.partial(moe.prepare_tail, backend=backend)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = OnCpu(shared_latent_moe("kimi_k3_latent_moe"), "reference")
    monkeypatch.setattr(flashinfer, "kimi_k3_latent_moe", lambda: moe)


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer(CPU, 8, 5)


EMPTY = inspect.Parameter.empty
SIGNATURES = {
    "kimi_k3_latent_moe_front": (
        "x gate_weight down_weight shared_gate_up_weight logits latent shared_act",
        {"backend": "cake"},
    ),
    "kimi_k3_latent_moe_tail": (
        "routed norm_weight up_weight shared_act shared_down_weight out",
        {"tp": EMPTY, "rank": EMPTY, "y_workspace": EMPTY, "backend": "cake"},
    ),
}


@pytest.mark.parametrize("name", [*SIGNATURES, *(f"prepare_{name}" for name in SIGNATURES)])
def test_signature_is_the_published_one(name: str) -> None:
    positional, keyword = SIGNATURES[name.removeprefix("prepare_")]
    parameters = inspect.signature(getattr(flashinfer, name)).parameters.values()
    assert [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD] == positional.split()
    assert {p.name: p.default for p in parameters if p.kind == p.KEYWORD_ONLY} == keyword


def test_availability_is_asked_as_published() -> None:
    parameters = inspect.signature(flashinfer.generated_program_available).parameters.values()
    assert {p.name: p.default for p in parameters} == {
        "device": EMPTY,
        "stage": None,
        "tp": None,
        "num_tokens": None,
        "num_partials": 1,
    }
    assert all(p.kind == p.POSITIONAL_OR_KEYWORD for p in parameters)
    assert not flashinfer.generated_program_available("cpu")


def test_availability_asks_for_every_required_request_or_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(flashinfer, "program_available", lambda *request: asked.append(request) or True)
    assert flashinfer.generated_program_available("cuda:0")
    assert len(set(asked)) == 60
    assert {request[1:3] for request in asked} == {(stage, tp) for stage in ("front", "tail") for tp in (1, 8)}
    asked.clear()
    assert flashinfer.generated_program_available("cuda:0", "tail", 8, 16, 3)
    assert not flashinfer.generated_program_available("cuda:0", "tail", 4, 16)
    assert asked == [("cuda:0", "tail", 8, 16, 3)]


@pytest.mark.usefixtures("reference")
def test_caller_is_served_by_the_reference(layer: Layer) -> None:
    front, tail = call_block(flashinfer, layer, 3)
    assert isinstance(front, flashinfer.KimiK3LatentMoeRunner)
    assert (front.stage, front.tp, front.rank, front.num_tokens) == ("front", 8, 0, 3)
    assert (tail.stage, tail.tp, tail.rank, tail.num_tokens) == ("tail", 8, 5, 3)  # type: ignore[attr-defined]
    with pytest.raises(dataclasses.FrozenInstanceError):
        front.tp = 1  # type: ignore[misc]


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("number", range(15))
def test_what_the_published_calls_refuse_is_refused_by_the_same_exceptions(layer: Layer, number: int) -> None:
    calls = refusals(flashinfer, layer)
    assert len(calls) == 15
    error, call = calls[number]
    with pytest.raises(error) as caught:
        call()
    assert isinstance(caught.value, LaunchError)


def test_cpu_tensors_are_refused_as_published(layer: Layer) -> None:
    with pytest.raises(ValueError, match="needs CUDA tensors; got tensors on cpu"):
        call_block(flashinfer, layer, 1)


@pytest.mark.emulator
def test_runner_of_programs_has_the_published_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = tiny_latent_moe()
    monkeypatch.setattr(flashinfer, "kimi_k3_latent_moe", lambda: OnCpu(moe, "emulator"))
    front = front_operands(moe.model, 8, 5)
    runner = flashinfer.prepare_kimi_k3_latent_moe_front(**front)
    assert (runner.arch, runner.route, runner.launch_count) == ("sm_90a", "decode", 1)
    assert runner.kernel_keys == runner.runner.kernel_keys
    assert runner.module_names == tuple(moe.registry.kernels[key] for key in runner.kernel_keys)
    assert [launch.stage for launch in runner.launches] == ["front"]
    assert runner.plan["n_pad"] == 8
    logits, latent, shared_act = runner()
    assert logits is front["logits"]
    assert bool(logits.isfinite().all() and latent.isfinite().all() and shared_act.isfinite().all())
    assert repr(runner).endswith("arch='sm_90a', route='decode')")
    prefill = flashinfer.prepare_kimi_k3_latent_moe_tail(**tail_operands(moe.model, 8, 3000), tp=8, rank=7)
    assert (prefill.route, prefill.rank) == ("prefill", 7)


@pytest.mark.parametrize(("raised", "published"), [(PlanError, ValueError), (UnregisteredError, NotImplementedError)])
def test_request_that_no_program_serves_is_refused_as_published(
    raised: type[Exception], published: type[Exception], monkeypatch: pytest.MonkeyPatch, layer: Layer
) -> None:
    moe = OnCpu(shared_latent_moe("kimi_k3_latent_moe"), "reference")

    def refuse(*_: object) -> Any:
        raise raised("no route")

    monkeypatch.setattr(moe, "prepare_front", refuse)
    monkeypatch.setattr(flashinfer, "kimi_k3_latent_moe", lambda: moe)
    with pytest.raises(published, match="no route"):
        call_block(flashinfer, layer, 1)
    assert issubclass(OperandError, ValueError)
