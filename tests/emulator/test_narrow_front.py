"""Hopper's decode front in narrow tiles: every box of weights lies inside its tensor, the last of a class too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.emulator.copied_boxes import record_boxes
from support.models import hopper

from cakegen.emulator import Fault, Options
from cakegen.emulator.launches.cases import Case, emulate_case
from cakegen.plan import DecodeForm
from cakegen.registry import Registry

pytestmark = pytest.mark.emulator

WEIGHTS = {"gate_weight", "down_weight", "shared_gate_up_weight"}


# 64 rows of shared_act are 1.3 halves of 96-row tiles, 128 are 2.7, 512 latent columns 5.3 tiles
@pytest.mark.parametrize("case", [Case("front", 16, 1), Case("front", 8, 33)], ids=lambda case: f"tp {case.tp}")
def test_last_tile_of_a_class_loads_whole_boxes(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    form = case.plan(registry.model).launches[0].form
    assert isinstance(form, DecodeForm)
    assert form.block_m == hopper(registry.model).decode.front.narrow.block_m
    boxes = record_boxes(monkeypatch, WEIGHTS)
    assert emulate_case(registry, case, Options("random", 0, "wide")).problems == ()
    assert {box.name for box in boxes} == WEIGHTS
    assert [box for box in boxes if not 0 <= box.first < box.end <= box.extent] == []


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("    clear_pads<Cfg>(smem);\n", "", "unwritten-read"),
        ("staging + (tile.first - tile.row) * elem_bytes", "staging", "wrong values"),
        # the rows past a half are pushed too: more bytes than the partner awaits
        ("in_half = 16 * warp < Cfg::kBlockM / 2", "in_half = true", "race"),
    ],
    ids=["rows behind the weights", "first own row", "rows past a half"],
)
def test_planted_fault_is_caught(
    registry: Registry, planted: Callable[..., Any], old: str, new: str, kind: str
) -> None:
    found = set()
    for seed in range(4):
        try:
            options = Options("random", seed, "wide")
            report = emulate_case(registry, Case("front", 8, 5), options, load=planted(old, new))
            found.add("wrong values" if report.problems else "passes")
        except Fault as fault:
            found.add(fault.kind)
    assert kind in found
    assert "passes" not in found
