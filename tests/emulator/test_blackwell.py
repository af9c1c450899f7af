"""Blackwell's programs on the emulator: the small model's against the reference, whatever the schedule."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.emulator.bodies import SMALL, quick_keys
from support.emulator.sweep import Sweep, cases_of, program_keys, read_rows, run_case
from support.models import changed, tiny_model, tiny_ragged_model

from cakegen import paths
from cakegen.emit import render_tree, write_exports
from cakegen.emulator import Fault, Options, emulate_calls, load_program
from cakegen.emulator.launches.cases import Case, compare, emulate_case, make_operands
from cakegen.emulator.text.translate import Program
from cakegen.model import Model, Target
from cakegen.registry import Registry, load_registry
from cakegen.runtime.validate import validate_front, validate_tail

Loader = Callable[[Registry, str, str], Program]
ARCH = "sm_100a"
TABLES = paths.exports_root().parent / "benchmarks/emulator"
SCHEDULES = (("late", 0), ("random", 0))
ONCE = Sweep(SMALL, ARCH, 0, False)
CASES = {key: case for key, (case,) in cases_of(load_registry(ONCE.export), ONCE).items()}
QUICK = quick_keys(SMALL, ARCH)

pytestmark = pytest.mark.emulator


def front(tp: int, tokens: int, sm_count: int = 148) -> Case:
    return Case("front", tp, tokens, sm_count=sm_count, arch=ARCH)


def tail(tp: int, tokens: int, partials: int, rank: int) -> Case:
    return Case("tail", tp, tokens, partials, 148, rank, ARCH)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The reference's products are small; workers side by side would only fight over processors."""
    torch.set_num_threads(1)


@pytest.mark.parametrize("key", QUICK)
def test_program_of_each_body_matches_the_reference(registry: Registry, key: str) -> None:
    """Values against fp64, `y` bit for bit, scopes as the ISA has them."""
    assert run_case(registry, CASES[key], SCHEDULES[1:], scopes="strict")[0] == "clean"


@pytest.mark.thorough
@pytest.mark.parametrize("key", CASES)
def test_program_matches_the_reference_whatever_the_schedule(registry: Registry, key: str) -> None:
    """Of every key, and with the same bits under another schedule."""
    assert run_case(registry, CASES[key], SCHEDULES, scopes="strict")[0] == "clean"


def written(model: Model, tps: tuple[int, ...], folder: Path) -> Registry:
    """The tree of a model for one Blackwell part, written for a test."""
    model = dataclasses.replace(model, targets=(Target(ARCH, tps, (148,)),), hopper=None)
    write_exports(folder, [render_tree(model, model.name)])
    return load_registry(folder / model.name)


def test_slices_that_end_inside_a_chunk_are_shared_by_a_pair(tmp_path: Path) -> None:
    """No slice of the small model's does: another model's."""
    registry = written(tiny_ragged_model(), (4,), tmp_path)
    for case in (tail(4, 3, 1, 1), tail(4, 16, 1, 3), tail(4, 40, 2, 2)):
        (launch,) = case.plan(registry.model).launches
        assert (launch.form.k1_ragged_cols, launch.form.cluster_ctas) == (32, 2)
        assert run_case(registry, case, SCHEDULES)[0] == "clean"


def test_each_of_a_pair_may_finish_half_of_the_tokens(tmp_path: Path) -> None:
    """No export sets it for Blackwell; a model may."""
    tiny = tiny_model()
    halves = changed(tiny, blackwell__decode__split_finalize_n_pad=32)
    registry = written(halves, (1, 4), tmp_path)
    for case in (front(4, 20), front(4, 128), tail(4, 33, 2, 1), tail(1, 127, 1, 0)):
        (launch,) = case.plan(registry.model).launches
        assert launch.form.split_finalize
        assert launch.form.landing_alias == (launch.form.n_pad == 128)
        assert run_case(registry, case, SCHEDULES)[0] == "clean"


