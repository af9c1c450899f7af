"""Every decode token count, TP degree, several ranks and 1 to 3 partials against the reference, on poisoned outputs.

Tolerances are those of the contract, against fp64 on the same bf16 inputs; `y` is compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_cases import BF16_TOLERANCE, TOKENS, Checks, FrontCase, TailCase, Weights, keys_of, run_twice

from cakegen.runtime import LatentMoe
from cakegen.runtime.reference import reference_norm

DEGREES = (1, 2, 4, 8, 16)
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
        case = FrontCase(moe, weights, tp, rank)
        expected = case.expected()
        check_front(checks, case, expected, f"tp {tp} rank {rank}")
    record_property("cases", checks.settle())


def check_front(checks: Checks, case: FrontCase, expected: tuple[torch.Tensor, ...], label: str) -> None:
    """Every T, largest first: a row must have the bits that it had in the largest call of the same program."""
    largest: dict[tuple[str, ...], tuple[torch.Tensor, ...]] = {}
    for tokens in range(TOKENS, 0, -1):
        runner = case.prepare(tokens)
        values = run_twice(checks, case, runner, tokens, f"{label} T {tokens}")
        rows = largest.setdefault(keys_of(runner), values)
        for name, value, exact, row, tolerance in zip(case.names, values, expected, rows, case.tolerances, strict=True):
            checks.close(f"{label} T {tokens} {name}", value, exact[:tokens], tolerance)
            checks.equal(f"{label} T {tokens} {name} rows", value, row[:tokens])


@pytest.mark.parametrize("partials", [1, 2, 3])
@pytest.mark.parametrize("tp", DEGREES)
def test_tail_of_every_token_count_matches(
    moe: LatentMoe, weights: Weights, tp: int, partials: int, record_property: Record
) -> None:
    checks = Checks()
    for rank in sorted({0, tp // 2, tp - 1}):
        case = TailCase(moe, weights, tp, rank, partials)
        every = rank != tp // 2 or tp == 1
        check_tail(checks, case, f"tp {tp} rank {rank} P {partials}", every=every)
    record_property("cases", checks.settle())


def check_tail(checks: Checks, case: TailCase, label: str, *, every: bool) -> None:
    """Every T, or every seventh, largest first; as `check_front`, with `y` equal bit for bit."""
    y, out = case.expected()
    largest: dict[tuple[str, ...], tuple[torch.Tensor, ...]] = {}
    for tokens in range(TOKENS, 0, -1 if every else -7):
        runner = case.prepare(tokens)
        values = run_twice(checks, case, runner, tokens, f"{label} T {tokens}")
        rows = largest.setdefault(keys_of(runner), values)
        checks.equal(f"{label} T {tokens} y", values[0], y[:tokens])
        checks.close(f"{label} T {tokens} out", values[1], out[:tokens], BF16_TOLERANCE)
        checks.equal(f"{label} T {tokens} out rows", values[1], rows[1][:tokens])


@pytest.mark.parametrize("tp", DEGREES[1:])
def test_sum_over_ranks_is_tp_1(moe: LatentMoe, weights: Weights, tp: int, record_property: Record) -> None:
    """Every rank's `out` is rounded to bf16 before the sum; those errors add like noise, so twice the tolerance."""
    checks = Checks()
    _, exact = TailCase(moe, weights, 1, 0, 2).expected()
    cases = [TailCase(moe, weights, tp, rank, 2) for rank in range(tp)]
    fronts = [FrontCase(moe, weights, tp, rank) for rank in range(tp)]
    _, _, whole = FrontCase(moe, weights, 1).expected()
    for tokens in (1, 7, 16, 33, TOKENS):
        total = sum(case.prepare(tokens)()[1].double() for case in cases)
        assert isinstance(total, torch.Tensor)
        checks.close(f"tp {tp} T {tokens} out", total, exact[:tokens], 2 * BF16_TOLERANCE)
        shared = torch.cat([case.prepare(tokens)()[2] for case in fronts], dim=1)
        checks.close(f"tp {tp} T {tokens} shared_act", shared, whole[:tokens], BF16_TOLERANCE)
    record_property("cases", checks.settle())
