"""Clocks and sync points by themselves: what is known, to whom, by which scope."""

from __future__ import annotations

import numpy as np
import pytest

from cakegen.emulator.order.shadow import Shadow
from cakegen.emulator.order.vector_clock import (
    CLUSTER,
    CTA,
    EXECUTED,
    GPU,
    VISIBLE,
    Position,
    SyncPoint,
    VectorClock,
)

HERE, PARTNER, ELSEWHERE = Position(0, 0), Position(1, 0), Position(2, 1)


def sender(slot: int = 3, time: int = 5) -> VectorClock:
    clock = VectorClock(slot, 1)
    clock.learn(slot, time)
    return clock


def test_join_of_clocks_of_different_windows_keeps_both() -> None:
    clock = sender(10, 4)
    clock.join(sender(2, 7))
    clock.join(sender(10, 3))
    assert clock.knows(VISIBLE, 2, 7)
    assert not clock.knows(VISIBLE, 2, 8)
    assert clock.knows(EXECUTED, 10, 4)
    assert clock.time_of(2, VISIBLE) == 7
    assert clock.time_of(99, EXECUTED) == 0
    assert not clock.knows(VISIBLE, 99, 1)


@pytest.mark.parametrize(
    ("released", "reader", "acquired", "visible"),
    [
        (CTA, HERE, CTA, True),
        (CTA, PARTNER, GPU, False),
        (CLUSTER, PARTNER, CLUSTER, True),
        (CLUSTER, PARTNER, CTA, False),
        (CLUSTER, ELSEWHERE, GPU, False),
        (GPU, ELSEWHERE, GPU, True),
        (GPU, ELSEWHERE, CLUSTER, False),
        (GPU, HERE, CTA, True),
    ],
)
def test_edge_needs_both_scopes_to_hold_both_threads(
    released: int, reader: Position, acquired: int, visible: bool
) -> None:
    point, clock = SyncPoint(), VectorClock(0, 1)
    point.release(sender(), HERE, released)
    point.acquire(clock, reader, acquired)
    assert clock.knows(VISIBLE, 3, 5) == visible
    assert clock.knows(EXECUTED, 3, 5), "that the accesses were performed is known whatever the scopes"


def test_relaxed_wait_knows_only_that_accesses_were_performed() -> None:
    point, clock = SyncPoint(), VectorClock(0, 1)
    point.release(sender(), HERE, GPU)
    point.observe(clock)
    assert clock.knows(EXECUTED, 3, 5)
    assert not clock.knows(VISIBLE, 3, 5)


def test_copy_of_a_point_does_not_learn_what_comes_later() -> None:
    point = SyncPoint()
    point.release(sender(3, 5), HERE, CTA)
    passed = point.copy()
    point.release(sender(3, 9), HERE, CTA)
    clock = VectorClock(0, 1)
    passed.acquire(clock, HERE, CTA)
    assert clock.knows(VISIBLE, 3, 5)
    assert not clock.knows(EXECUTED, 3, 6)


def test_landing_for_the_cluster_is_not_seen_at_the_scope_of_a_cta() -> None:
    point, narrow, wide = SyncPoint(), VectorClock(0, 1), VectorClock(0, 1)
    point.land(7, 1, HERE, CLUSTER)
    point.acquire(narrow, HERE, CTA)
    point.acquire(wide, HERE, CLUSTER)
    assert not narrow.knows(VISIBLE, 7, 1)
    assert wide.knows(VISIBLE, 7, 1)


def test_narrow_access_refines_a_shadow_and_keeps_what_it_holds() -> None:
    shadow = Shadow(256, str, cta=0)
    shadow.views(16)[0][2] = 9
    writes, reads = shadow.views(2)
    assert np.flatnonzero(writes[:, 0]).tolist() == list(range(16, 24))
    assert not reads.any()
    lanes = shadow.lanes(4)
    assert lanes is not None
    assert lanes[0].shape == shadow.views(4)[0].shape
    assert shadow.views(16)[0].shape == (16, 8)
