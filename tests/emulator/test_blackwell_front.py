"""Blackwell's prefill front on the emulator: values at the ends of row tiles, sums of K halves, outputs' alignment."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from support.emulator.sweep import run_case
from support.models import tiny_model, tiny_ragged_model

from cakegen.emit import render_tree, write_exports
from cakegen.emulator import Options, emulate_plan
from cakegen.emulator.launches.cases import Case, compare, emulate_case, make_operands
from cakegen.model import Model, Target
from cakegen.plan.workspace import partials_elems
from cakegen.registry import Registry, load_registry
from cakegen.runtime.validate import validate_front

ARCH = "sm_100a"
SCHEDULES = [("early", 0), ("late", 0), *(("random", seed) for seed in range(5))]

pytestmark = pytest.mark.emulator


def front(tokens: int, sm_count: int, tp: int = 8) -> Case:
    return Case("front", tp, tokens, sm_count=sm_count, arch=ARCH)


def is_cut(registry: Registry, case: Case) -> bool:
    (launch,) = case.plan(registry.model).launches
    return partials_elems(launch) > 0


# Every schedule once: one pair row and two, the last row tile full, short by one, with one row, and empty; whole tiles
# and halves behind them.
@pytest.mark.parametrize(
    ("tokens", "sm_count", "schedule", "cut"),
    [
        (129, 148, SCHEDULES[0], True),
        (255, 6, SCHEDULES[1], False),
        (256, 8, SCHEDULES[2], True),
        (257, 3, SCHEDULES[3], False),
        (384, 6, SCHEDULES[4], True),
        (385, 3, SCHEDULES[5], False),
        (512, 148, SCHEDULES[6], True),
    ],
)
def test_front_matches_the_reference_at_the_ends_of_row_tiles(
    registry: Registry, tokens: int, sm_count: int, schedule: tuple[str, int], cut: bool
) -> None:
    case = front(tokens, sm_count)
    assert is_cut(registry, case) == cut
    assert run_case(registry, case, (schedule,))[0] == "clean"


def test_bits_are_the_same_whatever_the_schedule(registry: Registry) -> None:
    """Of halves: nobody waits, and whoever comes last adds both in their order."""
    case = front(130, 8)
    assert is_cut(registry, case)
    assert run_case(registry, case, SCHEDULES[:3])[0] == "clean"


def test_orders_and_scopes_that_programs_widely_assume_give_the_same_bits(registry: Registry) -> None:
    """And none of them is needed: as strict as the ISA is, the program is clean as well."""
    case = front(129, 8)
    strict, practice = (
        emulate_case(registry, case, Options("random", 1, "wide", tensor_order=rules, scopes=rules))
        for rules in ("strict", "practice")
    )
    assert strict.problems == practice.problems == ()
    for name, value in strict.outputs.items():
        assert torch.equal(value, practice.outputs[name]), name


@pytest.mark.parametrize("schedule", [("early", 0), ("late", 0), ("random", 3)], ids=str)
def test_halves_are_two_chains_and_one_addition(registry: Registry, schedule: tuple[str, int]) -> None:
    """1 in the first half of K, 16 times 2^-24 in the second, each in a product of its own.

    One chain rounds each of them away; the second half alone keeps all 16.
    """
    case, whole = front(129, 148), front(129, 3)
    assert (is_cut(registry, case), is_cut(registry, whole)) == (True, False)
    for each, expected in ((case, 1 + 16 * 2.0**-24), (whole, 1.0)):
        operands = make_operands(registry.model, each)
        hidden = registry.model.dims.hidden
        gate, x = operands["gate_weight"], operands["x"]
        x.fill_(1)
        gate.zero_()
        gate[:, 0] = 1
        gate[:, hidden // 2 :: 16] = 2.0**-24
        emulate_plan(
            registry, validate_front(registry.model, **operands), each.plan(registry.model), Options(*schedule, "wide")
        )
        assert torch.equal(operands["logits"], torch.full_like(operands["logits"], expected))


def test_rows_that_begin_at_odd_multiples_of_16_bytes_are_stored(registry: Registry) -> None:
    """A store of 32 bytes needs their multiple; operands promise 16."""
    case = front(140, 8)
    operands = make_operands(registry.model, case)
    for name, gap in (("logits", 4), ("latent", 8), ("shared_act", 8)):
        rows, cols = operands[name].shape
        operands[name] = torch.full((rows, cols + gap), float("nan"), dtype=operands[name].dtype)[:, :cols]
        assert operands[name].stride(0) * operands[name].element_size() % 32 == 16
    request = validate_front(registry.model, **operands)
    emulate_plan(registry, request, case.plan(registry.model), Options("random", 0, "wide"))
    assert compare(registry.model, case, operands)[1] == []


def written(model: Model, tps: tuple[int, ...], folder: Path) -> Registry:
    """The programs of a model for one Blackwell part, written for a test."""
    model = dataclasses.replace(model, targets=(Target(ARCH, tps, (8,)),), hopper=None, max_tokens=512)
    write_exports(folder, [render_tree(model, model.name)])
    return load_registry(folder / model.name)


def test_widths_may_end_inside_a_tile(tmp_path: Path) -> None:
    """640 latent columns are 2 tiles and a half, whose other half is empty; 64 gate columns half a shared tile."""
    registry = written(tiny_ragged_model(), (16,), tmp_path)
    assert run_case(registry, front(200, 8, 16), (("random", 0),))[0] == "clean"


def test_other_tp_degrees_are_clean(registry: Registry, tmp_path: Path) -> None:
    """The tree has TP 1, 4 and 8; one of 2 is written."""
    assert run_case(registry, front(129, 6, 4), (("late", 0),))[0] == "clean"
    assert run_case(registry, front(250, 10, 1), (("random", 1),))[0] == "clean"
    assert run_case(written(tiny_model(), (2,), tmp_path), front(130, 8, 2), (("early", 0),))[0] == "clean"
