"""Predictions of the small model's requests: the same each time, and slower where the device is."""

from __future__ import annotations

import functools

import pytest

from cakegen.emulator.launches.cases import Case
from cakegen.registry import load_registry
from cakegen.timing.figures import DeviceFigures, load_device
from cakegen.timing.predict import BETTER, Prediction, better, predict

H200 = load_device("h200")
FRONT, TAIL = Case("front", 8, 8), Case("tail", 8, 8)


@functools.cache
def predicted(case: Case, figures: DeviceFigures = H200) -> Prediction:
    return predict(load_registry("tiny_latent_moe"), case, figures)


@pytest.mark.parametrize("case", [FRONT, TAIL])
def test_a_prediction_is_the_same_each_time(case: Case) -> None:
    again = predict(load_registry("tiny_latent_moe"), case, H200)
    assert again == predicted(case)
    assert again.floor_us < again.microseconds


def test_hbm_serves_each_byte_once() -> None:
    dims = load_registry("tiny_latent_moe").model.dims
    rows = dims.experts + dims.latent + 2 * dims.i_local(8)
    weights = 2 * dims.hidden * (rows + FRONT.tokens)
    assert weights <= predicted(FRONT).memory_bytes <= 1.02 * weights


@pytest.mark.parametrize("part", BETTER)
def test_a_slower_part_makes_no_request_faster(part: str) -> None:
    slow = predicted(TAIL, better(H200, part, 1 / 8))
    assert slow.microseconds >= predicted(TAIL).microseconds - 0.02


@pytest.mark.parametrize(
    ("part", "factor", "bound"),
    [("memory", 1 / 16, "memory"), ("SM ingress", 1 / 32, "SM ingress"), ("tensor", 1 / 64, "tensor")],
)
def test_the_part_that_holds_a_request_up_is_named(part: str, factor: float, bound: str) -> None:
    slow = predicted(FRONT, better(H200, part, factor))
    assert slow.bound == bound
    assert slow.microseconds > 1.3 * predicted(FRONT).microseconds


def test_a_launch_counts_as_it_is() -> None:
    slow = predicted(FRONT, better(H200, "launch", 0.5))
    more = (H200.launch.value + H200.store_drain.value) / 1e3
    assert slow.microseconds == pytest.approx(predicted(FRONT).microseconds + more)


def test_launches_follow_one_another() -> None:
    # a norm of its own, and a product behind it
    found = predicted(Case("tail", 8, 330, sm_count=6))
    body = sum(time.end for _, time in found.launches)
    assert len(found.launches) == 2
    assert found.microseconds == pytest.approx((H200.launch.value + body + H200.launch_gap.value) / 1e3)


def test_waits_name_the_barriers() -> None:
    waits = predicted(FRONT).launches[0][1].waits
    assert {"stage_full", "bar 1"} <= {what for _, what in waits}
    assert all(ns >= 0 for ns in waits.values())
