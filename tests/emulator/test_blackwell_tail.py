"""Blackwell's prefill tail on the emulator: ends of row tiles, ragged slices, fused and staged forms, planted faults.

`test_blackwell.py` runs every key of the small model's export.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.emulator.sweep import run_case
from support.models import tiny_ragged_model

from cakegen.emit import render_tree, write_exports
from cakegen.emulator import Fault, Options, emulate_calls, load_program
from cakegen.emulator.launches.cases import Case, compare, emulate_case, make_operands
from cakegen.emulator.text.translate import Program
from cakegen.model import Model, Target
from cakegen.plan import GemmForm
from cakegen.registry import Registry, load_registry
from cakegen.runtime.validate import validate_front, validate_tail

Loader = Callable[[Registry, str, str], Program]
ARCH = "sm_100a"
SCHEDULES = (("late", 0), ("random", 1))

pytestmark = pytest.mark.emulator


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The reference's products are small; workers side by side would only fight over processors."""
    torch.set_num_threads(1)


def tail(tp: int, tokens: int, partials: int = 1, rank: int = 0, sm_count: int = 148) -> Case:
    return Case("tail", tp, tokens, partials, sm_count, rank, ARCH)


def form_of(registry: Registry, case: Case) -> GemmForm:
    form = case.plan(registry.model).launches[-1].form
    assert isinstance(form, GemmForm)
    return form


def written(model: Model, tps: tuple[int, ...], folder: Path) -> Registry:
    """The prefill tree of a model for one Blackwell part, written for a test."""
    model = dataclasses.replace(model, targets=(Target(ARCH, tps, (148,)),), hopper=None, max_tokens=600)
    write_exports(folder, [render_tree(model, model.name)])
    return load_registry(folder / model.name)


@pytest.mark.parametrize(
    "case",
    [
        tail(1, 256, 2),
        tail(4, 257, 3, rank=1),
        tail(8, 384, 1, rank=5),
        tail(8, 385, 2, rank=2),
        tail(8, 513, 1, rank=7, sm_count=8),
    ],
    ids=str,
)
def test_ends_of_row_tiles_are_right(registry: Registry, case: Case) -> None:
    """The second CTA of the last pair row has all of its rows, some, one, or none."""
    assert run_case(registry, case, SCHEDULES)[0] == "clean"


@pytest.mark.parametrize("case", [tail(1, 129, 2), tail(1, 257, 1, sm_count=6)], ids=["fused", "apart"])
def test_bits_are_the_same_whatever_the_schedule(registry: Registry, case: Case) -> None:
    """Of tiles of three and four segments, whoever comes last; and of rows that other CTAs normalise."""
    assert dict(case.plan(registry.model).launches[-1].parameters)["sk_max_seg"] > 2
    schedules = (("early", 0), ("late", 0), *(("random", seed) for seed in range(5)))
    assert run_case(registry, case, schedules)[0] == "clean"


def test_program_assumes_no_more_order_than_programs_widely_do(registry: Registry) -> None:
    """`practice` beside the other tests' `strict`: the same bits."""
    case = tail(8, 129, rank=1)
    outputs = [
        emulate_case(registry, case, Options("random", 2, "wide", tensor_order=order)).outputs
        for order in ("strict", "practice")
    ]
    assert torch.equal(outputs[0]["out"], outputs[1]["out"])


@pytest.mark.parametrize(("tp", "rank"), [(2, 1), (4, 3)])
def test_slice_that_ends_inside_a_block_and_a_half_tile_of_columns(tmp_path: Path, tp: int, rank: int) -> None:
    """640 latent columns / TP 4 = 2.5 blocks; 640 hidden columns = 2.5 tiles."""
    ragged = tiny_ragged_model()
    model = dataclasses.replace(ragged, dims=dataclasses.replace(ragged.dims, hidden=640))
    registry = written(model, (tp,), tmp_path)
    case = tail(tp, 200, 2, rank)
    form = form_of(registry, case)
    assert (form.k1_ragged_cols, form.staged_store) == (32 if tp == 4 else 0, True)
    assert run_case(registry, case, SCHEDULES)[0] == "clean"


