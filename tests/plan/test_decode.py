"""Decode plans of the product's model, spelled out key by key."""

from __future__ import annotations

import dataclasses

import pytest
from support.models import blackwell, changed

from cakegen.errors import PlanError
from cakegen.model import DeviceFacts, Model
from cakegen.plan import DecodeForm, plan_route
from cakegen.plan.spelling import spell_decode_key

HEAD = "decode:kimi_k3_latent_moe_decode_"
FRONT_1 = "_p0_w0_t7_28_96_k112_0_o3584_c1"
FRONT_8 = "_p0_w0_t7_28_12_k112_0_o3584_c2"
TAIL_1 = "_d1_p0_w0_t0_56_0_k56_96_o7168_c2_f"
TAIL_8 = "_d1_p0_w0_t0_56_0_k7_12_o7168_c2_f"

# (stage, TP, P, first T, last T) -> key, at 148 SMs: each range ends where its key does
KEYS = {
    ("front", 1, 1, 1, 8): f"g131_n8_r6_d2{FRONT_1}",
    ("front", 1, 1, 9, 16): f"g131_n16_r6_d2{FRONT_1}",
    ("front", 1, 1, 17, 32): f"g131_n32_r5_d2{FRONT_1}",
    ("front", 1, 1, 33, 64): f"g131_n64_r4_d2{FRONT_1}",
    ("front", 1, 1, 65, 128): f"g131_n128_r7_d1{FRONT_1}",
    ("front", 8, 1, 1, 8): f"g94_n8_r6_d2{FRONT_8}",
    ("front", 8, 1, 9, 16): f"g94_n16_r6_d2{FRONT_8}",
    ("front", 8, 1, 17, 32): f"g94_n32_r10_d1{FRONT_8}",
    ("front", 8, 1, 33, 64): f"g94_n64_r8_d1{FRONT_8}",
    ("front", 8, 1, 65, 128): f"g94_n128_r7_d1{FRONT_8}_la",
    ("tail", 1, 1, 1, 8): f"g112_n8_r10{TAIL_1}_sb",
    ("tail", 1, 8, 1, 8): f"g112_n8_r10{TAIL_1}_sb",
    ("tail", 1, 1, 9, 16): f"g112_n16_r12{TAIL_1}",
    ("tail", 1, 1, 17, 32): f"g112_n32_r10{TAIL_1}",
    ("tail", 1, 1, 33, 64): f"g112_n64_r8{TAIL_1}",
    ("tail", 1, 1, 65, 128): f"g112_n128_r7{TAIL_1}_la",
    ("tail", 8, 1, 1, 8): f"g112_n8_r8{TAIL_8}_sb_rs",
    ("tail", 8, 2, 1, 4): f"g112_n8_r11{TAIL_8}_g3_sb",
    ("tail", 8, 2, 5, 8): f"g112_n8_r11{TAIL_8}_g3",
    ("tail", 8, 1, 9, 16): f"g112_n16_r5{TAIL_8}_sb_rs_np_st2_ww",
    ("tail", 8, 3, 9, 16): f"g112_n16_r12{TAIL_8}_g3",
    ("tail", 8, 1, 17, 32): f"g112_n32_r10{TAIL_8}_g3",
    ("tail", 8, 4, 33, 64): f"g112_n64_r8{TAIL_8}_g3",
    ("tail", 8, 1, 65, 128): f"g112_n128_r5{TAIL_8}_g3",
}


def decode_form(model: Model, device: DeviceFacts, stage: str, tp: int, tokens: int, partials: int = 1) -> DecodeForm:
    form = plan_route(model, stage=stage, tp=tp, tokens=tokens, partials=partials, device=device).launches[-1].form
    assert isinstance(form, DecodeForm)
    return form


@pytest.mark.parametrize("request_range", KEYS, ids=str)
def test_plan_gives_published_decode_key(
    kimi: Model, b200: DeviceFacts, request_range: tuple[str, int, int, int, int]
) -> None:
    stage, tp, partials, first, last = request_range
    for tokens in (first, last):
        plan = plan_route(kimi, stage=stage, tp=tp, tokens=tokens, partials=partials, device=b200)
        assert [launch.key for launch in plan.launches] == [HEAD + KEYS[request_range]]


def test_published_rules_give_the_published_forms_on_hopper(kimi: Model, h200: DeviceFacts) -> None:
    published = changed(kimi, hopper__decode=blackwell(kimi).decode)
    for (stage, tp, partials, tokens, _), key in KEYS.items():
        plan = plan_route(published, stage=stage, tp=tp, tokens=tokens, partials=partials, device=h200)
        (launch,) = plan.launches
        assert isinstance(launch.form, DecodeForm)
        assert spell_decode_key(launch.form, kimi.name, "") == HEAD + key
        assert launch.key == spell_decode_key(launch.form, kimi.name, "@sm_90a")


