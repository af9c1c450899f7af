"""Prefill plans on Hopper: pinned examples, and what every plan must keep for the kernel that walks its items."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from support.models import changed, hopper, kimi_k3_model, one_tile_models, short_decode, tiny_model, with_tile
from support.plan.pair_tiles import count_pair_tiles

from cakegen.errors import PlanError
from cakegen.model import DeviceFacts, Model
from cakegen.plan import GemmForm, Launch, NormForm, plan_route

TPS = (1, 2, 4, 8, 16)
SM_COUNTS = (32, 78, 114, 132)
EDGES = {edge + step for edge in range(128, 16385, 128) for step in (-1, 0, 1)}
TOKENS = tuple(sorted(t for t in EDGES | set(range(193, 16385, 97)) if 193 <= t <= 16384))
K_ITERATIONS = {"front": dict.fromkeys(TPS, 112), "tail": {1: 152, 2: 76, 4: 38, 8: 19, 16: 10}}
N_TILES = {
    256: {"front": {1: 66, 2: 42, 4: 30, 8: 24, 16: 21}, "tail": dict.fromkeys(TPS, 28)},
    224: {"front": {1: 75, 2: 48, 4: 34, 8: 27, 16: 24}, "tail": dict.fromkeys(TPS, 32)},
    192: {"front": {1: 88, 2: 56, 4: 40, 8: 32, 16: 28}, "tail": dict.fromkeys(TPS, 38)},
    240: {"front": {1: 71, 2: 45, 4: 32, 8: 26, 16: 23}, "tail": dict.fromkeys(TPS, 30)},
    176: {"front": {1: 97, 2: 62, 4: 45, 8: 36, 16: 32}, "tail": dict.fromkeys(TPS, 41)},
    144: {"front": {1: 118, 2: 75, 4: 54, 8: 43, 16: 38}, "tail": dict.fromkeys(TPS, 50)},
    128: {"front": {1: 131, 2: 83, 4: 59, 8: 47, 16: 41}, "tail": dict.fromkeys(TPS, 56)},
}


@pytest.fixture
def kimi() -> Model:
    """As prefill, what decode could serve too."""
    return short_decode(kimi_k3_model())


def launches(
    model: Model, device: DeviceFacts, stage: str, tp: int, tokens: int, partials: int = 1
) -> tuple[Launch, ...]:
    return plan_route(model, stage=stage, tp=tp, tokens=tokens, partials=partials, device=device).launches


def gemm_of(model: Model, device: DeviceFacts, stage: str, tp: int, tokens: int, partials: int = 1) -> Launch:
    return launches(model, device, stage, tp, tokens, partials)[-1]


def form_of_gemm(gemm: Launch) -> GemmForm:
    assert isinstance(gemm.form, GemmForm)
    return gemm.form


def with_changed_tile(model: Model, block_n: int, **changes: int) -> Model:
    tiles = tuple(
        dataclasses.replace(tile, **changes) if tile.block_n == block_n else tile
        for tile in hopper(model).prefill.tiles
    )
    return changed(model, hopper__prefill__tiles=tiles)


@dataclasses.dataclass(frozen=True)
class Work:
    """K iterations [k_begin, k_end) of a tile that one cluster runs, as segment `segment` of `segments`."""

    tile: int
    k_begin: int
    k_end: int
    segment: int
    segments: int


def cut_works(parameters: dict[str, int], num_k: int) -> Iterator[list[Work]]:
    """The works of each item of the cut tiles, decoded step by step as a kernel would."""
    full, ipc, total = (parameters[name] for name in ("full_items", "sk_ipc", "sk_total"))
    for run in range(parameters["num_items"] - full):
        works, position = [], run * ipc
        end = min(total, position + ipc)
        while position < end:
            cut, k_begin = divmod(position, num_k)
            k_end = min(num_k, k_begin + end - position)
            first, last = cut * num_k // ipc, (cut * num_k + num_k - 1) // ipc
            works.append(Work(full + cut, k_begin, k_end, run - first, last - first + 1))
            position += k_end - k_begin
        yield works


def check_cut(parameters: dict[str, int], tiles: int, num_k: int) -> None:
    """The cut tiles' iterations run exactly once, in segments that are numbered along K."""
    segments: dict[int, list[Work]] = {tile: [] for tile in range(parameters["full_items"], tiles)}
    for works in cut_works(parameters, num_k):
        assert works, "an item without iterations"
        for work in works:
            segments[work.tile].append(work)
    for tile, works in segments.items():
        assert [work.segment for work in works] == list(range(works[0].segments)), tile
        assert [work.k_begin for work in works] == [0, *(work.k_end for work in works[:-1])]
        assert works[-1].k_end == num_k
        assert len(works) <= parameters["sk_max_seg"]
    assert max(len(works) for works in segments.values()) == parameters["sk_max_seg"]


