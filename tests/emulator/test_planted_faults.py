"""Programs of the small model with one text changed: the emulator names each fault.

One schedule that catches a fault proves that it is caught; that the others catch it too is `thorough`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from support.models import tiny_model, with_tile

from cakegen.emulator import Fault, Options
from cakegen.emulator.launches.cases import Case, emulate_case
from cakegen.emulator.launches.launch import load_program
from cakegen.emulator.machine.adversary import STYLES
from cakegen.registry import Registry

FRONT = Case("front", 8, 5)
# more units than the weights that go ahead, so that stages are waited for
LONG_FRONT = Case("front", 8, 128)
TAIL = Case("tail", 1, 128, sm_count=6)
FULL_WAIT = "mbarrier_wait(smem + Cfg::kStageFullOffset + ring.stage * 8, ring.phase, watch);"
EMPTY_WAIT = "mbarrier_wait(smem + Cfg::kStageEmptyOffset + weights_ring.stage * 8, weights_ring.phase ^ 1, watch);"
Y_WAIT = "wait_for_y<Cfg>(norm, smem, watch);"
ALL = ("early", *(pytest.param(schedule, marks=pytest.mark.thorough) for schedule in ("late", "random")))


@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize(
    ("case", "old", "new", "kinds"),
    [
        # the weights would wait for a stage that the MMA warps free only after the next one, which needs y
        (TAIL, "unit + Cfg::kAheadOfY)", "unit + Cfg::kAheadOfY + 1)", {"deadlock"}),
        (FRONT, FULL_WAIT, "", {"unwritten-read", "pending-write", "race"}),
        (FRONT, "stage_bytes);", "stage_bytes + 16);", {"deadlock"}),
        (FRONT, "stage_bytes);", "stage_bytes - 16);", {"deadlock", "pending-write", "unwritten-read"}),
        (LONG_FRONT, "load.phase ^ 1, watch", "load.phase, watch", {"deadlock"}),
        (TAIL, EMPTY_WAIT, "", {"pending-read", "pending-write", "barrier", "race"}),
        (
            FRONT,
            "named_barrier_sync(Cfg::kMmaBarrier, 128);\n    store_staged<Cfg::kBlockM, ",
            "store_staged<Cfg::kBlockM, ",
            {"race"},
        ),
        (TAIL, Y_WAIT, "", {"unwritten-read", "race"}),
        (FRONT, "cluster_wait();", "", {"barrier", "exit", "race"}),
        (
            FRONT,
            "at.thread, out.latent, out.latent_pitch, tile.first,",
            "at.thread, out.latent, out.latent_pitch, tile.first + 8,",
            {"out-of-bounds", "output"},
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_planted_fault_is_caught(
    registry: Registry,
    planted: Callable[..., Any],
    schedule: str,
    case: Case,
    old: str,
    new: str,
    kinds: set[str],
) -> None:
    """Under both extremes, and by one of the random schedules of every style."""
    found = []
    for seed in range(len(STYLES) if schedule == "random" else 1):
        try:
            report = emulate_case(registry, case, Options(schedule, seed, "wide"), load=planted(old, new))
            found.append("wrong values" if report.problems else "passes")
        except Fault as fault:
            found.append(fault.kind)
    assert kinds & set(found), found
    assert set(found) <= kinds | {"passes"}, found


@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize("old", ["await_turn<Cfg>(count, at, smem, watch);", "pass_turn<Cfg>(at, smem);"])
def test_warpgroup_out_of_turn_is_caught(
    registry: Registry, planted: Callable[..., Any], schedule: str, old: str
) -> None:
    """16 iterations of a tile are more than two times round the ring of 6."""
    registry = dataclasses.replace(registry, model=with_tile(tiny_model(), 128))
    with pytest.raises(Fault) as caught:
        emulate_case(
            registry,
            Case("tail", 1, 400, sm_count=6),
            Options(schedule, 0, "wide"),
            load=lambda *which: planted(old, "")(*which) if which[1].startswith("tail_gemm") else load_program(*which),
        )
    assert caught.value.kind in {"race", "deadlock", "pending-write", "unwritten-read", "barrier", "pending-read"}


def test_deadlock_report_names_the_barriers_and_who_waits(registry: Registry, planted: Callable[..., Any]) -> None:
    load = planted("unit + Cfg::kAheadOfY)", "unit + Cfg::kAheadOfY + 1)")
    with pytest.raises(Fault) as caught:
        emulate_case(registry, TAIL, Options("random", 1, "wide"), load=load)
    text = str(caught.value)
    assert "of stage_empty[" in text
    assert "of stage_full[" in text
    assert "4 of 4 arrivals pending" in text
    assert "_kernel.cu:" in text


def test_ptx_with_a_dropped_wait_is_caught(registry: Registry, planted: Callable[..., Any]) -> None:
    """The consumer's first wait of the PTX itself: the instruction gives way to a constant."""
    old = "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p,"
    load = planted(old, "setp.eq.u32 p, 1, 1; // ", ptx=True)
    with pytest.raises(Fault) as caught:
        emulate_case(registry, FRONT, Options("late", 0, "wide"), load=load)
    assert caught.value.kind in ("pending-write", "unwritten-read", "barrier", "pending-read")
