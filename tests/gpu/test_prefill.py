"""Prefill calls of many row counts, every TP degree, several ranks and 1 to 3 partials against the reference.

All rows are compared with fp64 on the same bf16 inputs, and `y` bit for bit; outputs, their pitch gaps and the fp32
partials are poisoned before every call, and every call is repeated.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from support.gpu.cases import Checks, FrontCase, GuardedPartials, TailCase, Weights
from support.gpu.checks import (
    check_front,
    check_front_bad_row,
    check_replay,
    check_sum_over_ranks,
    check_tail,
    check_tail_bad_row,
)
from support.gpu.prefill import DEGREES, ROWS, TOKENS, form_tokens, words_of

from cakegen.errors import PlanError
from cakegen.plan.records import DecodeForm, GemmForm
from cakegen.runtime import LatentMoe, driver
from cakegen.runtime.runner import ProgramRunner

BAD = (float("nan"), float("inf"))
Record = Callable[[str, object], None]


@pytest.mark.parametrize("tp", DEGREES)
def test_front_of_every_listed_row_count_matches(
    prefill_moe: LatentMoe, prefill_weights: Weights, partials: GuardedPartials, tp: int, record_property: Record
) -> None:
    checks = Checks()
    for rank in sorted({0, tp - 1}):
        case = FrontCase(prefill_moe, prefill_weights, tp, rank, partials)
        check_front(checks, case, TOKENS, f"tp {tp} rank {rank}")
    record_property("cases", checks.settle())


@pytest.mark.parametrize("num_partials", [1, 2, 3])
@pytest.mark.parametrize("tp", DEGREES)
def test_tail_of_every_listed_row_count_matches(
    prefill_moe: LatentMoe,
    prefill_weights: Weights,
    partials: GuardedPartials,
    tp: int,
    num_partials: int,
    record_property: Record,
) -> None:
    checks = Checks()
    for rank in sorted({0, tp // 2, tp - 1}):
        case = TailCase(prefill_moe, prefill_weights, tp, rank, num_partials, partials)
        tokens = TOKENS if rank != tp // 2 or tp == 1 else TOKENS[::3]
        check_tail(checks, case, tokens, f"tp {tp} rank {rank} P {num_partials}")
    record_property("cases", checks.settle())


@pytest.mark.parametrize("tp", DEGREES[1:])
def test_sum_over_ranks_is_tp_1(
    prefill_moe: LatentMoe, prefill_weights: Weights, partials: GuardedPartials, tp: int, record_property: Record
) -> None:
    checks = Checks()
    ranks = [(1, 0), *((tp, rank) for rank in range(tp))]
    front = [FrontCase(prefill_moe, prefill_weights, *pair, partials) for pair in ranks]
    tail = [TailCase(prefill_moe, prefill_weights, *pair, 2, partials) for pair in ranks]
    for tokens in (130, 1000, 4096):
        check_sum_over_ranks(checks, front, tail, tokens, f"tp {tp}")
    record_property("cases", checks.settle())


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("tp", DEGREES)
def test_bad_row_stays_alone(
    prefill_moe: LatentMoe,
    prefill_weights: Weights,
    partials: GuardedPartials,
    tp: int,
    bad: float,
    record_property: Record,
) -> None:
    checks = Checks()
    front = FrontCase(prefill_moe, prefill_weights, tp, 0, partials)
    for tokens in form_tokens(prefill_moe, "front", tp):
        for row in (tokens // 2, tokens - 1):
            check_front_bad_row(checks, front, tokens, row, bad, f"tp {tp} T {tokens} row {row}")
    for count in (1, 2):
        tail = TailCase(prefill_moe, prefill_weights, tp, tp - 1, count, partials)
        for tokens in form_tokens(prefill_moe, "tail", tp, count):
            for row in (tokens // 2, tokens - 1):
                check_tail_bad_row(checks, tail, tokens, row, bad, f"tp {tp} P {count} T {tokens} row {row}")
    record_property("cases", checks.settle())


@pytest.mark.parametrize("mode", ["global", "relaxed"])
@pytest.mark.parametrize("tp", [1, 8, 16])
def test_graph_replay_computes_new_values_in_the_same_buffers(
    prefill_moe: LatentMoe,
    prefill_weights: Weights,
    partials: GuardedPartials,
    tp: int,
    mode: str,
    record_property: Record,
) -> None:
    """A tail's launch is cooperative, or a programmatic one whose edge comes from the norm."""
    checks, weights = Checks(), prefill_weights
    front = FrontCase(prefill_moe, weights, tp, 0, partials)
    x = weights.x.clone()
    for tokens in form_tokens(prefill_moe, "front", tp):
        label = f"tp {tp} T {tokens} front"
        check_replay(checks, front, front.prepare(tokens, x=x), [(x, weights.other_x)], mode, label)
    for count in (1, 2):
        tail = TailCase(prefill_moe, weights, tp, 0, count, partials)
        routed, shared_act = weights.routed[:count].clone(), tail.shared_act.clone()
        changes = [(routed, weights.routed[:count].flip(1)), (shared_act, tail.shared_act.flip(0))]
        for tokens in form_tokens(prefill_moe, "tail", tp, count):
            runner = tail.prepare(tokens, routed=routed, shared_act=shared_act)
            check_replay(checks, tail, runner, changes, mode, f"tp {tp} P {count} T {tokens} tail")
    record_property("cases", checks.settle())


