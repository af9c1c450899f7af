"""The Hopper tail GEMM that normalises its rows: one value under every schedule, and each missing fence is reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.emulator.schedules import proof_and_others, spelled
from support.models import hopper, tiny_model

from cakegen.emulator import Fault, Options
from cakegen.emulator.launches.cases import Case, emulate_case
from cakegen.model import Model
from cakegen.plan import GemmForm, Plan
from cakegen.registry import Registry
from cakegen.rules import HopperTile

pytestmark = pytest.mark.emulator

SCHEDULES = (("early", 0), ("late", 0), ("random", 0), ("random", 1))
TILES = {tile.block_n: tile for tile in hopper(tiny_model()).prefill.tiles}


@dataclass(frozen=True)
class FusedCase(Case):
    """A tail of one partial, on 6 SMs; `first_rows` are normalised first, whatever the plan says.

    A runner that is called `times` times has the same control words in each call.
    """

    first_rows: int = 0
    times: int = 1

    def plan(self, model: Model) -> Plan:
        """Its plan."""
        plan = super().plan(model)
        (gemm,) = plan.launches
        assert isinstance(gemm.form, GemmForm)
        assert gemm.form.fused_norm
        parameters = {**dict(gemm.parameters), "norm_first_rows": self.first_rows}
        gemm = dataclasses.replace(gemm, parameters=tuple(parameters.items()))
        return dataclasses.replace(plan, launches=(gemm,) * self.times)


def fused(tp: int, tokens: int, block_n: int, first_rows: int = 0, times: int = 1) -> FusedCase:
    tile: HopperTile = TILES[block_n]
    return FusedCase("tail", tp, tokens, 1, 6, tp - 1, tile=tile, first_rows=first_rows, times=times)


# Two or three pair rows, of which the MMA warps normalise none, some or all; the last is not full, and lacks its second
# row tile but for one case. At TP 16 the slice ends inside a K block.
CASES = {
    "none first": fused(2, 300, 256),
    "some first": fused(8, 700, 256, 256),
    "all first": fused(8, 300, 256, 2048),
    "ragged, none first": fused(16, 300, 192),
    "ragged, some first": fused(16, 520, 224, 300),
    "cut, none first": fused(4, 513, 224),
    "cut, all first": fused(8, 300, 192, 2048),
    "called twice": fused(16, 300, 256, 100, times=2),
}


def is_cut(registry: Registry, case: Case) -> bool:
    return dict(case.plan(registry.model).launches[-1].parameters)["sk_total"] > 0


@pytest.mark.parametrize("schedules", [SCHEDULES[1:3], pytest.param(SCHEDULES, marks=pytest.mark.thorough)], ids=len)
@pytest.mark.parametrize("name", CASES)
def test_fused_norm_gives_the_same_bits_under_every_schedule(
    registry: Registry, name: str, schedules: tuple[tuple[str, int], ...]
) -> None:
    case = CASES[name]
    assert is_cut(registry, case) == name.startswith("cut"), case.plan(registry.model).launches[-1].parameters
    first = None
    for schedule in schedules:
        report = emulate_case(registry, case, Options(*schedule, "wide"))
        assert report.problems == ()
        assert len(report.launches) == case.times
        first = first or report
        for output, value in report.outputs.items():
            assert torch.equal(value, first.outputs[output]), f"{output} depends on the schedule"


TWO_ROWS = fused(16, 300, 256)
# Its first cluster has tiles of two pair rows.
THREE_ROWS = fused(16, 520, 256)
SOME_FIRST = fused(16, 300, 256, 100)
TWICE = fused(16, 300, 256, times=2)
# The last row tile, of 4 rows, also loads 124 of the pair row before. With a row in it for each warp that normalises,
# its counter would stand for those too: a warp counts its rows in order.
FOUR_LAST = fused(16, 260, 256)
WRITTEN = "fence_proxy_async_global();\n        warp_sync();\n        if (lane == 0)"
WAIT = "counter_wait_reached(norm.counters + pair_row, rows, watch);"
RESET = "st_relaxed_gpu(norm.counters + pair_row, 0);"
ROWS = "const u32 rows = min(kPairRows<Cfg>, norm.num_tokens - pair_row * kPairRows<Cfg>);"
LEFT = "atomic_inc_acq_rel_gpu(left, gridDim.x - 1) == gridDim.x - 1"

# Rows that are copied before they are there.
EARLY = {"race", "unwritten-read", "proxy"}

# Every schedule reports one of the kinds.
PLANTED: dict[str, tuple[Case, str, str, set[str]]] = {
    "writes not fenced": (TWO_ROWS, WRITTEN, WRITTEN.split("\n", 1)[1], {"proxy"}),
    "first rows not fenced": (SOME_FIRST, WRITTEN, WRITTEN.split("\n", 1)[1], {"proxy"}),
    "lanes not waited for": (TWO_ROWS, WRITTEN, WRITTEN.replace("        warp_sync();\n", ""), {"race"}),
    "relaxed count": (TWO_ROWS, "red.release.gpu", "red.relaxed.gpu", {"race"}),
    "relaxed wait": (TWO_ROWS, "ld.acquire.gpu", "ld.relaxed.gpu", {"race"}),
    "no wait": (TWO_ROWS, WAIT, "", EARLY),
    "wait for the first pair row only": (
        THREE_ROWS,
        "if (last == known)",
        "if (known != ~0u)",
        EARLY,
    ),
    "no wait for the pair row before": (
        FOUR_LAST,
        "pair_row = tile.loaded / kPairRows<Cfg>;",
        "pair_row = last;",
        EARLY,
    ),
    "another pair row's counter": (
        TWO_ROWS,
        "norm.counters + row / kPairRows<Cfg>, 1",
        "norm.counters, 1",
        EARLY | {"deadlock"},
    ),
    "a row too few": (TWO_ROWS, ROWS, ROWS.replace(");", ") - 1;"), EARLY | {"deadlock"}),
    "a row too many": (TWO_ROWS, ROWS, ROWS.replace(");", ") + 1;"), {"deadlock"}),
    "no reset": (TWO_ROWS, RESET, "", {"output"}),
    "no reset, called twice": (TWICE, RESET, "", EARLY | {"deadlock"}),
    "reset by the first": (TWO_ROWS, LEFT, LEFT.replace("== gridDim.x - 1", "== 0"), {"deadlock", "output"}),
    "reset of one CTA too many": (TWO_ROWS, LEFT, LEFT.replace("left, gridDim.x - 1", "left, gridDim.x"), {"output"}),
}


@pytest.mark.parametrize(
    ("name", "schedule"), [each for name in PLANTED for each in proof_and_others(name, SCHEDULES[:3])], ids=spelled
)
def test_planted_fault_of_the_fused_norm_is_reported(
    registry: Registry, planted: Callable[..., Any], name: str, schedule: tuple[str, int]
) -> None:
    case, old, new, kinds = PLANTED[name]
    with pytest.raises(Fault) as caught:
        emulate_case(registry, case, Options(*schedule, "wide"), load=planted(old, new))
    assert caught.value.kind in kinds, caught.value
