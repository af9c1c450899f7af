"""Every legal layout of the operands on the reference and in the emulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from support.emulator.layouts import LAYOUTS, LayoutCheck, laid_out
from support.models import tiny_model
from support.runtime.operands import front_operands, tail_operands

from cakegen.emulator.faults import Fault
from cakegen.emulator.launches.launch import emulate_plan
from cakegen.emulator.machine.extents import joined, rows_extents
from cakegen.emulator.machine.memory import Buffer, GlobalMemory
from cakegen.emulator.text.translate import Program
from cakegen.model import DeviceFacts
from cakegen.plan import plan_route
from cakegen.registry import Registry, load_registry
from cakegen.runtime import LatentMoe
from cakegen.runtime.validate import validate_tail

Planted = Callable[..., Callable[[Registry, str, str], Program]]

MODEL = tiny_model()
TP, RANK = 8, 3


@pytest.fixture(scope="module")
def reference() -> LayoutCheck:
    return LayoutCheck(LatentMoe(load_registry("tiny_latent_moe")), backend="reference")


@pytest.fixture(scope="module")
def decode() -> LayoutCheck:
    return LayoutCheck(LatentMoe(load_registry("tiny_latent_moe")), backend="emulator")


@pytest.fixture(scope="module")
def prefill() -> LayoutCheck:
    """The same programs for a model whose prefill begins at 65 tokens."""
    registry = load_registry("tiny_latent_moe")
    model = registry.model
    families = {name: getattr(model, name) for name in ("hopper", "blackwell")}
    few = {name: dataclasses.replace(rules.decode, n_pads=(8, 64)) for name, rules in families.items()}
    early = dataclasses.replace(
        model, **{name: dataclasses.replace(rules, decode=few[name]) for name, rules in families.items()}
    )
    return LayoutCheck(LatentMoe(dataclasses.replace(registry, model=early)), backend="emulator")


def check(backend: LayoutCheck, stage: str, layout: str, tokens: int, partials: int) -> None:
    if stage == "front":
        backend.check(stage, laid_out(stage, layout, front_operands(MODEL, TP, tokens)))
    else:
        operands = laid_out(stage, layout, tail_operands(MODEL, TP, tokens, partials))
        backend.check(stage, operands, tp=TP, rank=RANK)


@pytest.mark.parametrize(("stage", "layout"), LAYOUTS)
@pytest.mark.parametrize(("tokens", "partials"), [(1, 3), (3, 2)])
def test_layout_gives_the_reference_the_same_bits(
    reference: LayoutCheck, stage: str, layout: str, tokens: int, partials: int
) -> None:
    check(reference, stage, layout, tokens, partials)


@pytest.mark.emulator
@pytest.mark.parametrize(("stage", "layout"), LAYOUTS)
@pytest.mark.parametrize(("tokens", "partials"), [(1, 3), (3, 2)])
def test_layout_gives_the_emulator_the_same_bits(
    decode: LayoutCheck, stage: str, layout: str, tokens: int, partials: int
) -> None:
    check(decode, stage, layout, tokens, partials)


@pytest.mark.emulator
@pytest.mark.parametrize("layout", ["token-major partials, pitched", "y between token-major partials"])
def test_layout_of_partials_gives_the_emulator_the_same_bits_at_prefill(prefill: LayoutCheck, layout: str) -> None:
    check(prefill, "tail", layout, 65, 2)


def test_extents_are_the_bytes_of_the_rows_in_any_order() -> None:
    """Against a set of bytes: planes inside of each other, that overlap, that touch, and one after another."""
    for rows, pitch, planes, plane in ((3, 48, 2, 16), (2, 96, 3, 32), (3, 16, 4, 8), (2, 40, 2, 200), (1, 0, 1, 0)):
        extents = rows_extents(16, rows, pitch, planes, plane)
        held = {p * plane + r * pitch + at for p in range(planes) for r in range(rows) for at in range(16)}
        assert extents.num_bytes == max(held) + 1
        assert {at for at in range(-1, max(held) + 2) if extents.holds(at)} == held
        offsets = np.arange(0, max(held) + 8, 4, dtype=np.uint64)
        reaching = {int(at) for at in offsets[extents.outside(offsets, 4)]}
        assert reaching == {int(at) for at in offsets if not {*range(int(at), int(at) + 4)} <= held}
        assert bool((extents.starts[1:] > extents.ends[:-1]).all())
        assert extents.dense == (held == {*range(max(held) + 1)})


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ((16, 3, 48), (32, 16, 3, 48), False),
        ((16, 3, 48), (15, 16, 3, 48), True),
        ((16, 3, 48), (112, 16, 3, 48), False),
        ((16, 3, 48), (111, 1, 1, 0), True),
        ((200, 1, 0), (48, 16, 2, 48), True),
    ],
)
def test_extents_share_bytes_only_where_both_hold_one(
    first: tuple[int, int, int], second: tuple[int, int, int, int], shared: bool
) -> None:
    moved, *shape = second
    ours, theirs = rows_extents(*first), rows_extents(*shape).moved(moved)
    assert ours.share_bytes(theirs) == theirs.share_bytes(ours) == shared
    both = joined((ours, theirs))
    assert all(both.holds(at) == (ours.holds(at) or theirs.holds(at)) for at in range(260))


def test_bytes_between_token_major_partials_are_in_no_tensor(planted: Planted) -> None:
    """A program that begins a partial 16 bytes too early reads what is no operand's, and is told so."""
    registry = load_registry("tiny_latent_moe")
    operands = laid_out("tail", "token-major partials, pitched", tail_operands(MODEL, TP, 3, 2))
    request = validate_tail(registry.model, **operands, tp=TP, rank=RANK)
    facts = DeviceFacts.nominal("sm_90a", 132)
    plan = plan_route(registry.model, stage="tail", tp=TP, tokens=3, partials=2, device=facts)
    load = planted("norm.routed_partial_stride);", "norm.routed_partial_stride - 8);")
    with pytest.raises(Fault, match=r"^out-of-bounds: read of 16 bytes .* in no tensor; it is byte \d+ of routed"):
        emulate_plan(registry, request, plan, load=load)


def test_access_that_reaches_between_two_rows_is_refused() -> None:
    raw = np.zeros(256, np.uint8)
    buffer = Buffer("routed", 0x1000, 256, rows_extents(48, 4, 64), host=raw.ctypes.data)
    memory = GlobalMemory([buffer])
    addresses = np.array([0x1000, 0x1060], np.uint64)
    assert memory.find(addresses, 16, "read")[1].tolist() == [0, 0x60]
    with pytest.raises(Fault, match=r"^out-of-bounds: read of 32 bytes at routed \+ 96: it reaches between two rows"):
        memory.find(addresses, 32, "read")
