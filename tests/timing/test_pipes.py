"""Parts that serve one after the other."""

from __future__ import annotations

import numpy as np

from cakegen.emulator.machine.memory import Buffer
from cakegen.timing.figures import load_device
from cakegen.timing.pipes import SECTOR_BYTES, MemorySystem, Pipe, sectors_of


def buffer(size: int = 1 << 16) -> Buffer:
    array = np.zeros(size, np.uint8)
    made = Buffer("weights", array.ctypes.data, size)
    made.keep = array  # type: ignore[attr-defined]
    return made


def test_a_pipe_serves_in_order_and_rests_where_nobody_asks() -> None:
    pipe = Pipe(rate=2.0)
    assert [pipe.take(0, 10), pipe.take(1, 10), pipe.take(100, 10)] == [5, 10, 105]
    assert pipe.busy == 15


def test_what_was_read_is_held() -> None:
    figures = load_device("h200")
    system, weights = MemorySystem(figures), buffer()
    sectors = np.arange(16)
    first, missed = system.fetch(0, weights, sectors)
    assert missed
    assert first == 16 * SECTOR_BYTES / figures.memory_rate.value
    second, missed = system.fetch(1000, weights, sectors)
    assert not missed
    assert second == 1000 + 16 * SECTOR_BYTES / figures.l2_rate.value
    assert (system.read_bytes, system.missed_bytes) == (32 * SECTOR_BYTES, 16 * SECTOR_BYTES)


def test_the_next_launch_finds_what_was_written_and_counts_anew() -> None:
    system, y = MemorySystem(load_device("h200")), buffer()
    system.write(0, y, np.array([3]))
    following = system.next_launch()
    assert following.fetch(0, y, np.array([3]))[1] is False
    assert following.fetch(0, y, np.array([3, 4]))[1] is True
    assert following.missed_bytes == SECTOR_BYTES
    assert following.memory.busy > 0 == system.memory.busy


def test_accesses_touch_their_sectors_once() -> None:
    assert sectors_of(np.array([0, 16, 63, 64, 130]), 1).tolist() == [0, 1, 2]
    assert sectors_of(np.array([128]), 256).tolist() == [2, 3, 4, 5]
