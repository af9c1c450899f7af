"""Device memory beside the operands: sized by what the kernels index."""

from __future__ import annotations

import pytest
from support.models import kimi_k3_model, short_decode, with_tile

from cakegen.model import DeviceFacts, Model
from cakegen.plan import GemmForm, Launch, control_words, partials_elems, plan_route


@pytest.fixture
def kimi() -> Model:
    """As prefill, what decode could serve too."""
    return short_decode(kimi_k3_model())


def gemm(model: Model, device: DeviceFacts, stage: str, tp: int, tokens: int, partials: int = 1) -> Launch:
    return plan_route(model, stage=stage, tp=tp, tokens=tokens, partials=partials, device=device).launches[-1]


def test_cut_gemm_has_a_slot_for_each_segment(kimi: Model, h200: DeviceFacts) -> None:
    # 48 tiles of at most 2 segments: 2 CTAs * 128 * 256 sums each, half of them one warpgroup's
    wide = gemm(with_tile(kimi, 256), h200, "front", 8, 512)
    assert partials_elems(wide) == 48 * 2 * 2 * 128 * 256 == 6291456
    assert control_words(wide) == 48 * 2 * 2
    # 47 narrow tiles of at most 2 segments, each CTA's rows one warpgroup's
    narrow = gemm(with_tile(kimi, 128), h200, "front", 8, 256)
    assert partials_elems(narrow) == 47 * 2 * 2 * 128 * 128
    assert control_words(narrow) == 47 * 2
    # 32 tiles of 192 columns, which both warpgroups share
    between = gemm(with_tile(kimi, 192), h200, "front", 8, 256)
    assert partials_elems(between) == 32 * 2 * 2 * 128 * 192
    assert control_words(between) == 32 * 2 * 2


def test_whole_tiles_need_neither(kimi: Model, h200: DeviceFacts) -> None:
    for launch in (gemm(kimi, h200, "front", 1, 256), gemm(kimi, h200, "tail", 1, 512, partials=2)):
        assert (partials_elems(launch), control_words(launch)) == (0, 0)


def test_fused_norm_counts_its_rows_behind_the_segments(kimi: Model, h200: DeviceFacts) -> None:
    # no tile is cut: a counter for each pair row of 256 tokens, and one of the CTAs that need no more rows
    for tokens, pair_rows in ((511, 2), (512, 2), (513, 3), (1024, 4)):
        whole = gemm(with_tile(kimi, 256), h200, "tail", 8, tokens)
        assert whole.key == "tail_gemm:tp8f1@sm_90a"
        assert (partials_elems(whole), control_words(whole)) == (0, pair_rows + 1)
    # 32 cut tiles of two CTAs and two warpgroups come before them
    cut = gemm(kimi, h200, "tail", 1, 256)
    assert partials_elems(cut) == 32 * 2 * 2 * 128 * 224
    assert control_words(cut) == 32 * 2 * 2 + 1 + 1


def test_last_segment_of_the_last_tile_ends_the_partials(kimi: Model) -> None:
    for sm_count in (78, 132):
        device = DeviceFacts.nominal("sm_90a", sm_count)
        for stage, partials in (("front", 1), ("tail", 1), ("tail", 2)):
            for tp in (1, 2, 4, 8, 16):
                for tokens in range(256, 16385, 128):
                    launch = gemm(kimi, device, stage, tp, tokens, partials)
                    assert isinstance(launch.form, GemmForm)
                    parameters = dict(launch.parameters)
                    cut = parameters["sk_total"] // launch.form.num_k
                    assert cut * launch.form.num_k == parameters["sk_total"]
                    # slots of one warpgroup: [cut, segment, CTA, part] of [128 / parts, block_n] sums
                    parts = launch.form.tile_groups
                    last = ((cut * parameters["sk_max_seg"] - 1) * 2 + 1) * parts + parts - 1
                    assert partials_elems(launch) == ((last + 1) * (128 // parts) * launch.form.block_n if cut else 0)
                    norm_words = -(-tokens // 256) + 1 if launch.form.fused_norm else 0
                    last_arrival = ((cut - 1) * 2 + 1) * parts + parts - 1
                    assert control_words(launch) == last_arrival + 1 + norm_words
                    # 2 waves, less a tile, in 2 segments: the wider cut is taken for few segments only
                    assert partials_elems(launch) * 4 <= 64 * 2**20


def test_decode_counts_arrivals_only_where_ctas_wait(kimi: Model, h200: DeviceFacts) -> None:
    waiting = gemm(kimi, h200, "tail", 8, 64)
    assert (partials_elems(waiting), control_words(waiting)) == (0, 1)
    resident = gemm(kimi, h200, "tail", 8, 4)
    assert (partials_elems(resident), control_words(resident)) == (0, 0)
    front = gemm(kimi, h200, "front", 8, 8)
    assert (partials_elems(front), control_words(front)) == (0, 0)


def test_norm_needs_neither(kimi: Model, h200: DeviceFacts) -> None:
    norm = plan_route(kimi, stage="tail", tp=8, tokens=300, partials=2, device=h200).launches[0]
    assert (partials_elems(norm), control_words(norm)) == (0, 0)


def test_fused_norm_counts_the_rows_of_each_pair_row(kimi: Model, h200: DeviceFacts) -> None:
    # 300 tokens are 2 pair rows of tiles; one word more counts the CTAs that need no more of them
    launch = gemm(with_tile(kimi, 224), h200, "tail", 8, 300, partials=1)
    assert (partials_elems(launch), control_words(launch)) == (0, 2 + 1)
