"""The questions that a device was asked, asked of the emulator: it must answer what `benchmarks/h200` says."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.emulator.question_backends import run_emulated
from support.emulator.questions import (
    BOX_BYTES,
    CORNERS,
    SWIZZLE_ROWS,
    ask_barrier,
    ask_box_alignment,
    ask_elect,
    ask_global_alignment,
    ask_window,
    base_offset_requests,
    compute_sum,
    copy_boxes,
    expected_region,
    map_over,
    read_b,
    source_matrix,
)
from support.emulator.sum_models import SumModel, judge, sum_cases

from cakegen.emulator import Fault

pytestmark = pytest.mark.emulator
RECORDED = Path(__file__).parents[2] / "benchmarks" / "h200"
SUMS = {case.name: (kernel, case) for kernel, case in sum_cases()}
IN_ROW_0 = [number for number, (start, field) in enumerate(base_offset_requests()) if start // 128 == field]


@functools.cache
def answers() -> dict[str, Any]:
    """What an H200 answered."""
    content: dict[str, Any] = json.loads((RECORDED / "answers.json").read_text(encoding="utf-8"))
    return content


@functools.cache
def arrays() -> dict[str, np.ndarray]:
    """And what is no JSON."""
    with np.load(RECORDED / "answers.npz") as kept:
        return dict(kept)


@pytest.mark.parametrize("swizzle", ["128B", "none"])
@pytest.mark.parametrize("corner", CORNERS)
def test_box_counts_all_of_its_bytes_wherever_it_lies(corner: str, swizzle: str) -> None:
    assert answers()["box bytes"][f"{corner}, {swizzle}"]["completes with"] == [BOX_BYTES]
    mapped, place = map_over(source_matrix(), swizzle), CORNERS[corner]
    done, dump, base = copy_boxes(run_emulated, mapped, [(*place, 0, BOX_BYTES)])
    assert done.tolist() == [1]
    np.testing.assert_array_equal(dump[0], expected_region(source_matrix(), swizzle, place, 0, base))
    with pytest.raises(Fault, match=f"tx -{BOX_BYTES // 2} bytes"):
        copy_boxes(run_emulated, mapped, [(*place, 0, BOX_BYTES // 2)])


def test_swizzle_follows_the_absolute_address() -> None:
    answer, recorded = ask_box_alignment(run_emulated, {}), answers()["box alignment"]
    assert set(answer) == set(recorded) == set(SWIZZLE_ROWS)
    for swizzle, each in answer.items():
        assert each["completes"] == recorded[swizzle]["completes"] == [True] * 8
        assert each["absolute"] == recorded[swizzle]["absolute"] == [True] * 8
    assert answer["128B"]["relative"] == recorded["128B"]["relative"] == [True] + [False] * 7


def test_swizzled_tensor_may_start_at_any_16_bytes() -> None:
    assert ask_global_alignment(run_emulated, {}) == answers()["global alignment"]


def test_phase_completes_when_arrivals_and_bytes_are_zero() -> None:
    assert ask_barrier(run_emulated, {}) == answers()["barrier"]


def test_one_lane_of_the_mask_leads() -> None:
    for mask, answer in ask_elect(run_emulated, {}).items():
        assert answer["one leader"], mask
        assert all(int(mask, 16) >> lane & 1 for lane in answer["lanes"]), mask


def test_addresses_carry_the_rank_from_bit_24() -> None:
    assert ask_window(run_emulated, {}) == answers()["window"]


@pytest.mark.parametrize("number", IN_ROW_0)
def test_wgmma_reads_rows_by_the_swizzle_and_the_base_offset(number: int) -> None:
    request = base_offset_requests()[number]
    np.testing.assert_array_equal(read_b(run_emulated, [request])[0], arrays()["base offset"][number])


@pytest.mark.parametrize("name", SUMS)
def test_sum_has_the_bits_of_the_device(name: str) -> None:
    """Random numbers, cancellation, zeros, subnormals, overflow, infinity and NaN."""
    got, recorded = compute_sum(run_emulated, *SUMS[name]), arrays()[f"sum {name}"]
    np.testing.assert_array_equal(got.view(np.uint32), recorded.view(np.uint32))


def test_direct_model_says_what_the_device_did() -> None:
    for name, (_, case) in SUMS.items():
        equal, judged = judge(case, arrays()[f"sum {name}"], SumModel())
        assert equal == judged > 0, name


@pytest.mark.parametrize(
    "model",
    [
        SumModel(24),
        SumModel(26),
        SumModel(block=8),
        SumModel(cut="down"),
        SumModel(rounding="nearest"),
        SumModel(exponent="value"),
        SumModel(zeros=True),
    ],
    ids=str,
)
def test_no_other_model_says_it(model: SumModel) -> None:
    """Operands on which two models agree would settle nothing."""
    different = 0
    for name, (_, case) in SUMS.items():
        equal, judged = judge(case, arrays()[f"sum {name}"], model)
        different += judged - equal
    assert different > 1000
