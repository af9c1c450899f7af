"""Faults planted into Blackwell's decode programs: each is reported, by the right kind, under both extremes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.emulator.schedules import proof_and_others, spelled

from cakegen.emulator import Fault, Options
from cakegen.emulator.launches.cases import Case, emulate_case
from cakegen.emulator.text.translate import Program
from cakegen.registry import Registry

ARCH = "sm_100a"

pytestmark = pytest.mark.emulator


def front(tp: int, tokens: int) -> Case:
    return Case("front", tp, tokens, sm_count=148, arch=ARCH)


def tail(tp: int, tokens: int, partials: int, rank: int) -> Case:
    return Case("tail", tp, tokens, partials, 148, rank, ARCH)


FULL_WAIT = "        mbarrier_wait(smem + Cfg::kStageFullOffset + ring.stage * 8, ring.phase, watch);\n"
SUMS_WAIT = "    mbarrier_wait(smem + Cfg::kSumsFullOffset, 0, watch);\n"
BEFORE = "    tcgen05_fence_before_thread_sync();\n"
AFTER = "    tcgen05_fence_after_thread_sync();\n"
# What is planted -> (request, text, what stands there instead, the fault under both extremes). The front's are of TP 8:
# pairs that split K; up to 8 tokens two chunks a stage, at 128 the landing zone in the drained ring.
PLANTED: dict[str, tuple[Case, str, str, set[str]]] = {
    "products before the operands have landed": (front(8, 8), FULL_WAIT, "", {"unwritten-read"}),
    "first product adds to what was there": (
        front(8, 8),
        "kStageBBytes, unit > 0)",
        "kStageBBytes, true)",
        {"unwritten-read"},
    ),
    "stages never freed": (
        tail(1, 128, 1, 0),
        "        tcgen05_commit(smem + Cfg::kStageEmptyOffset + ring.stage * 8);\n",
        "",
        {"deadlock"},
    ),
    "end of the sums never told": (front(8, 8), "    tcgen05_commit(smem + Cfg::kSumsFullOffset);\n", "", {"deadlock"}),
    "sums not awaited": (front(8, 8), SUMS_WAIT, "", {"unwritten-read"}),
    "no fence behind the wait for the sums": (front(8, 8), SUMS_WAIT + AFTER, SUMS_WAIT, {"fence"}),
    "tensor memory not given back": (
        front(8, 8),
        "        tensor_memory_dealloc<Cfg::kTensorColumns>(base);\n",
        "",
        {"tensor-memory"},
    ),
    "tensor memory given back before all have read": (
        front(8, 8),
        f"{BEFORE}    named_barrier_sync(Cfg::kMmaBarrier, 128);\n",
        BEFORE,
        {"out-of-bounds", "race"},
    ),
    "half of the columns": (front(8, 8), "kTensorColumns = 64;", "kTensorColumns = 32;", {"out-of-bounds"}),
    "sums read from lane 8 on": (front(8, 8), "16u << 16", "8u << 16", {"tensor-memory"}),
    "up sums over the gate's": (front(8, 8), "kUpColumn = 32;", "kUpColumn = 4;", {"pending-write"}),
    "twice as many tokens in the shape": (
        front(8, 8),
        "tcgen05_shape(Cfg::kBlockM, Cfg::kNPad)",
        "tcgen05_shape(Cfg::kBlockM, 2 * Cfg::kNPad)",
        {"race"},
    ),
    "Hopper's descriptor": (front(8, 8), "(u64{2} << 61) | (u64{1} << 46)", "(u64{1} << 62)", {"descriptor"}),
    "products issued by every lane": (front(8, 8), "} else if (elect_one()) {", "} else {", {"pending-write"}),
    "loaded sums used at once": (
        front(8, 8),
        '    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");\n',
        "",
        {"pending-read", "pending-write"},
    ),
    "resident rows not fenced": (tail(4, 3, 2, 1), "    fence_proxy_async_shared();\n", "", {"proxy"}),
    "y not fenced by its writers": (
        tail(4, 8, 2, 3),
        "    fence_proxy_async_global();\n    named",
        "    named",
        {"proxy"},
    ),
    "counter of the rows not awaited": (
        tail(4, 8, 2, 3),
        "    counter_wait_wrapped(norm.counters, watch);\n",
        "",
        {"unwritten-read", "race"},
    ),
    "partner's start not awaited": (tail(4, 16, 1, 1), "        cluster_wait();\n", "", {"barrier", "race"}),
    "partner's ring not drained": (
        front(8, 128),
        "            mbarrier_wait_cluster(smem + Cfg::kRingDrainedOffset, 0, watch);\n",
        "",
        {"race", "pending-write"},
    ),
    "one staged row less than expected": (
        tail(4, 16, 1, 1),
        "(num_tokens + 1) * kRowBytes",
        "num_tokens * kRowBytes",
        {"race", "pending-write"},
    ),
}


@pytest.mark.parametrize(
    ("name", "schedule"), [each for name in PLANTED for each in proof_and_others(name, ("early", "late"))], ids=spelled
)
def test_planted_fault_is_reported(
    registry: Registry, planted: Callable[..., Callable[[Registry, str, str], Program]], name: str, schedule: str
) -> None:
    case, old, new, kinds = PLANTED[name]
    with pytest.raises(Fault) as caught:
        emulate_case(registry, case, Options(schedule, 0, "wide"), load=planted(old, new))
    assert caught.value.kind in kinds, caught.value
