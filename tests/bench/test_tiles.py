"""Times of prefill's tiles: each is forced, checked and timed, and the table says which one a plan takes."""

from __future__ import annotations

import csv
import dataclasses

import pytest
import torch
from support.bench.fakes import FakeClock
from support.models import changed, hopper, with_tile

from cakegen.bench.rows import Row
from cakegen.bench.tiles import COLUMNS, TileTime, render_tiles, time_tiles
from cakegen.registry import Registry, load_registry

ROW = Row("tail", 16, 400)
PROVENANCE = dict.fromkeys(("device", "sm_count", "date", "commit", "driver", "nvrtc", "torch"), "as found")


@pytest.fixture
def two_tiles() -> Registry:
    """The small model with the first and the last tile; a plan takes the last."""
    registry = load_registry("tiny_latent_moe")
    tiles = hopper(registry.model).prefill.tiles
    model = changed(registry.model, hopper__prefill__tiles=(tiles[0], tiles[-1]))
    return dataclasses.replace(registry, model=with_tile(model, tiles[-1].block_n))


def rehearse(registry: Registry, clock: FakeClock, *rows: Row) -> list[list[TileTime]]:
    """The times of each request, on the emulator."""
    return list(time_tiles(registry, rows, torch.device("cpu"), clock, repeats=1, backend="emulator"))


def rows_of_table(times: list[TileTime]) -> list[dict[str, str]]:
    text = render_tiles(times, PROVENANCE)
    assert text.startswith("# device: as found\n# sm_count: as found\n")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines, delimiter="\t"))


def test_each_tile_is_timed_in_turn_and_the_chosen_one_marked(two_tiles: Registry) -> None:
    clock = FakeClock()
    (times,) = rehearse(two_tiles, clock, ROW)
    assert [time.chosen for time in times] == [False, True]
    first, last = rows_of_table(times)
    assert tuple(first) == COLUMNS
    assert [(each["stage"], each["tp"], each["tokens"]) for each in (first, last)] == [("tail", "16", "400")] * 2
    widths = [tile.block_n for tile in hopper(two_tiles.model).prefill.tiles]
    assert [int(each["block_n"]) for each in (first, last)] == widths
    # two warm rounds, then one whose order begins with the first again: calls 5 and 6
    assert [each["us"] for each in (first, last)] == ["5", "6"]
    assert clock.events.count("flush") == 6


@pytest.mark.parametrize("tokens", [64, 300])
def test_what_decode_serves_has_no_tile(two_tiles: Registry, tokens: int) -> None:
    """One CTA multiplies 64 tokens; two split 300."""
    assert rehearse(two_tiles, FakeClock(), Row("tail", 4, tokens)) == []
