"""Plans of the Hopper prefill GEMMs against what their kinds of tile and their cuts took on a device."""

from __future__ import annotations

import pytest

from cakegen.model import DeviceFacts, Model
from cakegen.plan import GemmForm, plan_route

# One H200 (132 SMs), 2026-11-29, CUDA graphs, cold L2, whole stage, us, the least of the runs that had the plan:
# (stage, TP, T) -> {(columns of a tile, whole tiles, iterations of an item of the cut tiles; 0: none is cut): us}
MEASURED = {
    ("front", 1, 256): {(256, 66, 0): 88.8, (128, 131, 0): 90.3},
    ("front", 1, 512): {(256, 132, 0): 162.9, (128, 262, 0): 165.0},
    ("front", 1, 1024): {(256, 264, 0): 313.0, (128, 524, 0): 320.0},
    ("front", 8, 256): {(256, 0, 56): 49.2, (256, 0, 41): 47.8, (128, 0, 84): 40.6, (128, 0, 80): 41.0},
    ("front", 8, 512): {(256, 0, 84): 75.7, (128, 66, 48): 76.1},
    ("front", 8, 768): {(256, 0, 126): 102.4, (128, 66, 128): 94.5},
    ("front", 8, 1024): {(256, 66, 56): 127.5, (128, 188, 0): 122.8, (128, 132, 96): 123.5},
    ("front", 8, 2048): {(256, 192, 0): 231.9, (128, 330, 84): 239.9, (128, 330, 79): 241.2},
    ("front", 8, 4096): {(256, 330, 92): 470.1, (128, 726, 48): 473.9, (128, 660, 157): 483.2},
    ("front", 8, 8192): {(256, 726, 72): 1009.5, (128, 1452, 89): 972.3, (128, 1386, 201): 1004.0},
    ("tail", 1, 256): {(256, 0, 76): 63.1, (128, 56, 0): 59.5, (128, 0, 129): 63.0},
    ("tail", 1, 512): {(256, 56, 0): 108.8, (256, 0, 129): 115.9, (128, 66, 106): 109.7},
    ("tail", 1, 768): {(256, 0, 194): 169.9, (128, 132, 83): 151.1},
    ("tail", 1, 1024): {(256, 66, 106): 204.3, (128, 132, 212): 212.4},
    ("tail", 1, 2048): {(256, 132, 212): 416.2, (128, 396, 120): 404.5},
    ("tail", 1, 4096): {(256, 396, 120): 772.8, (128, 858, 88): 790.5},
    ("tail", 1, 8192): {(256, 858, 88): 1486.2, (128, 1716, 176): 1585.7},
    ("tail", 8, 256): {(256, 28, 0): 21.4, (128, 56, 0): 16.7},
    ("tail", 8, 512): {(256, 56, 0): 23.5, (128, 112, 0): 23.2},
    ("tail", 8, 768): {(256, 84, 0): 36.9, (128, 168, 0): 30.0},
    ("tail", 8, 1024): {(256, 112, 0): 38.3, (128, 224, 0): 37.6, (128, 132, 27): 37.7},
    ("tail", 8, 2048): {(256, 224, 0): 71.2, (128, 448, 0): 64.0},
    ("tail", 8, 4096): {(256, 448, 0): 125.2, (128, 896, 0): 122.9},
    ("tail", 8, 8192): {(256, 896, 0): 236.4, (128, 1792, 0): 232.6, (128, 1716, 22): 234.6},
    ("tail", 8, 16384): {(256, 1716, 22): 471.6, (128, 3584, 0): 455.8, (128, 3498, 25): 457.1},
}
# The plan was not among the runs: it cuts tiles of its kind in another way than the runs did.
OTHER_CUTS = {("front", 8, 4096), ("front", 8, 8192), ("tail", 1, 2048)}
WITHIN = 1.015


def chosen(kimi: Model, h200: DeviceFacts, request_shape: tuple[str, int, int]) -> tuple[int, int, int]:
    stage, tp, tokens = request_shape
    gemm = plan_route(kimi, stage=stage, tp=tp, tokens=tokens, partials=1, device=h200).launches[-1]
    assert isinstance(gemm.form, GemmForm)
    parameters = dict(gemm.parameters)
    ipc = parameters["sk_ipc"] if parameters["sk_total"] else 0
    return gemm.form.block_n, parameters["full_items"], ipc


@pytest.mark.parametrize("request_shape", MEASURED, ids=str)
def test_chosen_tile_is_the_faster_one(kimi: Model, h200: DeviceFacts, request_shape: tuple[str, int, int]) -> None:
    found, plans = chosen(kimi, h200, request_shape), MEASURED[request_shape]
    if request_shape in OTHER_CUTS:
        assert found not in plans
        return
    assert plans[found] <= WITHIN * min(plans.values()), f"{found} of {plans}"
