"""Operands between prepare and call: each call may be checked, and other tensors bound, on every backend."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from support.models import tiny_model
from support.runtime.fakes import Machine, registry_of
from support.runtime.operands import front_operands, tail_operands
from support.runtime.prepare import on_gpu, prepare_tail

from cakegen.errors import LaunchError
from cakegen.registry import Registry
from cakegen.runtime import LatentMoe, pack_weight
from cakegen.runtime.prepared import CHECK_VARIABLE
from cakegen.runtime.runner import ProgramRunner

MODEL = tiny_model()


@pytest.fixture
def moe(machine: Machine, tiny_registry: Registry) -> LatentMoe:
    return LatentMoe(tiny_registry)


def prepared(moe: LatentMoe, tokens: int = 5) -> tuple[ProgramRunner, dict[str, Any]]:
    operands = on_gpu(front_operands(MODEL, 2, tokens))
    runner = moe.prepare_front(**operands)
    assert isinstance(runner, ProgramRunner)
    return runner, operands


def bound_bytes(runner: ProgramRunner) -> list[bytes]:
    """What the driver reads of each launch's arguments, tensor maps apart (the fake encodes none)."""
    found = []
    for launch in runner.launches:
        sizes = {"buffer": 8, "parameter": 4, "tma_buffer": 0}
        arguments = zip(launch.block.arguments, launch.block.table, strict=True)
        found.append(b"".join(ctypes.string_at(address or 0, sizes[each.kind]) for each, address in arguments))
    return found


MOVES = {
    "resized": lambda t: t.resize_(t.shape[0] + 64, *t.shape[1:]),
    "other memory": lambda t: t.set_(torch.empty_like(t)),
    "other memory of its data": lambda t: setattr(t, "data", torch.empty_like(t)),
    "other strides": lambda t: t.set_(torch.empty(t.shape[0], t.shape[1] + 8, dtype=t.dtype)[:, :-8]),
    "freed": lambda t: t.untyped_storage().resize_(0),
    "another type": lambda t: setattr(t, "data", t.data.half()),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("name", ["x", "gate_weight", "latent"])
def test_checked_call_refuses_an_operand_that_moved(
    moe: LatentMoe, machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str, move: str
) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    runner, operands = prepared(moe)
    runner()
    launched = len(machine.driver.launches)
    tensor = operands[name]._tensor
    MOVES[move](tensor)
    operands[name].shape, operands[name].dtype = tensor.shape, tensor.dtype
    wanted = rf"^front: {name} must be .* It was right when the runner was prepared: bind"
    with pytest.raises(LaunchError, match=wanted):
        runner()
    assert len(machine.driver.launches) == launched


def test_moved_operand_is_told_with_both_places(moe: LatentMoe) -> None:
    runner, operands = prepared(moe)
    before = operands["x"].data_ptr()
    operands["x"]._tensor.set_(torch.empty(5, MODEL.dims.hidden, dtype=torch.bfloat16))
    now, layout = operands["x"].data_ptr(), r"\(\[1 x 5 x 512\], row pitch 512 elements, 2 bytes each\)"
    with pytest.raises(
        LaunchError,
        match=rf"front: x must be where it was prepared, at {before:#x} {layout}; it is at {now:#x} {layout}\. It was",
    ):
        runner.check_operands()


def test_resized_operand_is_told_with_both_shapes(moe: LatentMoe) -> None:
    runner, operands = prepared(moe)
    operands["gate_weight"].shape = torch.Size((384, 513))
    with pytest.raises(
        LaunchError, match=r"gate_weight must be of the shape that was prepared, \[384, 512\]; it is \["
    ):
        runner.check_operands()


def test_calls_are_not_checked_unless_asked_for(moe: LatentMoe, machine: Machine) -> None:
    runner, operands = prepared(moe)
    operands["x"]._tensor.set_(torch.empty(5, MODEL.dims.hidden, dtype=torch.bfloat16))
    runner()
    assert len(machine.driver.launches) == 1


@pytest.mark.parametrize("text", ["yes", "2", " 1"])
def test_odd_wish_for_checks_is_refused(moe: LatentMoe, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, text)
    with pytest.raises(LaunchError, match=rf"^environment: CAKEGEN_CHECK_CALLS must be 0 or 1; got '{text}'\.$"):
        prepared(moe)


def test_rebound_runner_launches_on_the_other_operands(moe: LatentMoe, machine: Machine) -> None:
    """The arguments are those of a runner that was prepared for them, at the address that launches are bound to."""
    runner, operands = prepared(moe)
    runner()
    other = on_gpu(front_operands(MODEL, 2, 5, seed=1))
    memory = torch.empty(5, MODEL.dims.latent + 64, dtype=torch.bfloat16)[:, :-64]
    other["latent"] = on_gpu({"latent": memory})["latent"]
    fresh = moe.prepare_front(**(operands | {"x": other["x"], "latent": other["latent"]}))
    assert isinstance(fresh, ProgramRunner)
    pointers = [launch.block.pointers for launch in runner.launches]
    assert bound_bytes(runner) != bound_bytes(fresh)
    runner.rebind(x=other["x"], latent=other["latent"])
    assert bound_bytes(runner) == bound_bytes(fresh)
    assert [launch.block.arguments for launch in runner.launches] == [each.block.arguments for each in fresh.launches]
    assert runner() == (operands["logits"], other["latent"], operands["shared_act"])
    assert [launch.pointers for launch in machine.driver.launches] == pointers * 2


def test_rebind_without_operands_takes_them_where_they_are_now(moe: LatentMoe) -> None:
    runner, operands = prepared(moe)
    before = bound_bytes(runner)
    operands["logits"]._tensor.set_(torch.empty(5, MODEL.dims.experts))
    with pytest.raises(LaunchError, match="front: logits must be where it was prepared"):
        runner.check_operands()
    runner.rebind()
    runner.check_operands()
    assert bound_bytes(runner) != before


def test_rebound_weight_may_be_packed(moe: LatentMoe) -> None:
    runner, operands = prepared(moe)
    packed = pack_weight(operands["down_weight"]._tensor)
    runner.rebind(**on_gpu({"down_weight": packed}))
    fresh = moe.prepare_front(**(operands | on_gpu({"down_weight": packed})))
    assert isinstance(fresh, ProgramRunner)
    assert [launch.block.arguments for launch in runner.launches] == [each.block.arguments for each in fresh.launches]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": torch.empty(1)}, r"front: rebind has no operand 'y'; it has x, gate_weight, down_weight"),
        ({"x": torch.empty(5, 511, dtype=torch.bfloat16)}, r"front: x must be rows of stride 1 in a \[5, 512\]"),
        ({"x": torch.empty(5, 512)}, r"front: x must be .* Call \.to\(torch\.bfloat16\)"),
    ],
)
def test_rebind_that_is_refused_changes_nothing(moe: LatentMoe, changes: dict[str, Any], message: str) -> None:
    runner, _ = prepared(moe)
    before, outputs = bound_bytes(runner), runner.outputs
    with pytest.raises(LaunchError, match=message):
        runner.rebind(**on_gpu(changes))
    assert (bound_bytes(runner), runner.outputs) == (before, outputs)
    runner.check_operands()


