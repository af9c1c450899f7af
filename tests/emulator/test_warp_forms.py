"""Shuffles, votes, matches and reductions of a warp against plain Python (PTX ISA 9.7.9.6, 9.7.13)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from support.emulator.unit_kernels import check_units, run_text, run_units, unit

from cakegen.emulator.faults import Fault
from cakegen.errors import EmulationError

pytestmark = [pytest.mark.emulator, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

WARPS = 6
ALL = "0xffffffff"


def a_warp(function: Callable[[np.ndarray], np.ndarray], values: np.ndarray) -> np.ndarray:
    """A function of each warp's 32 values."""
    return np.concatenate([np.broadcast_to(function(row), 32) for row in values.reshape(-1, 32)])


def few(seed: int, kind: str) -> np.ndarray:
    """Values that repeat; two warps are of one value each."""
    values = np.random.default_rng(seed).integers(-3, 4, 32 * WARPS)
    values[32:64], values[64:96] = 2, -1
    return values.astype(kind)


def test_votes() -> None:
    holds = few(1, "i4") > 0
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    ballot = a_warp(lambda row: np.uint32(bits[row].sum()), holds)
    check_units(
        [
            unit("vote.sync.all.pred", holds, ALL, gives=a_warp(np.all, holds)),
            unit("vote.sync.any.pred", holds, ALL, gives=a_warp(np.any, holds)),
            unit("vote.sync.uni.pred", holds, ALL, gives=a_warp(lambda row: row.all() | ~row.any(), holds)),
            unit("vote.sync.ballot.b32", holds, ALL, gives=ballot.astype(np.uint32)),
        ]
    )


def test_matches() -> None:
    units = []
    for name, kind in (("b32", "u4"), ("b64", "u8")):
        values = few(2, f"i{kind[1]}").view(kind)
        rows = values.reshape(-1, 32)
        anyone = [sum(1 << i for i in range(32) if row[i] == value) for row in rows for value in row]
        agree = a_warp(lambda row: (row == row[0]).all(), values)
        every = np.where(agree, np.uint32(0xFFFFFFFF), np.uint32(0))
        units.append(unit(f"match.any.sync.{name}", values, ALL, gives=np.array(anyone, np.uint32)))
        units.append(unit(f"match.all.sync.{name}", values, ALL, gives=(every, agree)))
    check_units(units)


def test_reductions_of_integers() -> None:
    units = []
    for name, kind in (("s32", "i4"), ("u32", "u4"), ("b32", "u4")):
        values = np.random.default_rng(3).integers(0, 1 << 32, 32 * WARPS).astype(np.uint32).view(kind)
        for operation, function in (
            (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor))
            if name == "b32"
            else (("add", np.add), ("min", np.minimum), ("max", np.maximum))
        ):
            wanted = a_warp(function.reduce, values).astype(kind)
            units.append(unit(f"redux.sync.{operation}.{name}", values, ALL, gives=wanted))
    check_units(units)


@pytest.mark.parametrize("operation", ["min", "max"])
def test_reductions_of_floats(operation: str) -> None:
    """NaN loses unless `.NaN`; a warp of NaN gives NaN; -0 lies below +0."""
    values = np.random.default_rng(4).standard_normal(32 * WARPS).astype(np.float32)
    values[40] = values[70] = np.nan
    values[96:128] = np.nan
    values[128:160] = np.where(np.arange(32) == 5, np.float32(-0.0), np.float32(0.0))

    def reduced(row: np.ndarray, nan_wins: bool) -> np.float32:
        kept = row[~np.isnan(row)]
        if not kept.size or (nan_wins and kept.size < row.size):
            return np.float32(np.nan)
        # as pairs, so that the sign of a zero decides
        order = [(float(value), not np.signbit(value)) for value in kept]
        best = min(order) if operation == "min" else max(order)
        return np.float32(np.copysign(best[0], 1 if best[1] else -1))

    units = []
    for modifiers in ("", ".NaN", ".abs", ".abs.NaN"):
        nan_wins, source = "NaN" in modifiers, np.abs(values) if "abs" in modifiers else values
        wanted = a_warp(functools.partial(reduced, nan_wins=nan_wins), source).astype(np.float32)
        units.append(unit(f"redux.sync.{operation}{modifiers}.f32", values, ALL, gives=wanted))
    check_units(units)


