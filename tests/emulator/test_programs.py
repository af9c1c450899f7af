"""Every program of the small model against the reference, under both extremes and one seed of four.

A quick run takes the keys of each body with the narrowest and the widest token tile, under a seed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.emulator.bodies import SMALL, quick_keys
from support.emulator.schedules import same_under_all_schedules, spelled
from support.models import hopper, tiny_model, tiny_quarters_model, with_tile

from cakegen.emulator.launches.cases import Case, find_case
from cakegen.errors import EmulationError
from cakegen.plan import GemmForm, partials_elems
from cakegen.registry import Registry, load_registry

ARCH = "sm_90a"
QUICK = quick_keys(SMALL, ARCH)
# Of the others: the degrees of one tile share a program; the tiles between the widest and the narrowest run the two
# cheapest of them.
BETWEEN = re.compile(r"n(240|224|192|176|144)@")
FEW = ("front:i128", "front:i64", "tail_gemm:tp8", "tail_gemm:tp16")
KEYS = [
    key
    for key in load_registry(SMALL).kernels
    if key.endswith(f"@{ARCH}") and (key in QUICK or not BETWEEN.search(key) or key.startswith(FEW))
]
# So many seeds take every style of the random schedule; one program after another takes the next of them.
SEEDS = 4
# Three row tiles, the last of one row
FEW_TOKENS = 257

pytestmark = pytest.mark.emulator


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The reference's products are small; workers side by side would only fight over processors."""
    torch.set_num_threads(1)


def request_of(registry: Registry, key: str) -> Case:
    """The request that is found; where it has thousands of tokens, one of few that takes the key's tile anyway."""
    case = find_case(registry, key)
    tiles = hopper(registry.model).prefill.tiles if case.tokens > FEW_TOKENS else ()
    few = (dataclasses.replace(case, tokens=FEW_TOKENS, tile=tile) for tile in tiles)
    return next((each for each in few if each.plan(registry.model).launches[-1].key == key), case)


def runs() -> Iterator[Any]:
    """Keys and extremes: the quick keys without, and all with both, which is `thorough`."""
    for key in KEYS:
        if key in QUICK:
            yield pytest.param(key, ())
        yield pytest.param(key, ("early", "late"), marks=pytest.mark.thorough)


@pytest.mark.parametrize(("key", "extremes"), list(runs()), ids=spelled)
def test_program_matches_the_reference_whatever_the_schedule(
    registry: Registry, key: str, extremes: tuple[str, ...]
) -> None:
    same_under_all_schedules(registry, request_of(registry, key), extremes=extremes, seed=KEYS.index(key) % SEEDS)


@pytest.mark.parametrize(
    "case",
    [
        Case("front", 4, 200),
        Case("tail", 2, 400, partials=2, sm_count=6, rank=1),
    ],
    ids=["front", "tail"],
)
def test_cut_tiles_are_summed_by_the_last_segment(registry: Registry, case: Case) -> None:
    launches = case.plan(registry.model).launches
    assert any(partials_elems(launch) for launch in launches), "the plan must cut tiles"
    same_under_all_schedules(registry, case)


def test_aligned_quarters_follow_whole_tiles(registry: Registry) -> None:
    model, case = tiny_quarters_model(256), Case("front", 8, 200, sm_count=8)
    parameters = dict(case.plan(model).launches[-1].parameters)
    assert [parameters[name] for name in ("full_items", "sk_ipc", "sk_max_seg", "sk_total")] == [4, 2, 4, 8]
    same_under_all_schedules(dataclasses.replace(registry, model=model), case)


@pytest.mark.parametrize("case", [Case("front", 8, 256, sm_count=6), Case("tail", 1, 400, sm_count=6)], ids=str)
def test_warpgroups_take_turns_over_several_narrow_tiles(registry: Registry, case: Case) -> None:
    narrow = with_tile(tiny_model(), 128)
    gemm = case.plan(narrow).launches[-1]
    assert isinstance(gemm.form, GemmForm)
    assert gemm.form.tile_groups == 1
    assert dict(gemm.parameters)["num_items"] > gemm.grid_ctas[0], "a cluster must run more than two items"
    same_under_all_schedules(dataclasses.replace(registry, model=narrow), case)


@pytest.mark.parametrize("tokens", [1, 9, 40])
@pytest.mark.parametrize("stage", ["front", "tail"])
def test_hopper_arithmetic_stays_within_tolerance(registry: Registry, stage: str, tokens: int) -> None:
    same_under_all_schedules(registry, Case(stage, 4, tokens, rank=3 if stage == "tail" else 0), "hopper")


def test_find_case_refuses_what_is_no_key(registry: Registry) -> None:
    with pytest.raises(EmulationError, match="'decode:nothing' is no sm_90a key of tiny_latent_moe"):
        find_case(registry, "decode:nothing")


def test_tensors_of_another_device_are_refused(registry: Registry) -> None:
    from cakegen.emulator import emulate_plan
    from cakegen.emulator.launches.cases import make_operands
    from cakegen.runtime.validate import validate_front

    case = Case("front", 8, 1)
    request = validate_front(registry.model, **make_operands(registry.model, case))
    elsewhere = dataclasses.replace(request, device=torch.device("meta"))
    with pytest.raises(EmulationError, match="works on CPU tensors; got meta"):
        emulate_plan(registry, elsewhere, case.plan(registry.model))
