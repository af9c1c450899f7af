"""The timing loop, and what it needs of a clock. Imports errors and this package; no torch.

The loop is the protocol: arms alternate, what comes before a timed call is the same for each, and nothing waits until
all calls are enqueued.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from cakegen.bench.stats import Summary, summarise

Call = Callable[[], object]
"""Enqueues one call on the current stream."""

WARM_ROUNDS = 2
"""Rounds that are thrown away: clocks settle, and lazily loaded code arrives."""


class Clock(Protocol):
    """What a measurement needs of a device. Everything is enqueued in order on one stream."""

    @property
    def l2_bytes(self) -> int:
        """Size of the device's L2."""

    def capture(self, call: Call) -> Call:
        """The call in its deployment form; it has then run at least once."""

    def hold(self, microseconds: float) -> None:
        """Keep the device busy for so long, so that the host gets ahead of it."""

    def flush(self) -> None:
        """Fill the L2 with clean lines of something else."""

    def flush_dirty(self) -> None:
        """Fill the L2 with dirty lines; only to show what that costs the call behind it."""

    def timed(self, call: Call) -> None:
        """Run a call between two time stamps."""

    def settle(self) -> list[float]:
        """Wait for everything; microseconds of each timed call since the last time, in order."""


def time_alternating(
    arms: Mapping[str, Call], clock: Clock, rounds: int, before: Call | None = None
) -> dict[str, Summary]:
    """Time arms in turn, each call from a cold, clean L2.

    Parameters
    ----------
    arms
        Captured calls by name.
    clock
        The device.
    rounds
        Timed calls of each arm.
    before
        What stands in front of every timed call; the clean flush by default.

    Returns
    -------
    dict
        A summary for each arm. The order of the arms shifts by one each round, so that none always follows the same.
    """
    names = list(arms)
    clear = clock.flush if before is None else before
    order = [name for turn in range(WARM_ROUNDS + rounds) for name in _shifted(names, turn)]
    with _no_collection():
        clock.hold(HEAD_START_US)
        for name in order:
            clear()
            clock.timed(arms[name])
        samples = clock.settle()
    assert len(samples) == len(order), (len(samples), len(order))
    kept: dict[str, list[float]] = {name: [] for name in names}
    for name, sample in list(zip(order, samples, strict=True))[WARM_ROUNDS * len(names) :]:
        kept[name].append(sample)
    return {name: summarise(values) for name, values in kept.items()}


HEAD_START_US = 2000.0
"""Before a loop the device waits so long: the host enqueues the first rounds meanwhile, and stays ahead since a flush
takes longer than the host's three calls."""

ENQUEUE_US = 40.0
"""Upper estimate of the host's time for two events and a graph launch."""

MAX_HELD_CALLS = 200
"""The driver queues about a thousand operations a stream; a timed call without a flush takes three."""


def time_rotating(copies: Sequence[Call], clock: Clock, rounds: int) -> Summary:
    """Time one arm over copies of its weights in turn, with nothing in between.

    Together the other copies must exceed the L2 (`copies_for`), so that each call finds its own weights gone. The
    device is held until the host has enqueued everything; otherwise short calls would wait for the host.
    """
    turns = max(1, min(-(-rounds // len(copies)), MAX_HELD_CALLS // len(copies)))
    order = [call for _ in range(turns + 1) for call in copies]
    with _no_collection():
        clock.hold(ENQUEUE_US * len(order))
        for call in order:
            clock.timed(call)
        samples = clock.settle()
    return summarise(samples[len(copies) :])


MAX_COPIES = 32


def copies_for(weight_bytes: int, l2_bytes: int) -> int:
    """Copies of weights to rotate over, so that all but one exceed twice the L2; 0 where that takes too many."""
    copies = 2 + 2 * l2_bytes // weight_bytes
    return copies if copies <= MAX_COPIES else 0


def _shifted(names: list[str], turn: int) -> list[str]:
    start = turn % len(names) if names else 0
    return names[start:] + names[:start]


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection meanwhile: a pause of the host must not reach the device."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
