"""Device memory beside the operands: sized by what the kernels index."""

from __future__ import annotations

from models import with_tile

from cakegen.model import DeviceFacts, Model
from cakegen.plan import GemmForm, Launch, control_words, partials_elems, plan_route


def gemm(model: Model, device: DeviceFacts, stage: str, tp: int, tokens: int, partials: int = 2) -> Launch:
    """Of several partials, with which the norm of a prefill tail is a launch of its own."""
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
    launch = gemm(kimi, h200, "front", 1, 256)
    assert (partials_elems(launch), control_words(launch)) == (0, 0)


def test_last_segment_of_the_last_tile_ends_the_partials(kimi: Model) -> None:
    for sm_count in (78, 132):
        device = DeviceFacts.nominal("sm_90a", sm_count)
        for stage in ("front", "tail"):
            for tp in (1, 2, 4, 8, 16):
                for tokens in range(256, 16385, 256):
                    launch = gemm(kimi, device, stage, tp, tokens)
                    assert isinstance(launch.form, GemmForm)
                    parameters = dict(launch.parameters)
                    cut = parameters["sk_total"] // launch.form.num_k
                    assert cut * launch.form.num_k == parameters["sk_total"]
                    # slots of one warpgroup: [cut, segment, CTA, part] of [128 / parts, block_n] sums
                    parts = launch.form.tile_groups
                    last = ((cut * parameters["sk_max_seg"] - 1) * 2 + 1) * parts + parts - 1
                    assert partials_elems(launch) == ((last + 1) * (128 // parts) * launch.form.block_n if cut else 0)
                    assert control_words(launch) == ((((cut - 1) * 2 + 1) * parts + parts - 1) + 1 if cut else 0)
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
