"""Shared-memory offsets of the published programs, and what every layout must keep."""

from __future__ import annotations

import dataclasses

import pytest

from cakegen.model import DeviceFacts, Model
from cakegen.plan import DecodeForm, DecodeSmem, decode_smem, plan_route

TPS = (1, 2, 4, 8, 16)


def layout(model: Model, device: DeviceFacts, stage: str, tp: int, tokens: int, partials: int = 1) -> DecodeSmem:
    form = plan_route(model, stage=stage, tp=tp, tokens=tokens, partials=partials, device=device).launches[-1].form
    assert isinstance(form, DecodeForm)
    return decode_smem(form)


@pytest.mark.parametrize(
    ("stage", "tp", "tokens", "expected"),
    [
        (
            "front",
            8,
            8,
            {"a_ring_offset": 6144, "a_stage_bytes": 32768, "b_ring_offset": 202752, "total_bytes": 215040},
        ),
        (
            "tail",
            8,
            8,
            {
                "a_ring_offset": 6144,
                "a_ring_bytes": 8 * 16384,
                "b_ring_offset": 137216,
                "resident_b_offset": 145408,
                "rows_offset": 149504,
                "norm_weight_offset": 206848,
                "total_bytes": 214016,
            },
        ),
        (
            "tail",
            8,
            16,
            {
                "a_ring_offset": 10240,
                "b_ring_offset": 92160,
                "resident_b_offset": 102400,
                "rows_offset": 110592,
                "norm_weight_offset": 225280,
                "total_bytes": 232448,
            },
        ),
        ("front", 1, 8, {"landing_offset": 2048, "landing_bytes": 1024, "a_ring_offset": 3072}),
    ],
)
def test_layout_has_the_published_offsets(
    kimi: Model, b200: DeviceFacts, stage: str, tp: int, tokens: int, expected: dict[str, int]
) -> None:
    found = dataclasses.asdict(layout(kimi, b200, stage, tp, tokens))
    assert {name: found[name] for name in expected} == expected


def test_aliased_landing_is_the_start_of_the_ring(kimi: Model, b200: DeviceFacts) -> None:
    found = layout(kimi, b200, "front", 8, 128)
    assert (found.landing_offset, found.a_ring_offset, found.landing_bytes) == (2048, 2048, 65536)
    assert found.staging_offset == 2048 + 65536


@pytest.mark.parametrize("sm_count", [40, 78, 132])
def test_regions_follow_each_other_without_overlap(kimi: Model, plan_all, sm_count: int) -> None:
    device = DeviceFacts.nominal("sm_90a", sm_count)
    for plan in plan_all(kimi, device, TPS, range(1, 193)):
        form = plan.launches[-1].form
        assert isinstance(form, DecodeForm)
        found = decode_smem(form)
        landing_end = found.landing_offset + (0 if form.landing_alias else found.landing_bytes)
        assert (found.barriers_offset, found.flags_offset, found.landing_offset) == (0, 1024, 2048)
        assert found.a_ring_offset == landing_end
        assert found.b_ring_offset == found.a_ring_offset + found.a_ring_bytes
        assert found.resident_b_offset == found.b_ring_offset + found.b_ring_bytes
        assert found.rows_offset == found.resident_b_offset + found.resident_b_bytes
        assert found.norm_weight_offset == found.rows_offset + found.rows_bytes
        assert found.total_bytes == found.norm_weight_offset + found.norm_weight_bytes
        assert bool(found.rows_bytes) == bool(found.norm_weight_bytes) == form.staged_rows
        assert bool(found.resident_b_bytes) == form.resident_b
        assert not any(o % 1024 for o in (found.a_ring_offset, found.b_ring_offset, found.resident_b_offset))