def test_shuffles_say_whether_their_source_is_in_range() -> None:
    values = np.random.default_rng(5).integers(0, 1 << 32, 32 * WARPS).astype(np.uint32)
    lane = np.tile(np.arange(32), WARPS)
    warp = np.arange(32 * WARPS) // 32 * 32
    units = []
    for mode, distance, clamp in (("up", 3, 0), ("down", 5, 31), ("bfly", 9, 31), ("idx", 7, 31), ("down", 2, 0x1807)):
        first = lane & 24 if clamp > 31 else 0 * lane
        last = lane | 7 if clamp > 31 else 31 + 0 * lane
        source = {"up": lane - distance, "down": lane + distance, "bfly": lane ^ distance, "idx": first | distance}[
            mode
        ]
        inside = (source >= first) & (source <= last)
        wanted = values[warp + np.where(inside, source, lane)]
        units.append(unit(f"shfl.sync.{mode}.b32", values, str(distance), str(clamp), ALL, gives=(wanted, inside)))
    check_units(units)


DIVERGENT = """.version 9.0
.target sm_100a
.address_size 64
.visible .entry unit(.param .u64 results, .param .u64 values)
{{
.reg .b64 %rd<4>;
.reg .b32 %r<8>;
.reg .pred %p<4>;
ld.param.u64 %rd1, [results];
mov.u32 %r1, %laneid;
mul.wide.u32 %rd2, %r1, 8;
add.u64 %rd1, %rd1, %rd2;
setp.lt.u32 %p1, %r1, 12;
mov.u32 %r5, 0;
@%p1 bra FEW;
mov.u32 %r2, 0xfffff000;
{many}
bra DONE;
FEW:
mov.u32 %r2, 0xfff;
{few}
DONE:
st.global.b32 [%rd1], %r4;
st.global.b32 [%rd1+4], %r5;
ret;
}}
"""


def diverged(many: str, few: str | None = None) -> np.ndarray:
    results = np.zeros((32, 2), np.uint32)
    run_text(DIVERGENT.format(many=many, few=few or many), results, np.zeros(1, np.uint64), 32)
    return results


def test_two_groups_of_a_diverged_warp_reduce_and_match_each_for_itself() -> None:
    lane = np.arange(32)
    few_lanes = lane < 12
    result = diverged("redux.sync.add.u32 %r4, %r1, %r2; activemask.b32 %r5;")
    assert result[:, 0].tolist() == np.where(few_lanes, sum(range(12)), sum(range(12, 32))).tolist()
    assert result[:, 1].tolist() == np.where(few_lanes, 0xFFF, 0xFFFFF000).tolist()
    result = diverged("and.b32 %r3, %r1, 1; match.any.sync.b32 %r4, %r3, %r2;")
    odd = sum(1 << i for i in range(1, 32, 2))
    members = np.where(few_lanes, 0xFFF, 0xFFFFF000)
    assert result[:, 0].tolist() == (np.where(lane % 2, odd, odd >> 1) & members).tolist()
    result = diverged("vote.sync.uni.pred %p2, %p1, %r2; selp.b32 %r4, 1, 0, %p2;")
    assert result[:, 0].tolist() == [1] * 32


def test_reduction_that_names_a_lane_that_is_elsewhere_is_a_fault() -> None:
    with pytest.raises(Fault) as found:
        diverged("redux.sync.add.u32 %r4, %r1, -1;")
    assert found.value.kind == "divergence"


@pytest.mark.parametrize(
    "opcode", ["redux.sync.mul.u32", "redux.sync.and.s32", "match.some.sync.b32", "vote.sync.none.pred"]
)
def test_warp_form_that_is_none_is_refused_with_its_line(opcode: str) -> None:
    values = few(0, "u4")
    source = values > 0 if "pred" in opcode else values
    with pytest.raises(EmulationError, match=r"PTX line \d+: .*is not modelled"):
        run_units([unit(opcode, source, ALL, gives=source)])
