"""A block without a norm and without a gate: its programs against fp64, decode and prefill, on every architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.emulator.small_models import exported_small

from cakegen.emulator import Fault, Options
from cakegen.emulator.launches.cases import Case, emulate_case, emulate_chain
from cakegen.plan import DecodeForm, NormForm
from cakegen.plan.records import NormPlace
from cakegen.registry import Registry

pytestmark = pytest.mark.emulator


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return exported_small("tiny_relu2_moe", tmp_path_factory.mktemp("relu2"))


# of each architecture decode in pairs, by lone CTAs, of narrow tiles and of split tokens, and prefill
CASES = [
    Case("front", 1, 5, sm_count=132),
    Case("front", 8, 100, sm_count=132),
    Case("front", 8, 33, sm_count=6),
    Case("front", 8, 193, sm_count=6),
    Case("front", 1, 5, sm_count=148, arch="sm_100a"),
    Case("front", 8, 129, sm_count=148, arch="sm_100a"),
    Case("front", 8, 100, sm_count=6, arch="sm_103a"),
    Case("tail", 1, 5, sm_count=132),
    Case("tail", 8, 100, 3, sm_count=132, rank=7),
    Case("tail", 8, 193, 3, sm_count=6, rank=3),
    Case("tail", 1, 5, sm_count=6),
    Case("tail", 8, 5, 2, sm_count=148, rank=7, arch="sm_100a"),
    Case("tail", 8, 129, sm_count=148, arch="sm_100a"),
    Case("tail", 8, 129, 3, sm_count=6, rank=1, arch="sm_103a"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.stage} {case.tp} {case.tokens} {case.arch}")
def test_stage_matches_fp64(registry: Registry, case: Case) -> None:
    schedule = ("early", "random", "late")[CASES.index(case) % 3]
    report = emulate_case(registry, case, Options(schedule, 1, "wide"))
    assert report.problems == ()
    launches = case.plan(registry.model).launches
    if case.stage == "tail":
        assert [isinstance(launch.form, NormForm) for launch in launches] == [True] * (case.partials > 1) + [False]
    for form in (launch.form for launch in launches):
        if isinstance(form, DecodeForm):
            assert form.norm is NormPlace.NONE
            assert not form.gated


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("partials", [1, 3])
def test_tail_that_overlaps_the_front_before_it_matches_fp64(registry: Registry, arch: str, partials: int) -> None:
    case = Case("tail", 8, 5, partials, sm_count=132 if arch == "sm_90a" else 148, rank=2, arch=arch)
    report = emulate_chain(registry, case, Options("random", 3, "wide"))
    assert report.problems == ()


def test_partial_is_multiplied_where_it_lies(registry: Registry) -> None:
    """One partial needs neither a launch that adds it up nor memory for the sum."""
    (launch,) = Case("tail", 8, 5, rank=1).plan(registry.model).launches
    program = registry.program(launch.key)
    assert [entry.operand for entry in program.tensor_maps][-1] == "reduced"
    assert not program.launch.programmatic


PLANTED = {
    "a tile's second half": ("sums[half][i] = Cfg::Activation", "sums[0][i] = Cfg::Activation", Case("front", 8, 5)),
    "a partial too few": (
        "for (u32 partial = 1; partial < num_partials; ++partial)",
        "for (u32 partial = 1; partial + 1 < num_partials; ++partial)",
        Case("tail", 8, 5, 3),
    ),
    "a value that is 5 % off": (
        "bf16_low(cvt_rn_bf16x2(0.0f, up))",
        "bf16_low(cvt_rn_bf16x2(0.0f, up)) * 1.05f",
        Case("front", 8, 129, arch="sm_100a", sm_count=148),
    ),
    "the map of another class": (
        "TileClass::kShared ? maps.shared : maps.latent;",
        "TileClass::kShared ? maps.latent : maps.latent;",
        Case("front", 8, 5),
    ),
    "gate rows where there are none": (
        "kGated<Cfg> ? Cfg::kSharedCols : Cfg::kBlockN / 2}",
        "Cfg::kSharedCols}",
        Case("front", 1, 193, sm_count=6),
    ),
}


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.replace(" ", "_"))
def test_planted_fault_is_caught(registry: Registry, planted: Callable[..., Any], fault: str) -> None:
    old, new, case = PLANTED[fault]
    try:
        report = emulate_case(registry, case, Options("random", 0, "wide"), load=planted(old, new))
    except Fault:
        return
    assert report.problems