@pytest.mark.parametrize("tp", DEGREES)
def test_control_words_are_left_at_zero(
    prefill_moe: LatentMoe, prefill_weights: Weights, partials: GuardedPartials, tp: int, record_property: Record
) -> None:
    """Read after each call, so that a counter that was left behind is not only seen in the call that follows."""
    counted = fused = 0
    front = FrontCase(prefill_moe, prefill_weights, tp, 0, partials)
    tails = [TailCase(prefill_moe, prefill_weights, tp, 0, count, partials) for count in (1, 2)]
    for stage, num_partials, case in (("front", 1, front), ("tail", 1, tails[0]), ("tail", 2, tails[1])):
        for tokens in form_tokens(prefill_moe, stage, tp, num_partials):
            runner = case.prepare(tokens)
            assert isinstance(runner, ProgramRunner)
            assert runner.plan is not None
            form = runner.plan.launches[-1].form
            assert isinstance(form, GemmForm | DecodeForm)
            fused += form.fused_norm
            count = words_of(runner.plan)
            assert (runner._words is not None) == (count > 0)
            if runner._words is not None:
                runner()
                words = (ctypes.c_int32 * count)()
                torch.cuda.synchronize()
                driver.call("cuMemcpyDtoH", ctypes.addressof(words), runner._words.address, 4 * count)
                assert not any(words), f"{stage} tp {tp} P {num_partials} T {tokens}: {list(words)}"
                counted += 1
    assert fused, "no tail normalises inside its GEMM"
    record_property("cases", counted)


def test_published_export_serves_every_listed_request(warm_prefill: dict[str, LatentMoe]) -> None:
    moe = warm_prefill["kimi"]
    for tp in DEGREES:
        for tokens in TOKENS:
            assert moe.program_available("cuda", "front", tp, tokens)
            assert all(moe.program_available("cuda", "tail", tp, tokens, count) for count in (1, 2, 3, 64))
    assert not moe.program_available("cuda", "front", 1, ROWS + 1)


def test_more_rows_than_the_export_declares_are_refused(prefill_moe: LatentMoe, device: torch.device) -> None:
    dims = prefill_moe.model.dims

    def empty(cols: int, rows: int = ROWS + 1, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(rows, cols, dtype=dtype, device=device)

    gate, down, gate_up = (empty(dims.hidden, rows) for rows in (dims.experts, dims.latent, 2 * dims.i_local(8)))
    logits, latent, shared_act = empty(dims.experts, dtype=torch.float32), empty(dims.latent), empty(dims.i_local(8))
    with pytest.raises(PlanError, match=rf"T = {ROWS + 1} is outside 1 … {ROWS}"):
        prefill_moe.prepare_front(empty(dims.hidden), gate, down, gate_up, logits, latent, shared_act)
