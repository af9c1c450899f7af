"""The questions that a device is asked, asked of the emulator: it must answer what its own documentation says."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from question_backends import run_emulated
from questions import (
    BOX_BYTES,
    CORNERS,
    SWIZZLE_ROWS,
    ask_barrier,
    ask_box_alignment,
    ask_elect,
    ask_global_alignment,
    ask_window,
    compute_sum,
    copy_boxes,
    expected_region,
    map_over,
    predicted_b,
    read_b,
    source_matrix,
)
from sum_models import SumModel, judge, sum_cases

from cakegen.emulator import Fault

pytestmark = pytest.mark.emulator
SUMS = {case.name: (kernel, case) for kernel, case in sum_cases()}


@functools.cache
def sum_of(name: str) -> np.ndarray:
    kernel, case = SUMS[name]
    return compute_sum(run_emulated, kernel, case)


@pytest.mark.parametrize("swizzle", ["128B", "none"])
@pytest.mark.parametrize("corner", CORNERS.values(), ids=list(CORNERS))
def test_box_counts_all_of_its_bytes_wherever_it_lies(corner: tuple[int, int, int], swizzle: str) -> None:
    mapped = map_over(source_matrix(), swizzle)
    done, dump, base = copy_boxes(run_emulated, mapped, [(*corner, 0, BOX_BYTES)])
    assert done.tolist() == [1]
    np.testing.assert_array_equal(dump[0], expected_region(source_matrix(), swizzle, corner, 0, base))
    with pytest.raises(Fault, match=f"tx -{BOX_BYTES // 2} bytes"):
        copy_boxes(run_emulated, mapped, [(*corner, 0, BOX_BYTES // 2)])


def test_swizzle_follows_the_absolute_address() -> None:
    answer = ask_box_alignment(run_emulated, {})
    assert set(answer) == set(SWIZZLE_ROWS)
    for each in answer.values():
        assert each["completes"] == each["absolute"] == [True] * 8
    assert answer["128B"]["relative"] == [True] + [False] * 7


def test_swizzled_tensor_may_start_at_any_16_bytes() -> None:
    answer = ask_global_alignment(run_emulated, {})
    assert list(answer.values()) == [{"completes": True, "right": True}] * len(answer)


def test_phase_completes_when_arrivals_and_bytes_are_zero() -> None:
    assert ask_barrier(run_emulated, {}) == {
        "arrive": [[1], [0], [1]],
        "expect, arrive, bytes": [[1], [1], [1], [0]],
        "bytes, arrive with expect": [[1], [1], [0]],
        "bytes, expect, arrive": [[1], [1], [1], [0]],
        "bytes, arrive, expect": [[1], [1], [1], [1], [1], [0]],
        "bytes of a later phase": [[1], [0], [0], [1]],
        "two arrivals, bytes between": [[1], [1], [1], [0]],
    }


def test_one_lane_of_the_mask_leads() -> None:
    for mask, answer in ask_elect(run_emulated, {}).items():
        assert answer["one leader"], mask
        assert all(int(mask, 16) >> lane & 1 for lane in answer["lanes"]), mask


def test_addresses_carry_the_rank_from_bit_24() -> None:
    mapped = [hex(0x400 + (rank << 24)) for rank in range(4)]
    assert ask_window(run_emulated, {}) == {f"rank {r}": {"own": mapped[r], "mapa": mapped} for r in range(4)}


@pytest.mark.parametrize("start", [0, 64])
def test_wgmma_reads_rows_by_the_swizzle(start: int) -> None:
    np.testing.assert_array_equal(read_b(run_emulated, [(start, 0)])[0], predicted_b(start, 0, "address"))


@pytest.mark.parametrize("name", SUMS)
def test_sum_is_what_the_direct_model_says(name: str) -> None:
    equal, judged = judge(SUMS[name][1], sum_of(name), SumModel())
    assert equal == judged > 0


@pytest.mark.parametrize(
    "model",
    [
        SumModel(24),
        SumModel(26),
        SumModel(block=8),
        SumModel(cut="down"),
        SumModel(rounding="nearest"),
        SumModel(exponent="value"),
        SumModel(zeros=False),
    ],
    ids=str,
)
def test_operands_tell_the_models_apart(model: SumModel) -> None:
    """Operands on which two models agree would settle nothing."""
    different = 0
    for name, (_, case) in SUMS.items():
        equal, judged = judge(case, sum_of(name), model)
        different += judged - equal
    assert different > 100