@pytest.mark.parametrize("sm_count", SM_COUNTS)
@pytest.mark.parametrize("stage", ["front", "tail"])
@pytest.mark.parametrize("block_n", N_TILES)
def test_every_iteration_of_every_tile_runs_once(kimi: Model, stage: str, sm_count: int, block_n: int) -> None:
    device = DeviceFacts.nominal("sm_90a", sm_count)
    kimi = with_tile(kimi, block_n)
    rules = hopper(kimi).prefill
    for tp in TPS:
        num_k = K_ITERATIONS[stage][tp]
        checked: set[tuple[tuple[str, int], ...]] = set()
        for tokens in TOKENS:
            gemm = gemm_of(kimi, device, stage, tp, tokens)
            if gemm.parameters in checked:
                continue
            checked.add(gemm.parameters)
            parameters = dict(gemm.parameters)
            assert form_of_gemm(gemm).block_n == block_n
            tiles = count_pair_tiles(tokens, N_TILES[block_n][stage][tp])
            clusters = gemm.grid_ctas[0] // 2
            assert gemm.grid_ctas == (2 * min(parameters["num_items"], sm_count // 2), 1, 1)
            assert 1 <= parameters["sk_max_seg"] <= rules.cut.max_segments
            if not parameters["sk_total"]:
                assert parameters["num_items"] == parameters["full_items"] == tiles
                continue
            # whole tiles fill whole waves, so that the cut items start together, one a cluster
            assert parameters["full_items"] % clusters == 0
            assert parameters["num_items"] - parameters["full_items"] <= clusters
            assert parameters["sk_total"] == (tiles - parameters["full_items"]) * num_k
            # as even as whole iterations allow, and no item too short
            cut_items = parameters["num_items"] - parameters["full_items"]
            assert parameters["sk_ipc"] == -(-parameters["sk_total"] // cut_items) >= rules.cut.min_ipc
            check_cut(parameters, tiles, num_k)


def test_small_model_keeps_its_iterations_too() -> None:
    model = short_decode(tiny_model())
    for sm_count in (2, 3, 6, 7, 78):
        device = DeviceFacts.nominal("sm_90a", sm_count)
        for stage in ("front", "tail"):
            for tp in TPS:
                for tokens in range(256, 8193, 128):
                    gemm = gemm_of(model, device, stage, tp, tokens)
                    parameters = dict(gemm.parameters)
                    num_k = 8 if stage == "front" else -(-512 // tp // 64) + 16 // tp
                    form = form_of_gemm(gemm)
                    width = form.block_n
                    n_tiles = -(-512 // width)
                    if stage == "front":
                        n_tiles += -(-384 // width) + -(-1024 // tp // (width // 2))
                    assert form.num_k == num_k
                    if parameters["sk_total"]:
                        check_cut(parameters, count_pair_tiles(tokens, n_tiles), num_k)


def test_row_tiles_hold_the_tokens(kimi: Model, h200: DeviceFacts) -> None:
    for tokens in TOKENS:
        m_tiles = dict(gemm_of(kimi, h200, "front", 8, tokens).parameters)["m_tiles"]
        assert (m_tiles - 1) * 128 < tokens <= m_tiles * 128


# (stage, TP, T) -> columns of a tile, num_items, full_items, sk_ipc, sk_max_seg, cut tiles, grid in CTAs; 66 pairs.
# Tails of two partials, whose norm is a launch of its own; test_norm_sm90.py has those of one.
EXAMPLES = {
    ("front", 1, 256): (256, 66, 66, 112, 1, 0, 132),
    ("front", 1, 512): (256, 132, 132, 112, 1, 0, 132),
    ("front", 1, 4096): (256, 1056, 1056, 112, 1, 0, 132),
    ("front", 8, 256): (192, 64, 0, 56, 2, 32, 128),
    ("front", 8, 512): (192, 64, 64, 112, 1, 0, 128),
    ("front", 8, 1024): (192, 128, 128, 112, 1, 0, 132),
    ("front", 8, 2048): (256, 192, 192, 112, 1, 0, 132),
    ("front", 8, 4096): (128, 778, 726, 56, 2, 26, 132),
    ("front", 8, 8192): (128, 1504, 1504, 112, 1, 0, 132),
    ("tail", 1, 256): (128, 56, 56, 152, 1, 0, 112),
    ("tail", 1, 512): (224, 64, 64, 152, 1, 0, 128),
    ("tail", 1, 768): (192, 130, 66, 114, 2, 48, 132),
    ("tail", 1, 1024): (224, 128, 128, 152, 1, 0, 132),
    ("tail", 1, 2048): (224, 256, 256, 152, 1, 0, 132),
    ("tail", 1, 4096): (128, 924, 858, 88, 3, 38, 132),
    ("tail", 8, 256): (144, 50, 50, 19, 1, 0, 100),
    ("tail", 8, 512): (224, 64, 64, 19, 1, 0, 128),
    ("tail", 8, 1024): (224, 128, 128, 19, 1, 0, 132),
    ("tail", 8, 2048): (128, 448, 448, 19, 1, 0, 132),
    ("tail", 8, 4096): (128, 896, 896, 19, 1, 0, 132),
    ("tail", 8, 16384): (128, 3584, 3584, 19, 1, 0, 132),
    ("tail", 16, 256): (144, 50, 50, 10, 1, 0, 100),
}


@pytest.mark.parametrize("request_shape", EXAMPLES, ids=str)
def test_plan_gives_the_pinned_items(kimi: Model, h200: DeviceFacts, request_shape: tuple[str, int, int]) -> None:
    stage, tp, tokens = request_shape
    gemm = gemm_of(kimi, h200, stage, tp, tokens, partials=2)
    parameters = dict(gemm.parameters)
    cut = parameters["sk_total"] // K_ITERATIONS[stage][tp]
    found = tuple(parameters[name] for name in ("num_items", "full_items", "sk_ipc", "sk_max_seg"))
    assert (form_of_gemm(gemm).block_n, *found, cut, gemm.grid_ctas[0]) == EXAMPLES[request_shape]
    assert list(parameters) == ["m_tiles", "num_items", "full_items", "sk_ipc", "sk_max_seg", "sk_total"]


@pytest.mark.parametrize("tp", TPS)
def test_keys_name_the_rank_and_the_architecture(kimi: Model, h200: DeviceFacts, tp: int) -> None:
    reached = {
        tuple(launch.key for launch in launches(model, h200, stage, tp, tokens, partials))
        for stage, partials in (("front", 1), ("tail", 1), ("tail", 2))
        for tokens in TOKENS
        for model in (kimi, *one_tile_models(kimi))
    }
    ragged = "kt32" if tp == 16 else ""
    shared, turns = ("", "s4n224", "s5n192", "s4n240", "s5n176", "s6n144"), ("s6n128p1",)
    assert {keys for keys in reached if len(keys) == 1} == {
        *((f"front:i{6144 // tp}{tile}@sm_90a",) for tile in (*shared, *turns)),
        *((f"tail_gemm:tp{tp}f1{ragged}{tile}@sm_90a",) for tile in shared),
    }
    assert {keys for keys in reached if len(keys) > 1} == {
        ("tail_norm:e1@sm_90a", f"tail_gemm:tp{tp}{ragged}{tile}@sm_90a") for tile in (*shared, *turns)
    }


def test_front_form_has_its_constants(kimi: Model, h200: DeviceFacts) -> None:
    form = gemm_of(with_tile(kimi, 256), h200, "front", 16, 300).form
    # 896 experts are 3.5 tiles of 256; 384 shared columns are 3 of 128
    assert form == GemmForm(
        stage="front",
        tp=16,
        block_m=128,
        block_n=256,
        num_k=112,
        num_stages=4,
        evict_first=False,
        fused_norm=False,
        staged_store=True,
        k1_ragged_cols=0,
        constants=(("I_LOCAL", 384), ("N_TILES", 4 + 14 + 3), ("S_TILES", 3)),
        tile_groups=2,
    )


def test_form_of_a_later_tile_follows_the_export(kimi: Model, h200: DeviceFacts) -> None:
    gemm = gemm_of(with_tile(with_changed_tile(kimi, 128, num_stages=5), 128), h200, "front", 16, 300)
    form = form_of_gemm(gemm)
    assert gemm.key == "front:i384s5n128p1@sm_90a"
    assert (form.block_n, form.num_stages, form.tile_groups) == (128, 5, 1)
    # 896 experts, 3584 latent columns in 128s; 64 gate and 64 up rows a shared tile
    assert form.constants == (("I_LOCAL", 384), ("N_TILES", 7 + 28 + 6), ("S_TILES", 6))


def test_the_cheapest_tile_is_taken(kimi: Model, h200: DeviceFacts) -> None:
    """TP 8, 256 tokens: 28 to 56 tiles, one wave of 19 iterations and an end in each case.

    The norm's 256 rows take 4 + 256 / 140 iterations inside the GEMM, and 3 + 256 / 170 in a launch of their own.
    """
    costs = {256: (100, 3), 224: (86, 4), 192: (80, 5), 240: (94, 3), 176: (75, 5), 144: (66, 6), 128: (51, 11)}
    for block_n, (percent, ends) in costs.items():
        kimi = with_changed_tile(kimi, block_n, iter_percent=percent, epilogue_iters=ends)
    plan = plan_route(kimi, stage="tail", tp=8, tokens=256, partials=1, device=h200)
    (rule,) = (rule for rule in plan.rules if rule.field == "block_n")
    assert rule.value == 128
    assert rule.reason == (
        "cheapest in iterations * percent:"
        " 22 * 100 + 6 * 100 for the norm with 256, 23 * 86 + 6 * 100 for the norm with 224,"
        " 24 * 75 + 6 * 100 for the norm with 176, 24 * 80 + 6 * 100 for the norm with 192,"
        " 22 * 94 + 6 * 100 for the norm with 240, 25 * 66 + 6 * 100 for the norm with 144,"
        " 30 * 51 + 5 * 100 for the norm with 128 columns"
    )


def test_of_equally_cheap_tiles_the_first_is_taken(kimi: Model, h200: DeviceFacts) -> None:
    for block_n in N_TILES:
        kimi = with_changed_tile(kimi, block_n, iter_percent=100, epilogue_iters=6)
    kimi = changed(kimi, hopper__prefill__norm__first_iters=0)
    assert form_of_gemm(gemm_of(kimi, h200, "tail", 8, 256)).block_n == 256


def test_a_table_without_tiles_is_refused(kimi: Model, h200: DeviceFacts) -> None:
    bare = changed(kimi, hopper__prefill__tiles=())
    message = r"front: T = 300: hopper\.prefill\.tiles is empty.*registry is damaged; export again"
    with pytest.raises(PlanError, match=message):
        gemm_of(bare, h200, "front", 8, 300)


@pytest.mark.parametrize(("tp", "up", "down", "ragged"), [(1, 56, 96, 0), (8, 7, 12, 0), (16, 4, 6, 32)])
def test_tail_form_has_its_constants(kimi: Model, h200: DeviceFacts, tp: int, up: int, down: int, ragged: int) -> None:
    form = gemm_of(kimi, h200, "tail", tp, 300).form
    assert isinstance(form, GemmForm)
    assert form.constants == (("K1_ITERS", up), ("K2_ITERS", down), ("NUM_K_ITERS", up + down))
    assert (form.num_k, form.k1_ragged_cols) == (up + down, ragged)


def test_ragged_tiles_are_planned(kimi: Model, h200: DeviceFacts) -> None:
    dims = dataclasses.replace(kimi.dims, hidden=7104, latent=3600, experts=900, shared_intermediate=6400)
    odd = with_tile(dataclasses.replace(kimi, dims=dims), 256)
    front = gemm_of(odd, h200, "front", 4, 300).form
    tail = gemm_of(odd, h200, "tail", 4, 300).form
    assert isinstance(front, GemmForm)
    assert isinstance(tail, GemmForm)
    # 900 / 256, 3600 / 256 and 1600 / 128, each rounded up; 900 latent columns a rank end 4 into their 15th iteration
    assert front.constants == (("I_LOCAL", 1600), ("N_TILES", 4 + 15 + 13), ("S_TILES", 13))
    assert (tail.num_k, tail.k1_ragged_cols) == (15 + 25, 4)
    assert dict(gemm_of(odd, h200, "tail", 4, 300).parameters)["num_items"] >= 28


def test_norm_is_released_early_whatever_the_grids(kimi: Model) -> None:
    for sm_count in SM_COUNTS:
        device = DeviceFacts.nominal("sm_90a", sm_count)
        for tokens in (200, 1000, 16384):
            plan = plan_route(kimi, stage="tail", tp=8, tokens=tokens, partials=2, device=device)
            norm = plan.launches[0]
            assert norm.form == NormForm(rows_per_cta=4, early_trigger=True)
            assert norm.grid_ctas == (-(-tokens // 4), 1, 1)
            (rule,) = (rule for rule in plan.rules if rule.field == "norm.early_trigger")
            assert rule.value is True
            assert "SM to itself" in rule.reason


@pytest.mark.parametrize(("stage", "partials"), [("front", 1), ("tail", 1), ("tail", 2)])
def test_every_decision_names_its_rule(kimi: Model, h200: DeviceFacts, stage: str, partials: int) -> None:
    plan = plan_route(kimi, stage=stage, tp=16, tokens=300, partials=partials, device=h200)
    gemm = plan.launches[-1]
    extra = {"k1_ragged_cols", "fused_norm"} if stage == "tail" else set()
    extra |= {"norm.early_trigger"} if partials == 2 else set()
    chosen = {"block_n", "n_tiles", "tiles", "num_k", "num_stages", "grid_ctas"} | extra
    assert {rule.field for rule in plan.rules} == chosen | {name for name, _ in gemm.parameters}
    form = form_of_gemm(gemm)
    values = {**dict(gemm.parameters), "num_k": K_ITERATIONS[stage][16], "block_n": form.block_n}
    values |= {"num_stages": form.num_stages, "n_tiles": N_TILES[form.block_n][stage][16]}
    values |= {"grid_ctas": gemm.grid_ctas[0], "k1_ragged_cols": 32}
    values |= {"tiles": count_pair_tiles(300, N_TILES[form.block_n][stage][16])}
    values |= {"fused_norm": partials == 1, "norm.early_trigger": True}
    for rule in plan.rules:
        assert rule.value == values[rule.field]
        assert rule.reason


def test_more_than_two_partials_change_no_launch(kimi: Model, h200: DeviceFacts) -> None:
    assert launches(kimi, h200, "tail", 8, 600, 64) == launches(kimi, h200, "tail", 8, 600, 2)


def test_fewer_resident_pairs_shrink_the_grid(kimi: Model, h200: DeviceFacts) -> None:
    scattered = dataclasses.replace(h200, resident_pairs=60)
    gemm = gemm_of(kimi, scattered, "front", 1, 4096)
    assert gemm.grid_ctas == (120, 1, 1)
    assert dict(gemm.parameters)["full_items"] % 60 == 0


def test_a_device_without_pairs_is_refused(kimi: Model, h200: DeviceFacts) -> None:
    lone = dataclasses.replace(h200, resident_pairs=0)
    with pytest.raises(PlanError, match=r"0 resident pairs \(132 SMs\); it needs at least 1"):
        gemm_of(kimi, lone, "tail", 8, 200)


def test_a_ring_over_shared_memory_is_refused(kimi: Model, h200: DeviceFacts) -> None:
    for number, block_n, stages, stage_bytes, most in ((0, 256, 5, 49152, 4), (6, 128, 8, 32768, 7)):
        deep = with_changed_tile(kimi, block_n, num_stages=stages)
        arithmetic = rf"{stages} stages \* {stage_bytes} bytes = {stages * stage_bytes} of 232448"
        way_out = rf"Set hopper\.prefill\.tiles\.{number}\.num_stages to {most} at most"
        with pytest.raises(PlanError, match=rf"tiles of {block_n} columns does not fit: {arithmetic}\. {way_out}"):
            gemm_of(deep, h200, "front", 8, 200)


@pytest.mark.parametrize(
    ("change", "stage", "message"),
    [
        ({"hidden": 7200}, "front", r"hidden = 7200 does not divide by 64 .*7200 - 7168 = 32 left over"),
        ({"shared_intermediate": 6400}, "tail", r"shared_intermediate / TP = 800 does not divide by 64"),
        ({"shared_intermediate": 6148}, "front", r"shared_intermediate = 6148 does not divide by 8 \(TP degree\)"),
        ({"latent": 3580}, "tail", r"latent = 3580 does not divide by 8 \(TP degree\)"),
    ],
)
def test_partial_iterations_are_refused(
    kimi: Model, h200: DeviceFacts, change: dict[str, int], stage: str, message: str
) -> None:
    odd = dataclasses.replace(kimi, dims=dataclasses.replace(kimi.dims, **change))
    with pytest.raises(PlanError, match=message):
        gemm_of(odd, h200, stage, 8, 300)


def test_tokens_beyond_32_bit_coordinates_are_refused(kimi: Model, h200: DeviceFacts) -> None:
    endless = dataclasses.replace(kimi, max_tokens=2**40)
    last = 2**31 - 128
    assert dict(gemm_of(endless, h200, "tail", 1, last).parameters)["m_tiles"] == last // 128
    for stage in ("front", "tail"):
        with pytest.raises(PlanError, match=r"token row is 16777216 row tiles \* 128 = 2147483648; .* to 2147483647"):
            gemm_of(endless, h200, stage, 1, last + 1)


def test_tiles_beyond_32_bits_are_refused(kimi: Model, h200: DeviceFacts) -> None:
    wide = dataclasses.replace(kimi, max_tokens=2**40, dims=dataclasses.replace(kimi.dims, hidden=2**17))
    with pytest.raises(PlanError, match=r"tile number is 4194304 pair rows \* 512 columns of tiles = 2147483648"):
        gemm_of(with_tile(wide, 256), h200, "tail", 1, 2**30)