def test_rebind_keeps_the_plan(moe: LatentMoe) -> None:
    runner, _ = prepared(moe)
    with pytest.raises(LaunchError, match=r"rebind keeps the plan, which is for tokens 5; got 6\. Prepare another"):
        runner.rebind(**on_gpu(front_operands(MODEL, 2, 6)))
    with pytest.raises(LaunchError, match="which is for tp 2; got 4"):
        runner.rebind(**on_gpu(front_operands(MODEL, 4, 5)))
    tail = prepare_tail(moe)
    with pytest.raises(LaunchError, match="tail: rebind keeps the plan, which is for partials 1; got 2"):
        tail.rebind(**on_gpu(tail_operands(MODEL, 2, 64, 2)))
    with pytest.raises(LaunchError, match="which is for device cuda:0; got cuda:1"):
        tail.rebind(**on_gpu(tail_operands(MODEL, 2, 64), 1))


def test_runner_without_operands_is_rebound_to_all_or_to_none(moe: LatentMoe) -> None:
    runner, operands = prepared(moe)
    runner.release_operands()
    runner.check_operands()
    with pytest.raises(
        LaunchError, match="rebind needs every operand, since this runner keeps none alive; gate_weight"
    ):
        runner.rebind(x=operands["x"])
    runner.rebind(**operands)
    assert runner() == (operands["logits"], operands["latent"], operands["shared_act"])


@pytest.mark.parametrize("tokens", [3, 0])
def test_rebound_reference_reads_and_writes_the_other_operands(tokens: int) -> None:
    block = LatentMoe(registry_of(MODEL))
    first, second = front_operands(MODEL, 2, tokens), front_operands(MODEL, 2, tokens, seed=1)
    runner = block.prepare_front(**first, backend="reference")
    expected = [value.clone() for value in block.front(**second, backend="reference")]
    second = {name: value.clone() for name, value in second.items()}
    for name in ("logits", "latent", "shared_act"):
        second[name].fill_(7)
    runner.rebind(**second)
    found = runner()
    assert [value.data_ptr() for value in found] == [
        second[name].data_ptr() for name in ("logits", "latent", "shared_act")
    ]
    assert all(map(torch.equal, found, expected))


def test_checked_reference_refuses_an_operand_that_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    operands = tail_operands(MODEL, 2, 3)
    runner = LatentMoe(registry_of(MODEL)).prepare_tail(**operands, tp=2, rank=1, backend="reference")
    runner()
    operands["up_weight"].set_(torch.empty_like(operands["up_weight"]))
    with pytest.raises(LaunchError, match="tail: up_weight must be where it was prepared"):
        runner()
    runner.rebind()
    runner()