def only_gemm(broken: Loader) -> Loader:
    """Every other program as it is."""

    def load(registry: Registry, key: str, arch: str) -> Program:
        return (broken if key.startswith("tail_gemm") else load_program)(registry, key, arch)

    return load


@pytest.mark.parametrize("case", [tail(1, 129), tail(8, 300), tail(1, 257, sm_count=6)], ids=str)
def test_staged_store_has_the_bits_of_direct_ones(
    registry: Registry, planted: Callable[..., Loader], case: Case
) -> None:
    """Fused and apart; whole tiles, and cut ones that cross tiles."""
    assert form_of(registry, case).staged_store
    direct = planted("is_last = works.is_last(watch);", "is_last = false;")

    options = Options("random", 0, "wide")
    staged = emulate_case(registry, case, options)
    stored = emulate_case(registry, case, options, load=only_gemm(direct))
    assert staged.problems == stored.problems == ()
    for name, value in staged.outputs.items():
        assert torch.equal(value, stored.outputs[name]), name


SLAB_STORE = "    fence_proxy_async_shared();\n    warp_sync();\n    if (at.lane == 0) {\n        const u32 row"
# of one fault: the request, the text without it and with it, and what the emulator may call it
FAULTS = {
    "loader that does not wait for the norm": (
        tail(8, 129),
        "                    griddepcontrol_wait();\n                }\n                has_y = true;",
        "                }\n                has_y = true;",
        ("programmatic", "unwritten-read"),
    ),
    "loader that does not wait for the other CTAs' rows": (
        tail(1, 129),
        "                counter_wait_wrapped(counters, watch);\n",
        "",
        ("race", "unwritten-read"),
    ),
    "rows that are not fenced where they are written": (
        tail(1, 129),
        "    fence_proxy_async_global();\n    named_barrier_sync",
        "    named_barrier_sync",
        ("proxy",),
    ),
    "slabs that are not fenced": (
        tail(8, 129),
        SLAB_STORE,
        SLAB_STORE.replace("    fence_proxy_async_shared();\n", ""),
        ("proxy",),
    ),
    "slabs that one lane stores while others may still write": (
        tail(8, 129),
        SLAB_STORE,
        SLAB_STORE.replace("    warp_sync();\n", ""),
        ("race",),
    ),
    "slabs that nothing waits for": (
        tail(8, 129),
        "        bulk_wait_group<0>();\n",
        "",
        ("exit", "race", "proxy"),
    ),
    "counter that never wraps": (
        tail(1, 129),
        "atomic_inc_acq_rel_gpu(norm.counters, gridDim.x - 1)",
        "atomic_inc_acq_rel_gpu(norm.counters, gridDim.x)",
        ("deadlock",),
    ),
}


def run_schedules(registry: Registry, case: Case, load: Loader) -> None:
    for schedule in SCHEDULES:
        emulate_case(registry, case, Options(*schedule, "wide"), load=load)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_reported(registry: Registry, planted: Callable[..., Loader], name: str) -> None:
    case, old, new, kinds = FAULTS[name]
    load = only_gemm(planted(old, new))
    with pytest.raises(Fault) as caught:
        run_schedules(registry, case, load)
    assert caught.value.kind in kinds, caught.value


@pytest.mark.parametrize(("tp", "with_front"), [(1, False), (8, True)])
def test_layers_that_overlap_are_clean(registry: Registry, tp: int, with_front: bool) -> None:
    """Two in one stream; at TP 1 a tail that normalises itself, at TP 8 a front, a norm and a tail."""
    model = registry.model
    first, second = Case("front", tp, 130, sm_count=148, arch=ARCH), tail(tp, 130, rank=tp - 1)
    of_tail = make_operands(model, second)
    layer = [(validate_tail(model, **of_tail, tp=tp, rank=tp - 1), second.plan(model))]
    if with_front:
        of_front = make_operands(model, first)
        of_tail["shared_act"] = of_front["shared_act"]
        layer = [
            (validate_front(model, **of_front), first.plan(model)),
            (validate_tail(model, **of_tail, tp=tp, rank=tp - 1), second.plan(model)),
        ]
    emulate_calls(registry, [*layer, *layer], Options("late", 0, "wide"), overlap=True)
    assert compare(model, second, of_tail)[1] == []
