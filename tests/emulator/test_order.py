"""Happens-before and proxies: patterns that must stay clean under every schedule, and what each reports when broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from cakegen.emulator import Fault
from cakegen.emulator.adversary import Adversary
from cakegen.emulator.machine import Machine
from cakegen.runtime.tensor_map import TensorMap

Launch = Callable[..., Machine]
Make = Callable[..., np.ndarray]

SCHEDULES = [("early", 0), ("late", 0), ("random", 0), ("random", 1), ("random", 2)]
NAMES = [f"{kind}{seed}" for kind, seed in SCHEDULES]


@dataclass(frozen=True)
class Pattern:
    """A kernel `kernel_test(out, data, counter, record, map)`, and texts whose replacement breaks it.

    Parameters
    ----------
    broken
        (text, replacement, kinds of fault that may be reported, words of the report).
    """

    source: str
    broken: tuple[tuple[str, str, set[str], str], ...]
    grid: int = 1
    block: int = 64
    cluster: int = 1
    cooperative: bool = False


WRAPPERS = """
#define ASM(...) asm volatile(__VA_ARGS__)
#define LANE0 (lane_id() == 0)
__device__ u32 load_relaxed(const u32* at) {
    u32 value;
    ASM("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
"""


def kernel(body: str, cluster: int = 1) -> str:
    shape = f"__cluster_dims__({cluster}, 1, 1) " if cluster > 1 else ""
    return f"""{WRAPPERS}
    extern "C" __global__ void {shape}kernel_test(
        u32* out, u32* data, u32* counter, u64* record, const __grid_constant__ TensorMap map) {{
        const u32 smem = smem_base(), t = threadIdx.x, warp = warp_index(), rank = cluster_ctarank();
        const u32 tile = smem + 1024;
        const Watch watch{{record, 1}};
        (void)tile; (void)rank; (void)warp;
        {body}
    }}"""


INIT_ONE = "if (t == 0) { mbarrier_init(smem, 1); fence_mbarrier_init(); } __syncthreads();"
INIT_PAIR = """if (t == 0) {{ mbarrier_init(smem, {0}); mbarrier_init(smem + 8, 1); fence_mbarrier_init(); }}
    __syncthreads(); cluster_arrive(); cluster_wait();"""
LEAVE = "cluster_arrive(); cluster_wait();"

PATTERNS = {
    "copies fill a ring that another warp drains": Pattern(
        kernel("""
        if (t == 0) {
            for (u32 s = 0; s < 2; ++s) { mbarrier_init(smem + s * 16, 1); mbarrier_init(smem + 8 + s * 16, 1); }
            fence_mbarrier_init();
        }
        __syncthreads();
        if (t == 32) {
            for (u32 i = 0; i < 6; ++i) {
                const u32 full = smem + i % 2 * 16;
                mbarrier_wait(full + 8, (i / 2 & 1) ^ 1, watch);
                mbarrier_arrive_expect_tx(full, 1024);
                tma_load_3d(tile + i % 2 * 1024, map, 0, 0, i % 4, full);
            }
        } else if (t < 32) {
            u32 sum = 0;
            for (u32 i = 0; i < 6; ++i) {
                const u32 full = smem + i % 2 * 16;
                mbarrier_wait(full, i / 2 & 1, watch);
                sum += ld_shared_v4(tile + i % 2 * 1024 + t * 16).x;
                warp_sync();
                if (LANE0) mbarrier_arrive(full + 8);
            }
            out[t] = sum;
        }"""),
        (
            (
                "if (LANE0) mbarrier_arrive(full + 8);",
                'if (LANE0) ASM("mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%0];" :: "r"(full + 8) : "memory");',
                {"race"},
                "nothing orders the two",
            ),
            ("mbarrier_wait(full, i / 2 & 1, watch);", "", {"race", "pending-write", "unwritten-read"}, ""),
            ("warp_sync();\n                if (LANE0)", "if (LANE0)", {"race"}, "nothing orders the two"),
            ("__syncthreads();", "", {"race", "barrier"}, ""),
        ),
    ),
    "remote stores and a cluster barrier": Pattern(
        kernel(
            """
        ASM("st.shared::cluster.u32 [%0], %1;" :: "r"(mapa(tile + t * 4, rank ^ 1)), "r"(rank * 100 + t) : "memory");
        cluster_arrive();
        cluster_wait();
        u32 got; ASM("ld.shared.u32 %0, [%1];" : "=r"(got) : "r"(tile + (t ^ 32) * 4) : "memory");
        out[blockIdx.x * 64 + t] = got;""",
            2,
        ),
        (
            (
                "cluster_arrive();",
                'ASM("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");',
                {"race"},
                "nothing orders the two",
            ),
        ),
        grid=2,
        cluster=2,
    ),
    "remote stores and a remote arrival": Pattern(
        kernel(
            INIT_PAIR.format(64)
            + """
        ASM("st.shared::cluster.u32 [%0], %1;" :: "r"(mapa(tile + t * 4, rank ^ 1)), "r"(rank * 100 + t) : "memory");
        mbarrier_arrive_cluster(mapa(smem, rank ^ 1));
        mbarrier_wait_cluster(smem, 0, watch);
        u32 got; ASM("ld.shared.u32 %0, [%1];" : "=r"(got) : "r"(tile + (t ^ 32) * 4) : "memory");
        out[blockIdx.x * 64 + t] = got;"""
            + LEAVE,
            2,
        ),
        (
            (
                "mbarrier_arrive_cluster(",
                "mbarrier_arrive_cluster_after_reads(",
                {"race"},
                "its scope does not hold both threads",
            ),
            ("mbarrier_wait_cluster(", "mbarrier_wait(", {"race"}, "its scope does not hold both threads"),
        ),
        grid=2,
        cluster=2,
    ),
    "sums over st.async": Pattern(
        kernel(
            INIT_PAIR.format(2)
            + """
        if (t == 0) mbarrier_arrive_expect_tx(smem + 8, 64 * 16);
        // the landing zone holds this CTA's own values first
        st_shared_v4(tile + t * 16, Vec4{t, 0, 0, 0});
        __syncthreads();
        const u32 own = ld_shared_v4(tile + (63 - t) * 16).x;
        warp_sync();
        if (LANE0) mbarrier_arrive_cluster(mapa(smem, rank ^ 1));
        mbarrier_wait_cluster(smem, 0, watch);
        st_async_v4(mapa(tile + t * 16, rank ^ 1), Vec4{own, 0, 0, 0}, mapa(smem + 8, rank ^ 1));
        mbarrier_wait_cluster(smem + 8, 0, watch);
        out[blockIdx.x * 64 + t] = ld_shared_v4(tile + (t ^ 32) * 16).x;"""
            + LEAVE,
            2,
        ),
        (
            ("mbarrier_wait_cluster(smem + 8", "mbarrier_wait(smem + 8", {"race"}, "its scope does not hold"),
            ("mbarrier_wait_cluster(smem, 0, watch);", "", {"race", "pending-write"}, ""),
            ("mbarrier_arrive_cluster(mapa", "mbarrier_arrive_cluster_after_reads(mapa", {"race"}, "its scope does"),
        ),
        grid=2,
        cluster=2,
    ),
    "a stage that the partner refills after reads": Pattern(
        kernel(
            INIT_PAIR.format(2)
            + """
        for (u32 i = 0; i < 3; ++i) {
            if (t == 0) {
                mbarrier_wait(smem, (i & 1) ^ 1, watch);
                mbarrier_arrive_expect_tx(smem + 8, 2 * 1024);
                tma_load_3d_multicast(tile + rank * 1024, map, 0, 0, (i + rank) % 4, smem + 8, 3);
            }
            warp_sync();
            if (t < 32) {
                mbarrier_wait(smem + 8, i & 1, watch);
                out[(blockIdx.x * 3 + i) * 32 + t] = ld_shared_v4(tile + t * 64).x;
                warp_sync();
                if (LANE0) {
                    mbarrier_arrive(smem);
                    mbarrier_arrive_cluster_after_reads(mapa(smem, rank ^ 1));
                }
            }
        }"""
            + LEAVE,
            2,
        ),
        (
            ("mbarrier_wait(smem, (i & 1) ^ 1, watch);", "", {"race", "pending-write", "barrier"}, ""),
            # a write must be released to the partner's cluster
            (
                "mbarrier_wait(smem + 8, i & 1, watch);",
                "mbarrier_wait(smem + 8, i & 1, watch); st_shared_v4(tile + t * 64, Vec4{i, i, i, i});"
                "fence_proxy_async_shared();",
                {"race"},
                "its scope does not hold both threads",
            ),
        ),
        grid=2,
        cluster=2,
    ),
    "a counter hands data to other CTAs": Pattern(
        kernel("""
        data[blockIdx.x * 64 + t] = blockIdx.x + t;
        __syncthreads();
        if (t == 0) {
            atomic_inc_acq_rel_gpu(counter, gridDim.x - 1);
            counter_wait_wrapped(counter, watch);
        }
        __syncthreads();
        out[blockIdx.x * 64 + t] = data[((blockIdx.x + 1) % gridDim.x) * 64 + 63 - t];"""),
        (
            (
                "data[blockIdx.x * 64 + t] = blockIdx.x + t;\n        __syncthreads();",
                "data[blockIdx.x * 64 + t] = 1;",
                {"race"},
                "nothing orders",
            ),
            (
                "atomic_inc_acq_rel_gpu(counter, gridDim.x - 1);",
                'ASM("red.relaxed.gpu.global.inc.u32 [%0], %1;" :: "l"(counter), "r"(gridDim.x - 1) : "memory");',
                {"race"},
                "nothing orders the two",
            ),
            (
                "atomic_inc_acq_rel_gpu(counter, gridDim.x - 1);",
                'ASM("red.release.cta.global.inc.u32 [%0], %1;" :: "l"(counter), "r"(gridDim.x - 1) : "memory");',
                {"race"},
                "argument 2 + 0",
            ),
            (
                "counter_wait_wrapped(counter, watch);",
                "while (load_relaxed(counter)) {}",
                {"race"},
                "argument 1 + ",
            ),
        ),
        grid=3,
        cooperative=True,
    ),
    "fences around a relaxed counter": Pattern(
        kernel("""
        data[blockIdx.x * 64 + t] = blockIdx.x + t;
        __syncthreads();
        if (t == 0) {
            __threadfence(); /* releases */
            atomicInc(counter, gridDim.x - 1);
            while (load_relaxed(counter)) {}
            __threadfence(); /* acquires */
        }
        __syncthreads();
        out[blockIdx.x * 64 + t] = data[((blockIdx.x + 1) % gridDim.x) * 64 + 63 - t];"""),
        (
            ("__threadfence(); /* releases */", "", {"race"}, "nothing orders"),
            ("__threadfence(); /* acquires */", "", {"race"}, "nothing orders"),
            ("__threadfence(); /* releases */", "__threadfence_block();", {"race"}, ""),
            ("__threadfence(); /* acquires */", "__threadfence_block();", {"race"}, ""),
        ),
        grid=3,
        cooperative=True,
    ),
    "shared stores that a wgmma reads": Pattern(
        kernel("""
        for (u32 i = t; i < 576; i += 128) st_shared_v4(tile + i * 16, Vec4{0x3f803f80, 0, 0, 0});
        fence_proxy_async_shared();
        __syncthreads();
        float d[4];
        for (u32 i = 0; i < 4; ++i) d[i] = t;
        wgmma_pin(d);
        wgmma_fence();
        wgmma_m64_k16<8>(d, wgmma_descriptor(tile), wgmma_descriptor(tile + 8192));
        wgmma_commit_group();
        wgmma_wait_group<0>();
        wgmma_pin(d);
        out[t] = d[0] + d[1] + d[2] + d[3];
        // the warp's own rows of A, which no other warp reads
        st_shared_v4(tile + warp * 2048 + lane_id() * 16, Vec4{0, 0, 0, 0});"""),
        (
            ("fence_proxy_async_shared();", "", {"proxy"}, "no fence.proxy.async.shared::cta"),
            (
                "fence_proxy_async_shared();",
                "fence_proxy_async_global();",
                {"proxy"},
                "no fence.proxy.async.shared::cta",
            ),
            (
                "fence_proxy_async_shared();\n        __syncthreads();",
                "__syncthreads();\n        fence_proxy_async_shared();",
                {"proxy"},
                "between its write and its release",
            ),
            (
                "fence_proxy_async_shared();\n        __syncthreads();",
                "fence_proxy_async_shared();",
                {"race", "unwritten-read"},
                "",
            ),
            ("wgmma_fence();", "", {"race"}, "no wgmma.fence follows"),
        ),
        block=128,
    ),
    "global stores that copies of other CTAs read": Pattern(
        kernel(
            """
        data[blockIdx.x * 64 + t] = blockIdx.x + t;
        fence_proxy_async_global();
        """
            + INIT_ONE
            + """
        if (t == 0) {
            atomic_inc_acq_rel_gpu(counter, gridDim.x - 1);
            counter_wait_wrapped(counter, watch);
            mbarrier_arrive_expect_tx(smem, 1024);
            tma_load_3d(tile, map, 0, 0, 0, smem);
        }
        mbarrier_wait(smem, 0, watch);
        out[blockIdx.x * 64 + t] = ld_shared_v4(tile + t * 16).x;"""
        ),
        (
            ("fence_proxy_async_global();", "", {"proxy"}, "no fence.proxy.async.global"),
            ("fence_proxy_async_global();", "fence_proxy_async_shared();", {"proxy"}, "no fence.proxy.async.global"),
            (
                "atomic_inc_acq_rel_gpu(counter, gridDim.x - 1);",
                'ASM("red.relaxed.gpu.global.inc.u32 [%0], %1;" :: "l"(counter), "r"(gridDim.x - 1) : "memory");',
                {"race"},
                "nothing orders the two",
            ),
        ),
        grid=4,
        cooperative=True,
    ),
    "a copy over what threads wrote": Pattern(
        kernel(
            INIT_ONE
            + """
        st_shared_v4(tile + t * 16, Vec4{t, t, t, t});
        fence_proxy_async_shared();
        __syncthreads();
        if (t == 0) {
            mbarrier_arrive_expect_tx(smem, 1024);
            tma_load_3d(tile, map, 0, 0, 0, smem);
        }
        mbarrier_wait(smem, 0, watch);
        out[t] = ld_shared_v4(tile + t * 16).x;"""
        ),
        (
            ("fence_proxy_async_shared();", "", {"proxy"}, "no fence.proxy.async.shared::cta"),
            ("fence_proxy_async_shared();\n        __syncthreads();", "", {"proxy", "race", "pending-write"}, ""),
        ),
    ),
    "named barriers between two roles": Pattern(
        kernel("""
        if (t < 32) {
            for (u32 i = 0; i < 4; ++i) {
                if (i > 1) ASM("bar.sync %0, 64;" :: "r"(3 + i % 2) : "memory");
                st_shared_f32(tile + i % 2 * 128 + t * 4, i * 32 + t);
                ASM("bar.arrive %0, 64;" :: "r"(1 + i % 2) : "memory");
            }
        } else {
            float sum = 0;
            for (u32 i = 0; i < 4; ++i) {
                ASM("bar.sync %0, 64;" :: "r"(1 + i % 2) : "memory");
                float got;
                ASM("ld.shared.f32 %0, [%1];" : "=f"(got) : "r"(tile + i % 2 * 128 + (63 - t) * 4) : "memory");
                sum += got;
                if (i < 2) ASM("bar.arrive %0, 64;" :: "r"(3 + i % 2) : "memory");
            }
            out[t] = sum;
        }"""),
        (
            (
                'if (i > 1) ASM("bar.sync %0, 64;" :: "r"(3 + i % 2) : "memory");',
                "",
                {"race", "barrier"},
                "",
            ),
        ),
    ),
    "lanes of a warp exchange values": Pattern(
        kernel("""
        const u32 cell = tile + warp * 128 + lane_id() * 4, other = tile + warp * 128 + (lane_id() ^ 5) * 4;
        u32 sum = t;
        for (u32 i = 0; i < 3; ++i) {
            u32 own, theirs;
            ASM("st.shared.u32 [%0], %1;" :: "r"(cell), "r"(sum) : "memory");
            ASM("ld.shared.u32 %0, [%1];" : "=r"(own) : "r"(cell) : "memory");
            ASM("st.shared.u32 [%0], %1;" :: "r"(cell), "r"(own + 1) : "memory");
            warp_sync(); /* written */
            ASM("ld.shared.u32 %0, [%1];" : "=r"(theirs) : "r"(other) : "memory");
            sum += theirs;
            warp_sync(); /* read */
        }
        out[t] = sum;"""),
        (
            ("warp_sync(); /* written */", "", {"race"}, "which another lane of the warp touched"),
            ("warp_sync(); /* read */", "", {"race"}, "which another lane of the warp touched"),
        ),
    ),
    "initialisations that the cluster sees": Pattern(
        kernel(
            """
        if (t == 0) { mbarrier_init(smem, 64); }
        fence_mbarrier_init();
        ASM("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
        cluster_wait();
        mbarrier_arrive_cluster_after_reads(mapa(smem, rank ^ 1));
        mbarrier_wait(smem, 0, watch);
        out[blockIdx.x * 64 + t] = 0;"""
            + LEAVE,
            2,
        ),
        (("fence_mbarrier_init();", "", {"race"}, "nothing orders that behind its mbarrier.init"),),
        grid=2,
        cluster=2,
    ),
    "neighbouring elements of several warps": Pattern(
        kernel("""
        ASM("st.shared.u16 [%0], %1;" :: "r"(tile + (t % 32 * 2 + warp) * 2), "h"(u16(t)) : "memory");
        ASM("st.shared.u8 [%0], %1;" :: "r"(tile + 512 + t % 32 * 2 + warp), "r"(t) : "memory");
        reinterpret_cast<u16*>(data)[t % 32 * 2 + warp] = t;
        __syncthreads();
        u32 a, b;
        ASM("ld.shared.u32 %0, [%1];" : "=r"(a) : "r"(tile + t % 32 * 4) : "memory");
        ASM("ld.shared.u16 %0, [%1];" : "=r"(b) : "r"(tile + 512 + t % 32 * 2) : "memory");
        out[t] = a + b + data[t % 32];"""),
        (("tile + 512 + t % 32 * 2 + warp", "tile + 512 + t % 32 * 2", {"race"}, "nothing orders the two"),),
    ),
}


def run(launch: Launch, array: Make, pattern: Pattern, source: str, schedule: tuple[str, int]) -> np.ndarray:
    out, data, counter = array(np.zeros(1024), np.uint32), array(np.arange(1024), np.uint32), array([0], np.uint32)
    record = array(np.full(16, 1 << 60), np.uint64)
    # 4 boxes of 8 rows of 64 bf16 elements: 1 KiB each
    box = TensorMap("map", data.ctypes.data, (64, 8, 4), (128, 1024), (64, 8, 1))
    launch(
        source,
        out,
        data,
        counter,
        record,
        box,
        grid=pattern.grid,
        block=pattern.block,
        cluster=pattern.cluster,
        cooperative=pattern.cooperative,
        smem=16384,
        adversary=Adversary(*schedule),
    )
    return out


@pytest.mark.parametrize("name", PATTERNS)
def test_correct_pattern_is_clean_under_every_schedule(launch: Launch, array: Make, name: str) -> None:
    pattern = PATTERNS[name]
    outputs = [run(launch, array, pattern, pattern.source, schedule).tolist() for schedule in SCHEDULES]
    assert all(each == outputs[0] for each in outputs)


BREAKS = [(name, number) for name, pattern in PATTERNS.items() for number in range(len(pattern.broken))]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=NAMES)
@pytest.mark.parametrize(("name", "number"), BREAKS)
def test_broken_pattern_is_reported_under_every_schedule(
    launch: Launch, array: Make, name: str, number: int, schedule: tuple[str, int]
) -> None:
    pattern = PATTERNS[name]
    old, new, kinds, words = pattern.broken[number]
    assert old in pattern.source
    with pytest.raises(Fault) as caught:
        run(launch, array, pattern, pattern.source.replace(old, new, 1), schedule)
    assert caught.value.kind in kinds, caught.value
    assert words in str(caught.value)
