"""Faults planted into Blackwell's prefill GEMM: each is reported, by the right kind, under the named schedules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.emulator.schedules import proof_and_others, spelled

from cakegen.emulator import Fault, Options
from cakegen.emulator.launches.cases import Case, emulate_case
from cakegen.emulator.text.translate import Program
from cakegen.registry import Registry

ARCH = "sm_100a"
# 5 tiles of one pair row, whole; those of three pair rows, so that accumulators and answers are used again; halves
WHOLE = Case("front", 8, 129, sm_count=3, arch=ARCH)
MANY = Case("front", 8, 300, sm_count=3, arch=ARCH)
HALVES = Case("front", 8, 129, sm_count=148, arch=ARCH)

pytestmark = pytest.mark.emulator

FULL_WAIT = "            mbarrier_wait_cluster(smem + Cfg::kStageFullOffset + ring.stage * 8, ring.phase, watch);\n"
SUMS_WAIT = "    mbarrier_wait_cluster(smem + Cfg::kSumsFullOffset + count % 2 * 8, count / 2 & 1, watch);\n"
AFTER = "    tcgen05_fence_after_thread_sync();\n"
BEFORE = "    tcgen05_fence_before_thread_sync();\n"
BARRIER = "    cluster_arrive();\n    cluster_wait();\n"
MULTIPLIER = "if (rank == 0 && elect_one()) {"
BOTH = ("early", "late")
# What is planted -> (request, text, what stands there instead, the fault, the schedules that report it).
PLANTED: dict[str, tuple[Case, str, str, set[str], tuple[str, ...]]] = {
    "products before the copies of both CTAs": (WHOLE, FULL_WAIT, "", {"unwritten-read"}, BOTH),
    "no fence behind the wait for a stage": (WHOLE, f"{FULL_WAIT}        {AFTER}", FULL_WAIT, {"fence"}, BOTH),
    "bytes of one CTA expected": (
        WHOLE,
        "2 * Cfg::kStageBytes)",
        "Cfg::kStageBytes)",
        {"race", "pending-write"},
        BOTH,
    ),
    "copies counted by the own CTA": (WHOLE, "return mapa(full, 0);", "return full;", {"deadlock"}, ("early",)),
    "stages filled before they are free": (
        WHOLE,
        "    mbarrier_wait_cluster(smem + Cfg::kStageEmptyOffset + load.stage * 8, load.phase ^ 1, watch);\n"
        "    if (rank",
        "    if (rank",
        {"race", "pending-write"},
        BOTH,
    ),
    "stages freed in one CTA": (WHOLE, "kBoth = 3;", "kBoth = 1;", {"deadlock"}, ("early",)),
    "sums not awaited": (WHOLE, SUMS_WAIT, "", {"unwritten-read"}, BOTH),
    "no fence behind the wait for the sums": (WHOLE, SUMS_WAIT + AFTER, SUMS_WAIT, {"fence"}, ("early",)),
    "no fence before sums are released": (
        MANY,
        f"{BEFORE}    warp_sync();\n    if (at.lane",
        "    warp_sync();\n    if (at.lane",
        {"fence"},
        ("early",),
    ),
    "loaded sums used at once": (
        WHOLE,
        '    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");\n',
        "",
        {"pending-write"},
        ("early",),
    ),
    "first product adds to what was there": (WHOLE, "k > work.k_begin)", "true)", {"unwritten-read"}, BOTH),
    "accumulators overlap": (WHOLE, "turn * Cfg::kBlockN;", "turn * (Cfg::kBlockN / 2);", {"race"}, ("early",)),
    "half of the columns": (WHOLE, "kTensorColumns = 512;", "kTensorColumns = 256;", {"out-of-bounds"}, ("early",)),
    "half of the rows in the shape": (
        WHOLE,
        "tcgen05_shape(2 * Cfg::kBlockM,",
        "tcgen05_shape(Cfg::kBlockM,",
        {"unwritten-read"},
        BOTH,
    ),
    "products issued by every lane": (WHOLE, MULTIPLIER, "if (rank == 0) {", {"pending-write"}, BOTH),
    "products issued by both CTAs": (WHOLE, MULTIPLIER, "if (elect_one()) {", {"deadlock"}, ("early",)),
    "lanes of another warp": (
        WHOLE,
        "warp % 4 * 32 + lane_id()",
        "(warp - Cfg::kFirstEpilogueWarp) % 4 * 32 + lane_id()",
        {"tensor-memory"},
        ("early",),
    ),
    "rows past the end stored": (WHOLE, "if (token < num_tokens) {", "if (true) {", {"out-of-bounds"}, ("early",)),
    "answer not awaited": (
        WHOLE,
        "        mbarrier_wait_cluster(smem_ + Cfg::kItemFullOffset + slot * 8, count_ / 2 & 1, watch);\n",
        "",
        {"race"},
        BOTH,
    ),
    "answer overwritten before all have read": (
        MANY,
        "                mbarrier_wait_cluster(smem_ + Cfg::kItemEmptyOffset + slot * 8, "
        "(count_ / 2 & 1) ^ 1, watch);\n",
        "",
        {"race"},
        ("early",),
    ),
    "one reader of answers too few": (MANY, "{2, 19},  // item_empty", "{2, 18},  // item_empty", {"race"}, ("early",)),
    "both CTAs ask": (
        WHOLE,
        "            if (rank_ == 0) {\n                try_cancel",
        "            if (rank_ < 2) {\n                try_cancel",
        {"race", "pending-write"},
        BOTH,
    ),
    "halves' sums not ordered before their arrival": (
        HALVES,
        "        named_barrier_sync(Cfg::kGroupBarrier + at.group, 128);\n        arrivals",
        "        arrivals",
        {"race"},
        ("late",),
    ),
    "arrivals left for the next launch": (
        HALVES,
        "        st_relaxed_gpu(segments.counter, 0);\n",
        "",
        {"output"},
        ("early",),
    ),
    "partner's start not awaited": (
        WHOLE,
        f"{BARRIER}{AFTER}}}",
        f"    __syncthreads();\n{AFTER}}}",
        {"barrier", "race"},
        BOTH,
    ),
    "partner's end not awaited": (
        WHOLE,
        f"{BARRIER}{AFTER}    if (warp_index() == Cfg::kMmaWarp) {{\n        tensor_memory_dealloc",
        "    if (warp_index() == Cfg::kMmaWarp) {\n        tensor_memory_dealloc",
        {"out-of-bounds", "pending-write", "race"},
        BOTH,
    ),
    "tensor memory not given back": (
        WHOLE,
        "        tensor_memory_dealloc_pair<Cfg::kTensorColumns>(accumulator<Cfg>(smem, 0));\n",
        "",
        {"tensor-memory"},
        ("early",),
    ),
}


@pytest.mark.parametrize(
    ("name", "schedule"),
    [each for name, planted in PLANTED.items() for each in proof_and_others(name, planted[-1])],
    ids=spelled,
)
def test_planted_fault_is_reported(
    registry: Registry, planted: Callable[..., Callable[[Registry, str, str], Program]], name: str, schedule: str
) -> None:
    case, old, new, kinds, _ = PLANTED[name]
    with pytest.raises(Fault) as caught:
        emulate_case(registry, case, Options(schedule, 0, "wide"), load=planted(old, new))
    assert caught.value.kind in kinds, caught.value
