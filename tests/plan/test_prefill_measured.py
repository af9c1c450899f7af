"""Plans of the Hopper prefill GEMMs against what each of their tiles took on a device (`cakegen tune --tiles`)."""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models import hopper, kimi_k3_model, with_tile

import cakegen
from cakegen.model import DeviceFacts, Model
from cakegen.plan import GemmForm, plan_route

FILE = Path(cakegen.__file__).resolve().parents[1] / "benchmarks" / "h200" / "tiles.tsv"
WITHIN = 1.05
"""Cards, and a card's rows from run to run, differ by so much."""
WITHIN_IN_THE_MEAN = 1.015

Request = tuple[str, int, int]
Tiles = tuple[int, int, int]
"""Columns of a tile, whole tiles, iterations of an item of the cut tiles (0: none is cut)."""


@functools.cache
def measured() -> dict[Request, dict[Tiles, float]]:
    """Microseconds of each request by its tiles."""
    found: dict[Request, dict[Tiles, float]] = {}
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    for row in csv.DictReader(lines, delimiter="\t"):
        request = row["stage"], int(row["tp"]), int(row["tokens"])
        tiles = int(row["block_n"]), int(row["full_items"]), int(row["sk_ipc"])
        found.setdefault(request, {})[tiles] = float(row["us"])
    return found


def tiles_of(model: Model, device: DeviceFacts, request: Request) -> Tiles | None:
    """None: decode serves it."""
    stage, tp, tokens = request
    launch = plan_route(model, stage=stage, tp=tp, tokens=tokens, partials=1, device=device).launches[-1]
    if not isinstance(launch.form, GemmForm):
        return None
    parameters = dict(launch.parameters)
    return launch.form.block_n, parameters["full_items"], parameters["sk_ipc"] if parameters["sk_total"] else 0


def losses(device: DeviceFacts) -> Iterator[tuple[Request, float]]:
    """How many times the fastest tile's time the chosen one takes, of each request."""
    for request, times in measured().items():
        chosen = tiles_of(kimi_k3_model(), device, request)
        assert chosen in times, f"{request}: {chosen} was not measured: `cakegen tune --tiles`"
        yield request, times[chosen] / min(times.values())


def test_what_was_measured_is_what_each_tile_is_planned_as(h200: DeviceFacts) -> None:
    widths = [tile.block_n for tile in hopper(kimi_k3_model()).prefill.tiles]
    assert len(measured()) >= 90
    for request, times in measured().items():
        assert set(times) == {tiles_of(with_tile(kimi_k3_model(), width), h200, request) for width in widths}


def test_chosen_tile_is_among_the_fastest(h200: DeviceFacts) -> None:
    slow = {request: loss for request, loss in losses(h200) if loss > WITHIN}
    assert not slow


def test_chosen_tiles_are_the_fastest_in_the_mean(h200: DeviceFacts) -> None:
    found = [loss for _, loss in losses(h200)]
    assert math.exp(sum(map(math.log, found)) / len(found)) <= WITHIN_IN_THE_MEAN


@pytest.mark.parametrize("stage", ["front", "tail"])
def test_each_width_is_the_fastest_somewhere(stage: str) -> None:
    """A tile that never wins would be a program too many."""
    best = {
        min(times, key=lambda tiles: times[tiles])[0] for request, times in measured().items() if request[0] == stage
    }
    assert len(best) >= 4
    everywhere = {min(times, key=lambda tiles: times[tiles])[0] for times in measured().values()}
    assert everywhere == {tile.block_n for tile in hopper(kimi_k3_model()).prefill.tiles}
