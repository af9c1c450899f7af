"""Partition and residency on devices of every size: what waits for the whole grid must fit the device at once."""

from __future__ import annotations

import dataclasses

import pytest

from cakegen.model import DeviceFacts, Model
from cakegen.plan import DecodeForm, NormForm, Plan, decode_smem, plan_route, unit_shares
from cakegen.plan.spelling import spell_decode_key

SM_COUNTS = (40, 78, 114, 132, 144, 148, 152, 160)
TPS = (1, 2, 4, 8, 16)


def decode_forms(plan: Plan) -> list[DecodeForm]:
    return [launch.form for launch in plan.launches if isinstance(launch.form, DecodeForm)]


def tail(model: Model, device: DeviceFacts, tp: int, tokens: int, partials: int = 1) -> Plan:
    return plan_route(model, stage="tail", tp=tp, tokens=tokens, partials=partials, device=device)


@pytest.mark.parametrize("sm_count", SM_COUNTS)
def test_every_decode_plan_fits_its_device(kimi: Model, plan_all, sm_count: int) -> None:
    device = DeviceFacts.nominal("sm_90a", sm_count)
    for plan in plan_all(kimi, device, TPS, range(1, 193)):
        (form,) = decode_forms(plan)
        layout = decode_smem(form)
        assert form.n_pad >= plan.tokens
        assert layout.total_bytes <= device.max_dynamic_smem_bytes
        assert layout.staging_offset + layout.staging_bytes <= layout.b_ring_offset + layout.b_ring_bytes
        assert form.cluster_ctas == 1 or form.grid_ctas == 2 * form.tiles <= sm_count
        if form.needs_residency:
            assert form.tiles <= (device.resident_pairs if form.cluster_ctas == 2 else sm_count)
        separate = [launch for launch in plan.launches if isinstance(launch.form, NormForm)]
        assert len(separate) == (plan.stage == "tail" and not form.fused_norm)


@pytest.mark.parametrize("sm_count", SM_COUNTS)
def test_ranks_of_a_pair_cover_every_unit_once(kimi: Model, plan_all, sm_count: int) -> None:
    device = DeviceFacts.nominal("sm_90a", sm_count)
    for plan in plan_all(kimi, device, TPS, range(8, 193, 8)):
        (form,) = decode_forms(plan)
        shares = unit_shares(form)
        assert sum(share.k1_count for share in shares) * form.chunks_per_stage == form.k1_chunks
        assert sum(share.k2_count for share in shares) * form.chunks_per_stage == form.k2_chunks
        assert all(share.k1_count and (share.k2_count or form.stage == "front") for share in shares)


def test_symbol_spells_the_whole_form(kimi: Model, plan_all) -> None:
    forms: dict[str, DecodeForm] = {}
    for sm_count in SM_COUNTS:
        for plan in plan_all(kimi, DeviceFacts.nominal("sm_90a", sm_count), TPS, range(1, 193)):
            for form in decode_forms(plan):
                assert forms.setdefault(spell_decode_key(form, kimi.name, "@sm_90a"), form) == form
    assert len(forms) > 100


@pytest.mark.parametrize(("sm_count", "cluster_ctas", "grid_ctas"), [(111, 1, 56), (112, 2, 112), (113, 2, 112)])
def test_tail_pairs_need_two_sms_a_tile(kimi: Model, sm_count: int, cluster_ctas: int, grid_ctas: int) -> None:
    (form,) = decode_forms(tail(kimi, DeviceFacts.nominal("sm_90a", sm_count), 1, 32))
    assert (form.cluster_ctas, form.grid_ctas, form.fused_norm) == (cluster_ctas, grid_ctas, True)


def test_tail_falls_to_one_cta_a_tile_where_pairs_are_not_resident(kimi: Model, h200: DeviceFacts) -> None:
    scattered = dataclasses.replace(h200, resident_pairs=55)
    plan = tail(kimi, scattered, 1, 32)
    (form,) = decode_forms(plan)
    assert (form.cluster_ctas, form.grid_ctas, form.needs_residency) == (1, 56, True)
    reason = next(rule.reason for rule in plan.rules if rule.field == "cluster_ctas")
    assert "56 pairs can't be resident (55 can)" in reason


def test_tail_with_resident_operand_keeps_its_pairs(kimi: Model, h200: DeviceFacts) -> None:
    scattered = dataclasses.replace(h200, resident_pairs=55)
    (form,) = decode_forms(tail(kimi, scattered, 8, 4))
    assert (form.cluster_ctas, form.resident_b, form.needs_residency) == (2, True, False)


def test_tail_on_a_small_device_runs_the_norm_first(kimi: Model) -> None:
    plan = tail(kimi, DeviceFacts.nominal("sm_90a", 40), 8, 97)
    norm, decode = plan.launches
    assert (norm.key, norm.grid_ctas) == ("tail_norm:e0@sm_90a", (25, 1, 1))
    assert decode.key == "decode:tail_tp8_n128_r7_apart@sm_90a"
    (form,) = decode_forms(plan)
    assert (form.fused_norm, form.issue_gate, form.needs_residency) == (False, 0, False)


@pytest.mark.parametrize(("sm_count", "launches"), [(55, 2), (56, 1)])
def test_norm_is_apart_exactly_where_the_grid_is_not_resident(kimi: Model, sm_count: int, launches: int) -> None:
    assert len(tail(kimi, DeviceFacts.nominal("sm_90a", sm_count), 1, 128).launches) == launches


def test_front_grid_may_exceed_the_device(kimi: Model) -> None:
    device = DeviceFacts.nominal("sm_90a", 40)
    plan = plan_route(kimi, stage="front", tp=1, tokens=128, partials=1, device=device)
    (form,) = decode_forms(plan)
    assert (form.grid_ctas, form.needs_residency) == (131, False)


def test_no_pair_where_a_rank_would_have_no_chunk(kimi: Model, h200: DeviceFacts) -> None:
    short = dataclasses.replace(kimi, dims=dataclasses.replace(kimi.dims, latent=1024))
    (form,) = decode_forms(tail(short, h200, 16, 8))
    assert (form.k1_chunks, form.k2_chunks, form.cluster_ctas) == (1, 6, 1)


def test_no_pair_on_a_device_without_pairs(kimi: Model, h200: DeviceFacts) -> None:
    lone = dataclasses.replace(h200, resident_pairs=0)
    for stage in ("front", "tail"):
        plan = plan_route(kimi, stage=stage, tp=8, tokens=8, partials=1, device=lone)
        assert [form.cluster_ctas for form in decode_forms(plan)] == [1]
