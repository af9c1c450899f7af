"""Parts of a device that serve one after the other: a rate, and when it is free again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.machine.memory import Buffer
from cakegen.timing.figures import DeviceFigures

SECTOR_BYTES = 64
"""What HBM is read in."""


@dataclass(eq=False)
class Pipe:
    """Serves in the order of asking, `rate` units in a ns.

    Parameters
    ----------
    free
        When it is free, in ns.
    busy
        ns that it has worked.
    """

    rate: float
    free: float = 0.0
    busy: float = 0.0

    def take(self, at: float, amount: float) -> float:
        """Ask for something at a time; returns when it is done."""
        takes = amount / self.rate
        self.busy += takes
        self.free = max(at, self.free) + takes
        return self.free


def pipes_of(rate: float) -> defaultdict[Hashable, Pipe]:
    """A pipe of that rate for each place that is asked for."""
    return defaultdict(lambda: Pipe(rate))


@dataclass(eq=False)
class MemorySystem:
    """HBM, the L2 and what each SM takes in; knows which sectors the L2 holds, of which it drops none."""

    figures: DeviceFigures
    memory: Pipe = field(init=False)
    l2: Pipe = field(init=False)
    ingress: defaultdict[Hashable, Pipe] = field(init=False)
    read_bytes: int = 0
    missed_bytes: int = 0
    _held: dict[int, NDArray[np.bool_]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = Pipe(self.figures.memory_rate.value)
        self.l2 = Pipe(self.figures.l2_rate.value)
        self.ingress = pipes_of(self.figures.sm_ingress.value)

    def fetch(self, at: float, buffer: Buffer, sectors: NDArray[Any]) -> tuple[float, bool]:
        """Read sectors of an allocation; returns (when the L2 has sent the last, whether HBM served one)."""
        held = self._sectors(buffer)
        missing = int(sectors.size - np.count_nonzero(held[sectors]))
        self.read_bytes += int(sectors.size) * SECTOR_BYTES
        end = self.l2.take(at, sectors.size * SECTOR_BYTES)
        if missing:
            held[sectors] = True
            self.missed_bytes += missing * SECTOR_BYTES
            end = max(end, self.memory.take(at, missing * SECTOR_BYTES))
        return end, bool(missing)

    def write(self, at: float, buffer: Buffer, sectors: NDArray[Any]) -> float:
        """Write sectors, which the L2 then holds; returns when it has taken the last."""
        self._sectors(buffer)[sectors] = True
        return self.l2.take(at, sectors.size * SECTOR_BYTES)

    def next_launch(self) -> MemorySystem:
        """The same L2 before a launch of its own clock and account."""
        following = MemorySystem(self.figures)
        following._held = self._held
        return following

    def _sectors(self, buffer: Buffer) -> NDArray[np.bool_]:
        # two allocations may share bytes: each address counts once, by where it is in the host's memory
        if buffer.base not in self._held:
            self._held[buffer.base] = np.zeros(-(-buffer.num_bytes // SECTOR_BYTES) + 1, np.bool_)
        return self._held[buffer.base]


def sectors_of(offsets: NDArray[Any], width: int) -> NDArray[Any]:
    """The sectors of accesses of so many bytes at some offsets, each once."""
    first = np.asarray(offsets, np.int64) // SECTOR_BYTES
    if width > SECTOR_BYTES:
        first = (first[:, None] + np.arange(-(-width // SECTOR_BYTES))).ravel()
    return np.unique(first)