@pytest.mark.parametrize(
    ("stage", "tokens", "suffix"),
    [
        ("tail", 4, "n8_r6_pair_staged"),
        ("tail", 5, "n8_r6_pair_memory_gate2"),
        ("tail", 8, "n8_r6_pair_memory_gate2"),
        ("tail", 32, "n32_r7_tokens_memory_gate2"),
        ("tail", 128, "n128_r7_tokens_memory_gate2"),
        ("front", 16, "n16_r7_d2_m96_pair"),
        ("front", 128, "n128_r6_pair_halves"),
        ("front", 129, "n160_r5_pair_halves"),
        ("tail", 161, "n192_r7_tokens_memory_gate2"),
        ("tail", 200, "n256_r7_tokens_memory_gate2"),
        ("tail", 320, "n320_r6_tokens_memory_gate2"),
        ("front", 64, "n64_r5_d2_m96_pair_halves"),
    ],
)
def test_hopper_stages_fewer_rows_and_splits_the_finish(
    kimi: Model, h200: DeviceFacts, stage: str, tokens: int, suffix: str
) -> None:
    plan = plan_route(kimi, stage=stage, tp=8, tokens=tokens, partials=1, device=h200)
    (launch,) = plan.launches
    assert launch.key == f"decode:{stage}_tp8_{suffix}@sm_90a"
    assert next(rule.value for rule in plan.rules if rule.field == "split_finalize") == suffix.endswith("_halves")


def test_hopper_refuses_a_ring_of_one_stage(kimi: Model, h200: DeviceFacts) -> None:
    shallow = changed(kimi, hopper__decode__max_stages=1)
    with pytest.raises(PlanError, match="1 ring stages fit, at least 2 are needed"):
        plan_route(shallow, stage="front", tp=1, tokens=1, partials=1, device=h200)


def test_every_decode_request_gives_one_of_the_23_keys(kimi: Model, b200: DeviceFacts) -> None:
    reached = {
        launch.key
        for stage in ("front", "tail")
        for tp in (1, 8)
        for tokens in range(1, 129)
        for partials in (1, 2, 3, 4, 8)
        for launch in plan_route(kimi, stage=stage, tp=tp, tokens=tokens, partials=partials, device=b200).launches
    }
    assert reached == {HEAD + key for key in KEYS.values()}
    assert len(reached) == 23


def test_ragged_slice_is_spelled_last(kimi: Model, h200: DeviceFacts) -> None:
    form = decode_form(kimi, h200, "tail", 16, 32)
    assert (form.k1_chunks, form.k1_cols, form.k1_ragged_cols) == (4, 224, 32)
    assert spell_decode_key(form, kimi.name, "").endswith("_k4_6_o7168_c1_f_g2_tt2_kt32")


def test_front_symbol_says_hidden_chunks_and_latent(kimi: Model, h200: DeviceFacts) -> None:
    form = decode_form(kimi, h200, "front", 16, 1)
    assert (form.tiles, form.grid_ctas, form.cluster_ctas) == (56, 112, 2)
    assert "_t10_38_8_k112_0_o3584_c2_m96" in spell_decode_key(form, kimi.name, "")


@pytest.mark.parametrize(("tp", "tokens"), [(4, 16), (4, 9)])
def test_staging_is_dropped_where_it_would_leave_a_short_ring(
    kimi: Model, h200: DeviceFacts, tp: int, tokens: int
) -> None:
    # 7 resident chunks of 2048 and 17 rows of 7168 bytes leave 86016 bytes: 4 stages of 18432, under 5
    form = decode_form(kimi, h200, "tail", tp, tokens)
    assert (form.staged_rows, form.resident_b, form.issue_gate, form.num_stages) == (False, False, 2, 12)


@pytest.mark.parametrize(
    ("tp", "tokens", "chunks", "stages", "gate"),
    [
        (1, 8, 2, 5, 0),  # a pair splits a long K
        (1, 32, 2, 5, 0),
        (1, 96, 2, 5, 0),  # two CTAs split the tokens
        (1, 97, 1, 9, 0),  # two chunks a stage would leave 4
        (2, 8, 1, 6, 0),  # short for a pair: 38 chunks each
        (2, 16, 2, 6, 0),  # not for two CTAs that load 76 each
        (4, 64, 1, 11, 2),  # a half of its 14 up chunks has 7
        (4, 128, 1, 9, 2),
        (8, 64, 1, 7, 2),  # short for both
        (16, 64, 1, 7, 2),
    ],
)
def test_short_tails_have_few_stages_and_long_ones_two_chunks_a_stage(
    kimi: Model, h200: DeviceFacts, tp: int, tokens: int, chunks: int, stages: int, gate: int
) -> None:
    form = decode_form(kimi, h200, "tail", tp, tokens)
    assert (form.chunks_per_stage, form.num_stages, form.issue_gate) == (chunks, stages, gate)


