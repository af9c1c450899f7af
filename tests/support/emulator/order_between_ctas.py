"""Patterns of synchronisation between CTAs: correct ones, and what each reports when broken."""

from __future__ import annotations

from support.emulator.order_pattern import INIT_ONE, INIT_PAIR, LEAVE, Pattern, kernel

PATTERNS = {
    "remote stores and a cluster barrier": Pattern(
        kernel(
            """
        STARTED;
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
            ("STARTED;", "", {"race"}, "no barrier.cluster has shown that it has started"),
        ),
        grid=2,
        cluster=2,
    ),
    "remote stores that the partner's copies read": Pattern(
        kernel(
            """
        STARTED;
        ASM("st.shared::cluster.u32 [%0], %1;" :: "r"(mapa(tile + t * 4, rank ^ 1)), "r"(rank * 100 + t) : "memory");
        ASM("fence.proxy.async.shared::cluster;" ::: "memory");
        cluster_arrive();
        cluster_wait();
        if (t == 0) {
            ASM("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;"
                :: "l"(out + blockIdx.x * 64), "r"(tile) : "memory");
            ASM("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
        }""",
            2,
        ),
        (("fence.proxy.async.shared::cluster", "fence.proxy.async.shared::cta", {"proxy"}, "async.shared::cluster"),),
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
            (
                "mbarrier_wait(smem, (i & 1) ^ 1, watch);",
                "wait_relaxed(smem, (i & 1) ^ 1);",
                {"race"},
                "nothing orders the two",
            ),
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
    "a relaxed wait and a fence that acquires": Pattern(
        kernel(
            INIT_PAIR.format(64)
            + """
        ASM("st.shared::cluster.u32 [%0], %1;" :: "r"(mapa(tile + t * 4, rank ^ 1)), "r"(rank * 100 + t) : "memory");
        mbarrier_arrive_cluster(mapa(smem, rank ^ 1));
        wait_relaxed(smem, 0);
        ASM("fence.acq_rel.cluster;" ::: "memory");
        u32 got; ASM("ld.shared.u32 %0, [%1];" : "=r"(got) : "r"(tile + (t ^ 32) * 4) : "memory");
        out[blockIdx.x * 64 + t] = got;"""
            + LEAVE,
            2,
        ),
        (
            ('ASM("fence.acq_rel.cluster;" ::: "memory");', "", {"race"}, "nothing orders the two"),
            ("fence.acq_rel.cluster", "fence.acq_rel.cta", {"race"}, "nothing orders the two"),
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
    "rows that a counter hands to copies": Pattern(
        kernel(
            INIT_ONE
            + """
        data[blockIdx.x * 64 + t] = blockIdx.x + t;
        fence_proxy_async_global(); /* writes */
        warp_sync();
        if (LANE0) { reduce_add_release_gpu(counter, 1); }
        if (t == 0) {
            counter_wait_reached(counter, 8, watch);
            mbarrier_arrive_expect_tx(smem, 1024);
            tma_load_3d(tile, map, 0, 0, 0, smem);
        }
        mbarrier_wait(smem, 0, watch);
        out[blockIdx.x * 64 + t] = ld_shared_v4(tile + t * 16).x;"""
        ),
        (
            ("fence_proxy_async_global(); /* writes */", "", {"proxy"}, "no fence.proxy.async.global"),
            (
                "fence_proxy_async_global(); /* writes */\n        warp_sync();\n        if (LANE0) {",
                "warp_sync();\n        if (LANE0) { fence_proxy_async_global();",
                {"proxy"},
                "no fence.proxy.async.global",
            ),
            ("warp_sync();", "", {"race"}, ""),
            (
                "reduce_add_release_gpu(counter, 1);",
                'ASM("red.relaxed.gpu.global.add.u32 [%0], 1;" :: "l"(counter) : "memory");',
                {"race"},
                "nothing orders the two",
            ),
            ("counter_wait_reached(counter, 8, watch);", "", {"race", "unwritten-read"}, ""),
            ("counter_wait_reached(counter, 8, watch);", "counter_wait_reached(counter, 9, watch);", {"deadlock"}, ""),
            ("counter_wait_reached(counter, 8, watch);", "while (load_relaxed(counter) != 8) {}", {"race"}, ""),
        ),
        grid=4,
        cooperative=True,
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
}
