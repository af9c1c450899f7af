"""Barriers of a CTA and of a cluster, and instructions of a whole warp under a predicate (PTX ISA 9.7.13)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.trace.recorder import WAIT, Trace

pytestmark = pytest.mark.emulator

Launch = Callable[..., Machine]
Make = Callable[..., np.ndarray]
SCHEDULES = [("early", 0), ("late", 0), ("random", 0), ("random", 1)]
KERNEL = """
#define ASM(...) asm volatile(__VA_ARGS__)
static __device__ __forceinline__ void put(u32 at, u32 value) {
    ASM("st.shared.u32 [%0], %1;" :: "r"(at), "r"(value) : "memory");
}
static __device__ __forceinline__ u32 word_at(u32 at) {
    u32 found;
    ASM("ld.shared.u32 %0, [%1];" : "=r"(found) : "r"(at) : "memory");
    return found;
}
extern "C" __global__ void kernel_test(u32* out, u32 number, u32 threads) {
    const u32 t = threadIdx.x, smem = smem_base();
    BODY
}"""


@pytest.fixture(params=SCHEDULES, ids=lambda value: f"{value[0]}{value[1]}")
def adversary(request: pytest.FixtureRequest) -> Adversary:
    return Adversary(*request.param)


SYNC = "put(smem + 4 * t, t + 1); {} out[t] = word_at(smem + 4 * (t ^ 32));"


@pytest.mark.parametrize("form", ["barrier.sync", "barrier.cta.sync.aligned", "bar.sync", "bar.cta.sync"])
@pytest.mark.parametrize("operands", ["%0", "%0, %1"])
def test_sync_takes_its_operands_from_registers(
    launch: Launch, array: Make, adversary: Adversary, form: str, operands: str
) -> None:
    body = SYNC.format(f'ASM("{form} {operands};" :: "r"(number), "r"(threads) : "memory");')
    out = array(np.zeros(64), np.uint32)
    launch(KERNEL.replace("BODY", body), out, 3, 64, block=64, smem=1024, adversary=adversary)
    assert out.tolist() == [(t ^ 32) + 1 for t in range(64)]


@pytest.mark.parametrize("arrive", ["barrier.arrive", "bar.arrive", "barrier.cta.arrive.aligned"])
def test_arrivals_do_not_wait(launch: Launch, array: Make, adversary: Adversary, arrive: str) -> None:
    body = f"""if (t < 32) {{ put(smem + 4 * t, t); ASM("{arrive} %0, 64;" :: "r"(number) : "memory"); }}
        else {{ ASM("barrier.sync %0, 64;" :: "r"(number) : "memory"); out[t - 32] = word_at(smem + 4 * (t - 32)); }}"""
    out = array(np.zeros(32), np.uint32)
    launch(KERNEL.replace("BODY", body), out, 3, 64, block=64, smem=1024, adversary=adversary)
    assert out.tolist() == list(range(32))


REDUCE = """u32 found = 7;
    for (u32 round = 0; round < 3; ++round) {{
        ASM("{{ .reg .pred p, q; setp.{condition} p, %1, 0; {red} }}" : "=r"(found) : "r"(t % {every}), "r"(number));
        out[round * 96 + t] = found;
    }}"""
POPC = "barrier.cta.red.popc.aligned.u32 %0, %2, {}p;"


def either(operation: str, operands: str = "%2, p") -> str:
    return f"barrier.red.{operation}.pred q, {operands}; selp.u32 %0, 1, 0, q;"


@pytest.mark.parametrize(
    ("condition", "every", "red", "expected"),
    [
        ("eq.u32", 3, POPC.format(""), 32),
        ("eq.u32", 3, POPC.format("!"), 64),
        ("eq.u32", 3, "bar.red.popc.u32 %0, 2, 96, p;", 32),
        ("eq.u32", 64, either("or"), 1),
        ("ge.u32", 64, either("and", "3, 96, p"), 1),
        ("ne.u32", 96, either("and"), 0),
        ("lt.u32", 96, either("or"), 0),
        ("eq.u32", 1, either("and", "%2, 96, !p"), 0),
    ],
)
def test_reduction_tells_all_threads(
    launch: Launch, array: Make, adversary: Adversary, condition: str, every: int, red: str, expected: int
) -> None:
    body = REDUCE.format(condition=condition, every=every, red=red)
    out = array(np.zeros(288), np.uint32)
    launch(KERNEL.replace("BODY", body), out, 5, 96, block=96, adversary=adversary)
    assert out.tolist() == [expected] * 288


def test_reduction_orders_what_came_before(launch: Launch, array: Make, adversary: Adversary) -> None:
    red = 'ASM("{ .reg .pred p, q; setp.eq.u32 p, %0, 0; barrier.red.or.pred q, 1, p; }" :: "r"(t) : "memory");'
    out = array(np.zeros(64), np.uint32)
    launch(KERNEL.replace("BODY", SYNC.format(red)), out, 1, 64, block=64, smem=1024, adversary=adversary)
    assert out.tolist() == [(t ^ 32) + 1 for t in range(64)]


def test_trace_shows_who_waits_at_a_reduction(launch: Launch, array: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace()
    monkeypatch.setitem(launch.__globals__, "Machine", trace.machine)
    slow = "if (t < 32) for (u32 i = 0; i < 100; ++i) put(smem + 4 * t, i);"
    body = slow + REDUCE.format(condition="eq.u32", every=3, red=POPC.format("")).replace("round < 3", "round < 1")
    launch(KERNEL.replace("BODY", body), array(np.zeros(288), np.uint32), 5, 96, block=96, smem=256)
    waits = {(span.track.name, span.name) for span in trace.launches[0].spans if span.kind == WAIT}
    assert waits == {("warp 1", "waits at bar 5"), ("warp 2", "waits at bar 5")}


MIXED = """ASM("{ .reg .pred p, q; setp.eq.u32 p, %0, 0; @!p bra other; barrier.red.or.pred q, 1, 64, p; bra.uni done;"
    " other: OTHER done: }" :: "r"(t / 32) : "memory");"""


@pytest.mark.parametrize(
    ("body", "report"),
    [
        ('ASM("barrier.sync %0, 64;" :: "r"(number + t / 64));', "divergence: .*number of a barrier"),
        ('ASM("barrier.sync 16;");', "barrier: bar 16; a CTA has barriers 0 to 15"),
        ('ASM("barrier.sync 1, %0;" :: "r"(threads - 1));', "barrier: bar 1 for 63 threads"),
        ('ASM("barrier.arrive 1, %0;" :: "r"(threads - 64));', "barrier: bar 1 for 0 threads"),
        ('ASM("barrier.sync 1, 96;");', "deadlock"),
        (MIXED.replace("OTHER", "barrier.sync 1, 64;"), "barrier: .*(meets|meet)"),
        (MIXED.replace("OTHER", "barrier.red.and.pred q, 1, 64, p;"), "barrier: .*red.*meets red"),
        (
            'ASM("{ .reg .pred p; setp.lt.u32 p, %0, 40; @p barrier.sync 1, 64; }" :: "r"(t));',
            "divergence: barrier.sync by a part of the warp",
        ),
        ('ASM("barrier.cluster.wait.acquire.aligned;");', "barrier: barrier.cluster.wait without an arrive"),
        ('ASM("barrier.cluster.arrive; barrier.cluster.arrive.release;");', "barrier: .*arrive twice"),
    ],
)
def test_planted_fault_is_reported(launch: Launch, array: Make, body: str, report: str) -> None:
    body = body.replace("number + t / 64", "number + t % 2")
    out = array(np.zeros(64), np.uint32)
    with pytest.raises(Fault, match=f"^{report}"):
        launch(KERNEL.replace("BODY", body), out, 3, 64, block=64, smem=1024)


@pytest.mark.parametrize("who", [32, 64])
def test_predicate_chooses_warps(launch: Launch, array: Make, adversary: Adversary, who: int) -> None:
    body = f"""put(smem + 4 * t, t + 1);
        ASM("{{ .reg .pred p; setp.lt.u32 p, %0, {who}; @p barrier.sync 1, {who}; }}" :: "r"(t) : "memory");
        out[t] = word_at(smem + 4 * (t < {who} ? t ^ {who // 2} : t));"""
    out = array(np.zeros(96), np.uint32)
    source = KERNEL.replace("BODY", body.replace("t ^ 16", "t"))
    launch(source, out, 3, 64, block=96, smem=1024, adversary=adversary)
    assert out.tolist() == [1 + (t ^ 32 if t < who == 64 else t) for t in range(96)]


@pytest.mark.parametrize(
    ("arrive", "wait"),
    [
        ("arrive", "wait"),
        ("arrive.release.aligned", "wait.acquire"),
        ("arrive.release", "wait.acquire.aligned"),
    ],
)
def test_cluster_barrier_orders_shared_memory(
    launch: Launch, array: Make, adversary: Adversary, arrive: str, wait: str
) -> None:
    body = f"""const u32 rank = blockIdx.x; u32 peer, found;
        put(smem + 4 * t, 100 * rank + t);
        ASM("barrier.cluster.{arrive}; barrier.cluster.{wait};" ::: "memory");
        ASM("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(smem + 4 * t), "r"(rank ^ 1));
        ASM("ld.shared::cluster.u32 %0, [%1];" : "=r"(found) : "r"(peer) : "memory");
        out[32 * rank + t] = found;
        ASM("barrier.cluster.{arrive}; barrier.cluster.{wait};" ::: "memory");"""
    out = array(np.zeros(64), np.uint32)
    launch(KERNEL.replace("BODY", body), out, 3, 64, grid=2, cluster=2, smem=1024, adversary=adversary)
    assert out.tolist() == [*range(100, 132), *range(32)]


TENSOR = """
    const u32 base_at = smem;
    ASM("{ .reg .pred p; setp.lt.u32 p, %1, 32;"
        " @p tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 32;"
        " @p tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; }" :: "r"(base_at), "r"(t) : "memory");
    ASM("tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;" ::: "memory");
    const u32 base = word_at(base_at) + (t / 32 << 21);
    u32 found = 5;
    ASM("{ .reg .pred p; setp.lt.u32 p, %2, LIMIT;"
        " @p tcgen05.st.sync.aligned.32x32b.x1.b32 [%1], {%3}; tcgen05.wait::st.sync.aligned;"
        " @p tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1]; tcgen05.wait::ld.sync.aligned; }"
        : "+r"(found) : "r"(base), "r"(t), "r"(t + 7) : "memory");
    out[t] = found;
    ASM("tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;" ::: "memory");
    ASM("{ .reg .pred p; setp.lt.u32 p, %1, 32; @p tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 32; }"
        :: "r"(base), "r"(t) : "memory");"""


@pytest.mark.parametrize(("limit", "runs"), [(32, True), (64, True), (0, True), (40, False)])
def test_tensor_memory_is_used_under_a_predicate_of_the_warp(
    launch: Launch, array: Make, limit: int, runs: bool
) -> None:
    source = KERNEL.replace("BODY", TENSOR.replace("LIMIT", str(limit)))
    out = array(np.zeros(64), np.uint32)
    if not runs:
        with pytest.raises(Fault, match=r"divergence: tcgen05.st by a part of the warp"):
            launch(source, out, 0, 0, block=64, smem=64, arch="sm_100a")
        return
    launch(source, out, 0, 0, block=64, smem=64, arch="sm_100a")
    assert out.tolist() == [t + 7 if t < limit else 5 for t in range(64)]


WGMMA = """
    const u32 ONES = 0x3f803f80;
    const u32 tile = smem + 1023 & ~1023u;
    for (u32 i = t; i < 576; i += 128) st_shared_v4(tile + i * 16, Vec4{ONES, ONES, ONES, ONES});
    fence_proxy_async_shared();
    __syncthreads();
    float d[4] = {3, 3, 3, 3};
    wgmma_pin(d);
    wgmma_fence();
    ASM("{ .reg .pred p; setp.lt.u32 p, %6, LIMIT;"
        " @p wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
        " @p wgmma.commit_group.sync.aligned; @p wgmma.wait_group.sync.aligned 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "l"(wgmma_descriptor(tile)), "l"(wgmma_descriptor(tile + 8192)), "r"(t) : "memory");
    wgmma_pin(d);
    for (u32 i = 0; i < 4; ++i) out[t * 4 + i] = (u32)d[i];"""


@pytest.mark.parametrize(("limit", "expected"), [(128, 19), (0, 3), (40, None)])
def test_wgmma_runs_under_a_predicate_of_the_warp(
    launch: Launch, array: Make, limit: int, expected: int | None
) -> None:
    source = KERNEL.replace("BODY", WGMMA.replace("LIMIT", str(limit)))
    out = array(np.zeros(512), np.uint32)
    if expected is None:
        with pytest.raises(Fault, match=r"divergence: wgmma.* by a part of the warp: its predicate differs"):
            launch(source, out, 0, 0, block=128, smem=16384)
        return
    launch(source, out, 0, 0, block=128, smem=16384)
    assert set(out.tolist()) == {expected}
