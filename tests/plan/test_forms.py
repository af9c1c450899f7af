"""The small model reaches the forms of the large one, so that its tests cover the large one's code."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import pytest
from support.models import (
    hopper,
    kimi_k3_model,
    one_tile_models,
    short_decode,
    tiny_model,
    tiny_quarters_model,
    tiny_ragged_model,
)

from cakegen.model import DeviceFacts, Model
from cakegen.plan import form_of, plan_route

DECODE_TOKENS = tuple(range(1, 129))
HOPPER_TOKENS = tuple(range(1, 385))
PREFILL_TOKENS = (*range(129, 1200, 9), 512, *range(1200, 16384, 128))


def forms(model: Model, arch: str, sm_counts: Iterable[int], tokens: Iterable[int]) -> set[Hashable]:
    """Shape-free forms of every launch of both stages, all TP degrees, P = 1 and more."""
    target = model.target(arch)
    assert target is not None
    return {
        form_of(launch)
        for sm_count in sm_counts
        for stage in ("front", "tail")
        for tp in target.tp_degrees
        for count in tokens
        for partials in (1, 2)
        for launch in plan_route(
            model,
            stage=stage,
            tp=tp,
            tokens=count,
            partials=partials,
            device=DeviceFacts.nominal(arch, sm_count),
        ).launches
    }


def sm_counts(model: Model, arch: str) -> tuple[int, ...]:
    target = model.target(arch)
    assert target is not None
    return target.sm_counts


def has(form: Hashable, *marks: Hashable) -> bool:
    assert isinstance(form, tuple)
    return set(marks) <= set(form)


def decode_forms(model: Model, counts: Iterable[int]) -> set[Hashable]:
    """Of Hopper; the norm in front of a decode tail included."""
    found = forms(model, "sm_90a", counts, HOPPER_TOKENS)
    return {form for form in found if isinstance(form, tuple) and not form[0].startswith("gemm")}


@pytest.mark.thorough
def test_tiny_reaches_every_hopper_decode_form() -> None:
    kimi, tiny = kimi_k3_model(), tiny_model()
    # 40 SMs: a part of the device, where the large model's norm is a launch of its own
    large = decode_forms(kimi, (40, *sm_counts(kimi, "sm_90a"), 144, 148, 152, 160))
    small = decode_forms(tiny, sm_counts(tiny, "sm_90a"))
    # its 512 columns end inside a chunk at TP 16 only, where one chunk is left and no pair can split it
    ragged = {form for form in large if has(form, "ragged")}
    ragged_pairs = {form for form in ragged if has(form, ("cluster_ctas", 2)) or has(form, "split_tokens")}
    # the widest tile that two CTAs split is the small model's only
    assert {form for form in small if not has(form, ("n_pad", 384))} == large - ragged_pairs
    assert ragged_pairs <= decode_forms(tiny_ragged_model(), sm_counts(tiny, "sm_90a"))
    assert ragged_pairs


@pytest.mark.thorough
def test_tiny_reaches_every_hopper_prefill_form() -> None:
    kimi, tiny = short_decode(kimi_k3_model()), short_decode(tiny_model())
    tokens = range(256, 16385, 128)
    large = forms(kimi, "sm_90a", (32, *sm_counts(kimi, "sm_90a")), tokens)
    small: set[Hashable] = set()
    for model in (
        tiny,
        *one_tile_models(tiny),
        *(tiny_quarters_model(tile.block_n) for tile in hopper(tiny).prefill.tiles),
    ):
        small |= forms(model, "sm_90a", sm_counts(tiny, "sm_90a"), tokens)
    assert large <= small
    assert {form[1] for form in large if has(form, "gemm_tail")} == {
        ("block_n", tile.block_n) for tile in hopper(kimi).prefill.tiles
    }
    # each way to cut, with and without whole tiles before it
    for stage in ("gemm_front", "gemm_tail"):
        of_stage = [form for form in small if has(form, stage)]
        for marks in (("split_k",), ("crossing",), ("tile_inside",), ("many_segments", "crossing")):
            cut = [form for form in of_stage if has(form, *marks)]
            found = {(has(form, "whole_first"), has(form, "lone_row_tile")) for form in cut}
            assert found == {(True, True), (True, False), (False, True), (False, False)}
        assert any(has(form, "several_items") and not has(form, "split_k") for form in of_stage)
    # the large model's ragged tail is never cut; the small ones' is, so that a test can run it
    assert any(has(form, "ragged") for form in large)
    assert not any(has(form, "ragged", "split_k") for form in large)
    ragged = forms(tiny_ragged_model(), "sm_90a", sm_counts(tiny, "sm_90a"), range(256, 2049, 256))
    assert any(has(form, "ragged", "split_k") for form in ragged)


def test_tiny_reaches_every_blackwell_form() -> None:
    kimi, tiny = kimi_k3_model(), tiny_model()
    tokens = (*DECODE_TOKENS, *PREFILL_TOKENS)
    large = forms(kimi, "sm_100a", sm_counts(kimi, "sm_100a"), tokens)
    small = forms(tiny, "sm_100a", sm_counts(tiny, "sm_100a"), tokens)
    # no slice of its 512 columns ends inside a chunk: another small model's do
    ragged = {form for form in large if has(form, "ragged")}
    assert large - ragged <= small
    assert {form for form in ragged if has(form, "decode_tail")} <= forms(
        tiny_ragged_model(), "sm_100a", sm_counts(tiny, "sm_100a"), DECODE_TOKENS
    )
    assert {form[0] for form in large if isinstance(form, tuple)} == {
        "decode_front",
        "decode_tail",
        "gemm_front",
        "gemm_tail",
        "tail_norm",
    }


def test_tiny_reaches_every_decode_form_of_a_small_part_of_a_blackwell_device() -> None:
    """One CTA a tile where pairs can't be resident, and the norm in a launch of its own."""
    kimi, tiny = kimi_k3_model(), tiny_model()
    large = forms(kimi, "sm_100a", (32, 40, 78, 114, 132, *sm_counts(kimi, "sm_100a")), DECODE_TOKENS)
    small = forms(tiny, "sm_100a", sm_counts(tiny, "sm_100a"), DECODE_TOKENS)
    assert {form for form in large if not has(form, "ragged")} == small


def test_form_forgets_shapes_and_keeps_flags() -> None:
    kimi, device = kimi_k3_model(), DeviceFacts.nominal("sm_90a", 132)

    def form(tp: int, tokens: int) -> Hashable:
        return form_of(plan_route(kimi, stage="tail", tp=tp, tokens=tokens, partials=1, device=device).launches[0])

    assert form(8, 1) == form(8, 4)
    assert form(8, 129) == form(4, 129)
    assert form(8, 4) != form(8, 5)
    assert form(8, 17) != form(1, 17)