def test_one_cta_a_tile_keeps_its_ring(kimi: Model) -> None:
    form = decode_form(kimi, DeviceFacts.nominal("sm_90a", 78), "tail", 8, 64)
    assert (form.cluster_ctas, form.token_parts, form.chunks_per_stage, form.num_stages) == (1, 1, 1, 9)


def test_resident_operand_is_dropped_where_it_would_leave_a_short_ring(kimi: Model, h200: DeviceFacts) -> None:
    # 28 resident chunks of 1024 bytes beside 6 stages need 6 * 17408 + 28672 + 2048 + 4096 bytes
    needed = 6 * 17408 + 28672 + 2048 + 4096
    enough = dataclasses.replace(h200, max_dynamic_smem_bytes=needed)
    short = dataclasses.replace(h200, max_dynamic_smem_bytes=needed - 1)
    assert decode_form(kimi, enough, "tail", 1, 8).resident_b
    assert not decode_form(kimi, short, "tail", 1, 8).resident_b


def test_small_tokens_keep_the_floor_of_the_ring(kimi: Model, h200: DeviceFacts) -> None:
    needed = 6 * 17408 + 28672 + 2048 + 4096
    tight = dataclasses.replace(h200, max_dynamic_smem_bytes=needed)
    wider = dataclasses.replace(h200, max_dynamic_smem_bytes=needed + 2 * 17408)
    assert decode_form(kimi, tight, "tail", 1, 8).num_stages == 6
    assert decode_form(kimi, wider, "tail", 1, 8).num_stages == 7


def test_every_decision_names_its_rule(kimi: Model, h200: DeviceFacts) -> None:
    derived = {"stage", "tp", "router_tiles", "latent_tiles", "shared_tiles", "k2_chunks", "k1_cols", "out_cols"}
    derived |= {"landing_bytes", "gated"}
    # a field that several rules decide is read through the property that each is about
    of_sharing = {"cluster_ctas", "token_parts", "grid_ctas"}
    of_norm = {"fused_norm", "resident_b", "staged_rows", "needs_residency"}
    of_pause = {"no_prefetch", "stagger_units", "wide_wait"}
    plan = plan_route(kimi, stage="tail", tp=8, tokens=16, partials=1, device=h200)
    (launch,) = plan.launches
    decided = {field.name for field in dataclasses.fields(launch.form)} - derived - {"sharing", "norm"}
    assert {rule.field for rule in plan.rules} == decided | of_sharing | of_norm | of_pause | {"overlap"}
    for rule in plan.rules:
        found = launch.overlap is not None if rule.field == "overlap" else getattr(launch.form, rule.field)
        assert rule.value == found
        assert rule.reason


def test_plan_refuses_ring_without_a_stage(kimi: Model, h200: DeviceFacts) -> None:
    small = dataclasses.replace(h200, max_dynamic_smem_bytes=70000)
    arithmetic = r"\(70000 - 1024 barriers - 1024 flags - 32768 landing"
    with pytest.raises(PlanError, match=f"1 ring stages fit, at least 2 are needed: {arithmetic}"):
        decode_form(kimi, small, "front", 4, 128)


def test_plan_refuses_output_tile_over_the_ring(kimi: Model, h200: DeviceFacts) -> None:
    # the fp32 tile (128 * 528) needs 67584 bytes; 2 stages of 32768 are 65536
    small = dataclasses.replace(h200, max_dynamic_smem_bytes=2048 + 3 * 32768 - 1)
    with pytest.raises(PlanError, match=r"0 landing \+ 67584 output = 67584 bytes .* = 65536 \(2 stages\)"):
        decode_form(kimi, small, "front", 1, 128)


def test_plan_refuses_offsets_off_the_swizzle_period(kimi: Model) -> None:
    odd = changed(kimi, hopper__decode__single_landing_bytes=512)
    with pytest.raises(PlanError, match=r"A ring would start at byte 2560 = 1024 \* 2 \+ 512"):
        decode_form(odd, DeviceFacts.nominal("sm_90a", 78), "front", 8, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 7200}, r"hidden = 7200 does not divide by 128|hidden = 7200 does not divide by 64"),
        ({"experts": 900}, r"experts = 900 does not divide by 128 .*900 - 896 = 4 left over"),
        ({"latent": 3588}, r"latent = 3588 does not divide by 128"),
        ({"shared_intermediate": 6160}, r"shared_intermediate / TP = 770 does not divide by 64"),
        ({"shared_intermediate": 6148}, r"shared_intermediate = 6148 does not divide by 8 \(TP degree\)"),
    ],
)
def test_plan_refuses_dimension_that_leaves_a_partial_tile(
    kimi: Model, h200: DeviceFacts, change: dict[str, int], message: str
) -> None:
    odd = dataclasses.replace(kimi, dims=dataclasses.replace(kimi.dims, **change))
    with pytest.raises(PlanError, match=message):
        decode_form(odd, h200, "front", 8, 8)
