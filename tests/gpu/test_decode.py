"""Every decode token count, TP degree, several ranks and 1 to 3 partials against the reference, on poisoned outputs.

Tolerances are those of the contract, against fp64 on the same bf16 inputs; `y` is compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.gpu.cases import TOKENS, Checks, FrontCase, TailCase, Weights
from support.gpu.checks import check_front, check_sum_over_ranks, check_tail

from cakegen.runtime import LatentMoe
from cakegen.runtime.reference import reference_norm

DEGREES = (1, 2, 4, 8, 16)
EVERY = range(1, TOKENS + 1)
Record = Callable[[str, object], None]


def test_reference_norm_has_the_same_bits_on_both_devices(weights: Weights, moe: LatentMoe) -> None:
    eps = moe.model.dims.norm_eps
    there = reference_norm(weights.routed, weights.norm, eps)
    here = reference_norm(weights.routed.cpu(), weights.norm.cpu(), eps)
    assert torch.equal(there.cpu().view(torch.int16), here.view(torch.int16))


@pytest.mark.parametrize("tp", DEGREES)
def test_front_of_every_token_count_matches(moe: LatentMoe, weights: Weights, tp: int, record_property: Record) -> None:
    checks = Checks()
    for rank in sorted({0, tp - 1}):
        check_front(checks, FrontCase(moe, weights, tp, rank), EVERY, f"tp {tp} rank {rank}")
    record_property("cases", checks.settle())


@pytest.mark.parametrize("partials", [1, 2, 3])
@pytest.mark.parametrize("tp", DEGREES)
def test_tail_of_every_token_count_matches(
    moe: LatentMoe, weights: Weights, tp: int, partials: int, record_property: Record
) -> None:
    checks = Checks()
    for rank in sorted({0, tp // 2, tp - 1}):
        case = TailCase(moe, weights, tp, rank, partials)
        tokens = EVERY if rank != tp // 2 or tp == 1 else range(TOKENS, 0, -7)
        check_tail(checks, case, tokens, f"tp {tp} rank {rank} P {partials}")
    record_property("cases", checks.settle())


@pytest.mark.parametrize("tp", DEGREES[1:])
def test_sum_over_ranks_is_tp_1(moe: LatentMoe, weights: Weights, tp: int, record_property: Record) -> None:
    checks = Checks()
    front = [FrontCase(moe, weights, 1), *(FrontCase(moe, weights, tp, rank) for rank in range(tp))]
    tail = [TailCase(moe, weights, 1, 0, 2), *(TailCase(moe, weights, tp, rank, 2) for rank in range(tp))]
    for tokens in (1, 7, 16, 33, 128, TOKENS):
        check_sum_over_ranks(checks, front, tail, tokens, f"tp {tp}")
    record_property("cases", checks.settle())
