"""Hopper's decode with fewer tokens than its MMA is wide: boxes as high as the tokens, the rows between cleared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.emulator.copied_boxes import Box
from support.emulator.shorter_requests import outputs_of

from cakegen.emulator import Fault, Options
from cakegen.emulator.launches.cases import Case, emulate_case, emulate_chain
from cakegen.plan import DecodeForm
from cakegen.registry import Registry

pytestmark = pytest.mark.emulator

TAIL_MAPS = {"shared_act", "y_workspace"}
# (request, what its form must be, the maps of which it loads boxes)
CASES = {
    "narrow front": (Case("front", 8, 3), {"cluster_ctas": 2, "block_m": 96, "chunks_per_stage": 2}, {"x"}),
    "front, one CTA a tile": (Case("front", 8, 9, sm_count=6), {"cluster_ctas": 1, "n_pad": 16}, {"x"}),
    "front, one chunk a stage": (Case("front", 1, 97, sm_count=6), {"chunks_per_stage": 1, "n_pad": 128}, {"x"}),
    "tail, y resident": (Case("tail", 1, 5, sm_count=48), {"cluster_ctas": 2, "resident_b": True}, {"shared_act"}),
    "tail, y loaded": (Case("tail", 1, 100, sm_count=6), {"fused_norm": True, "resident_b": False}, TAIL_MAPS),
    "widest front": (Case("front", 8, 161), {"cluster_ctas": 2, "split_finalize": True, "n_pad": 192}, {"x"}),
    "wide front, one CTA a tile": (Case("front", 1, 155, sm_count=6), {"cluster_ctas": 1, "n_pad": 160}, {"x"}),
    "tail, tokens split": (Case("tail", 4, 100), {"token_parts": 2, "n_pad": 128}, TAIL_MAPS),
    "tail, an odd number split": (Case("tail", 4, 161, rank=3), {"token_parts": 2, "n_pad": 192}, TAIL_MAPS),
    "tail, two chunks a stage": (Case("tail", 1, 12), {"cluster_ctas": 2, "chunks_per_stage": 2}, TAIL_MAPS),
    "tail, tokens split, two chunks": (Case("tail", 2, 81), {"token_parts": 2, "chunks_per_stage": 2}, TAIL_MAPS),
    "tail, ragged slice": (Case("tail", 16, 17, 3, sm_count=6, rank=15), {"k1_ragged_cols": 32}, TAIL_MAPS),
}
WIDE_FRONT = Case("front", 8, 100)
WIDE_TAIL = Case("tail", 1, 100, sm_count=6)
# with the width of each one's MMA
WIDE = {
    "front": (WIDE_FRONT, 128),
    "tail": (WIDE_TAIL, 128),
    "wider front": (Case("front", 8, 135), 160),
    "widest front": (Case("front", 4, 165, sm_count=6), 192),
    "widest tail": (Case("tail", 1, 170, sm_count=132), 192),
    "tail, tokens split": (Case("tail", 4, 145), 160),
}


def rows_of_ctas(registry: Registry, case: Case) -> set[tuple[int, int]]:
    """The token rows that the CTAs of a tile load: all, or each as many; the last CTA's may end a row past the last."""
    form = case.plan(registry.model).launches[-1].form
    assert isinstance(form, DecodeForm)
    rows = -(-case.tokens // form.token_parts)
    return {(part * rows, (part + 1) * rows) for part in range(form.token_parts)}


@pytest.mark.parametrize("name", CASES)
def test_boxes_hold_the_tokens_that_there_are(registry: Registry, token_boxes: list[Box], name: str) -> None:
    case, expected, maps = CASES[name]
    form = case.plan(registry.model).launches[-1].form
    assert {field: getattr(form, field) for field in expected} == expected
    assert emulate_case(registry, case, Options("random", 0, "wide")).problems == ()
    assert {(box.name, box.first, box.end, box.extent) for box in token_boxes} == {
        (each, first, end, case.tokens) for each in maps for first, end in rows_of_ctas(registry, case)
    }


@pytest.mark.parametrize("name", WIDE)
def test_full_token_tile_is_loaded_whole(registry: Registry, token_boxes: list[Box], name: str) -> None:
    case, tokens = WIDE[name]
    case = dataclasses.replace(case, tokens=tokens)
    assert emulate_case(registry, case, Options("random", 0, "wide")).problems == ()
    assert {(box.first, box.end) for box in token_boxes} == rows_of_ctas(registry, case)


@pytest.mark.parametrize("name", WIDE)
def test_row_has_the_same_bits_however_high_its_box_is(registry: Registry, name: str) -> None:
    case, tokens = WIDE[name]
    whole = dataclasses.replace(case, tokens=tokens)
    form = case.plan(registry.model).launches[-1].form
    assert isinstance(form, DecodeForm)
    assert form.n_pad == tokens
    assert whole.plan(registry.model).launches[-1].form == form
    some, all_rows = outputs_of(registry, whole, case.tokens), outputs_of(registry, whole, tokens)
    for output, rows in some.items():
        assert torch.equal(rows, all_rows[output][: case.tokens]), output


@pytest.mark.parametrize(("tp", "tokens"), [(4, 65), (4, 128), (4, 191), (2, 20), (2, 96)])
def test_row_has_the_same_bits_whether_the_tokens_are_split_or_k(registry: Registry, tp: int, tokens: int) -> None:
    of_a_pair, split = Case("tail", tp, 8, rank=1), Case("tail", tp, tokens, rank=1)
    forms = [case.plan(registry.model).launches[-1].form for case in (of_a_pair, split)]
    assert [(form.cluster_ctas, form.token_parts) for form in forms if isinstance(form, DecodeForm)] == [(2, 1), (1, 2)]
    some, all_rows = outputs_of(registry, split, 8), outputs_of(registry, split, tokens)
    for output, rows in some.items():
        assert torch.equal(rows, all_rows[output][:8]), output


@pytest.mark.parametrize("case", [Case("front", 8, 5), Case("tail", 1, 5, sm_count=48)], ids=["front", "tail"])
def test_overlapping_launches_of_few_tokens_match(registry: Registry, case: Case) -> None:
    assert emulate_chain(registry, case, Options("late", 0, "wide")).problems == ()


@pytest.mark.parametrize("case", [WIDE_FRONT, WIDE_TAIL, CASES["narrow front"][0]], ids=["front", "tail", "narrow"])
@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("first = num_tokens * kTokenBytes", "first = (num_tokens + 1) * kTokenBytes", "unwritten-read"),
        ("fence_proxy_async_shared();\n    named_barrier_sync(Cfg::kMmaBarrier, 128);\n}", "}", "race"),
        ("}\n    fence_proxy_async_shared();\n    named", "}\n    named", "proxy"),
        ("first = num_tokens * kTokenBytes", "first = (num_tokens - 1) * kTokenBytes", "race"),
    ],
    ids=["row left out", "no barrier", "no fence", "row of a copy"],
)
def test_rows_cleared_wrongly_are_reported(
    registry: Registry, planted: Callable[..., Any], case: Case, old: str, new: str, kind: str
) -> None:
    with pytest.raises(Fault) as caught:
        emulate_case(registry, case, Options("early", 0, "wide"), load=planted(old, new))
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "min(num_tokens - first, loaded_tokens<Cfg>(num_tokens))",
            "min(num_tokens - first, loaded_tokens<Cfg>(num_tokens) - 1)",
        ),
        ("kTokenParts * loaded_tokens<Cfg>(num_tokens);", "kTokenParts * (loaded_tokens<Cfg>(num_tokens) - 1);"),
    ],
    ids=["no CTA", "both"],
)
def test_row_that_no_cta_or_both_store_is_reported(
    registry: Registry, planted: Callable[..., Any], old: str, new: str
) -> None:
    with pytest.raises(Fault) as caught:
        emulate_case(registry, Case("tail", 4, 101), Options("early", 0, "wide"), load=planted(old, new))
    assert caught.value.kind == "output"


@pytest.mark.parametrize(
    ("case", "old", "new"),
    [
        (Case("tail", 4, 100), "operands.maps.shared_act, 0, first_row,", "operands.maps.shared_act, 0, 0,"),
        (Case("tail", 4, 100), "operands.maps.y, first_row,", "operands.maps.y, 0,"),
        (Case("front", 1, 200, sm_count=48), "maps.x, 0, first_row,", "maps.x, 0, 0,"),
    ],
    ids=["shared_act", "y", "x"],
)
def test_rows_of_the_other_cta_give_wrong_values(
    registry: Registry, planted: Callable[..., Any], case: Case, old: str, new: str
) -> None:
    form = case.plan(registry.model).launches[-1].form
    assert isinstance(form, DecodeForm)
    assert form.token_parts == 2
    assert emulate_case(registry, case, Options("early", 0, "wide"), load=planted(old, new)).problems
