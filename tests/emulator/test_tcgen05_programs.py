"""Whole tcgen05 programs, written by hand: clean and right under every schedule."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.units.tensor_core import bf16_to_f32
from cakegen.runtime.tensor_map import TensorMap

Launch = Callable[..., Machine]
Make = Callable[..., np.ndarray]

SCHEDULES = [("early", 0), ("late", 0), *(("random", seed) for seed in range(5))]


def operand_map(name: str, matrix: np.ndarray, box_rows: int) -> TensorMap:
    """Boxes of `[box_rows, 64]` with the 128-byte swizzle of `[rows, k]` bf16."""
    rows, k = matrix.shape
    return TensorMap(name, matrix.ctypes.data, (64, rows, k // 64), (2 * k, 128), (64, box_rows, 1))


def check(
    launch: Launch,
    array: Make,
    program: Callable[[str], str],
    name: str,
    adversary: Adversary,
    shape: tuple[int, int, int],
    boxes: tuple[int, int],
    **options: object,
) -> Machine:
    """Run a GEMM and compare it with fp64."""
    m, n, k = shape
    make = np.random.default_rng(7)
    a, b = (
        array((make.standard_normal((rows, k)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))
        for rows in (m, n)
    )
    out = array(np.full((m, n), np.nan), np.float32)
    record = array(np.full(16, 1 << 60), np.uint64)
    tiles = () if "one_cta" in name else (m // 256 * (n // 64),)
    arguments = (operand_map("a", a, boxes[0]), operand_map("b", b, boxes[1]), out, n, k, *tiles, record, a, b)
    machine = launch(program(name), *arguments, block=192, adversary=adversary, outputs=(2,), arch="sm_100a", **options)
    wide_a, wide_b = bf16_to_f32(a).astype(np.float64), bf16_to_f32(b).astype(np.float64)
    # a step of K = 16 truncates 17 terms at 2^-25 of the largest, and its sum at 2^-23
    bound = k / 16 * (17 * 2.0**-25 + 2.0**-23) * (abs(wide_a) @ abs(wide_b).T)
    assert (abs(out - wide_a @ wide_b.T) <= bound).all()
    return machine


@pytest.fixture(params=SCHEDULES, ids=lambda value: f"{value[0]}{value[1]}")
def adversary(request: pytest.FixtureRequest) -> Adversary:
    return Adversary(*request.param)


def test_gemm_of_one_cta(launch: Launch, array: Make, program: Callable[[str], str], adversary: Adversary) -> None:
    check(launch, array, program, "gemm_one_cta", adversary, (256, 128, 320), (128, 64), grid=(2, 2), smem=75 * 1024)


def test_gemm_of_pairs_with_two_accumulators(
    launch: Launch, array: Make, program: Callable[[str], str], adversary: Adversary
) -> None:
    """Two clusters, three tiles each."""
    options = {"grid": 4, "cluster": 2, "smem": 61 * 1024}
    check(launch, array, program, "gemm_pair", adversary, (512, 192, 256), (128, 32), **options)


def test_gemm_that_takes_the_place_of_waiting_clusters(
    launch: Launch, array: Make, program: Callable[[str], str], adversary: Adversary
) -> None:
    options = {"grid": 12, "cluster": 2, "smem": 61 * 1024}
    check(launch, array, program, "gemm_launch_control", adversary, (512, 192, 256), (128, 32), **options)