def test_program_of_the_other_architecture_gives_the_same_bits(registry: Registry) -> None:
    """One text, and the emulator's arithmetic is one: what differs is the target that the compiler is given."""
    for case in (front(8, 8), tail(4, 16, 1, 1), front(8, 129), tail(8, 129, 1, 1), tail(1, 129, 2, 0)):
        outputs = [
            emulate_case(registry, dataclasses.replace(case, arch=arch), Options("random", 1, "wide")).outputs
            for arch in (ARCH, "sm_103a")
        ]
        for name, value in outputs[0].items():
            assert torch.equal(value, outputs[1][name]), name


def run_layers(registry: Registry, tokens: int, schedule: tuple[str, int], load: Loader | None = None) -> None:
    """Two layers in one stream, every launch programmatic; the outputs must be right."""
    model, first, second = registry.model, front(8, tokens), tail(8, tokens, 1, 3)
    of_front, of_tail = make_operands(model, first), make_operands(model, second)
    of_tail["shared_act"] = of_front["shared_act"]
    calls = [
        (validate_front(model, **of_front), first.plan(model)),
        (validate_tail(model, **of_tail, tp=8, rank=3), second.plan(model)),
    ]
    emulate_calls(registry, [*calls, *calls], Options(*schedule, "wide"), overlap=True, load=load)
    assert compare(model, first, of_front)[1] == []
    assert compare(model, second, of_tail)[1] == []


@pytest.mark.parametrize("schedule", [("late", 0), ("random", 1)], ids=str)
@pytest.mark.parametrize("tokens", [8, 16, 128])
def test_layers_that_overlap_are_clean(registry: Registry, tokens: int, schedule: tuple[str, int]) -> None:
    """Every program waits before it touches what an earlier launch may still use."""
    run_layers(registry, tokens, schedule)


def test_producer_that_does_not_wait_for_the_front_is_reported(
    registry: Registry, planted: Callable[..., Loader]
) -> None:
    staged = "    if constexpr (Cfg::kStagedRows) {\n        load_staged_rows"
    broken = planted(f"    griddepcontrol_wait();\n{staged}", staged)

    def load(registry: Registry, key: str, arch: str) -> Program:
        role = registry.program(key).role
        return (broken if role == "decode_tail" else load_program)(registry, key, arch)

    with pytest.raises(Fault) as caught:
        run_layers(registry, 16, ("late", 0), load)
    assert caught.value.kind in ("programmatic", "unwritten-read")
    assert "shared_act" in caught.value.message


def table_rows(export: str) -> list[dict[str, str]]:
    rows = [row for file in sorted(TABLES.glob("*.tsv")) for row in read_rows(file)]
    return [row for row in rows if (row["export"], row["arch"]) == (export, ARCH)]


@pytest.mark.parametrize(("export", "match"), [("tiny_latent_moe", ""), ("kimi_k3_latent_moe", "^decode:")])
def test_committed_tables_hold_every_key_and_are_clean(export: str, match: str) -> None:
    """`make emulate-full` writes them; it runs what is missing, and what was written of other texts."""
    rows = table_rows(export)
    assert {row["key"] for row in rows if re.search(match, row["key"])} == set(
        program_keys(load_registry(export), ARCH, match)
    )
    assert {row["verdict"] for row in rows} == {"clean"}


def test_table_of_prefill_at_full_size_says_what_it_lacks() -> None:
    """Both SM counts of each key; the page says how many of them were run."""
    sweep = Sweep("kimi_k3_latent_moe", ARCH, 0, False, "^(front|tail)", parts=True)
    wanted = {
        (key, str(case.sm_count))
        for key, cases in cases_of(load_registry(sweep.export), sweep).items()
        for case in cases
    }
    found = {(row["key"], row["sms"]) for row in table_rows(sweep.export) if re.search(sweep.match, row["key"])}
    assert found <= wanted
    page = (TABLES / "README.md").read_text()
    assert f"{len(found)} of {len(wanted)} requests" in " ".join(page.split())
    lacking = sorted(wanted - found)
    if lacking:
        names = ", ".join(f"{key} on {sms} SMs" for key, sms in lacking)
        pytest.skip(f"{len(lacking)} requests of the full size were not run; `make emulate-full` does: {names}")
