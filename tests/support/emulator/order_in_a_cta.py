"""Patterns of synchronisation of one CTA: correct ones, and what each reports when broken."""

from __future__ import annotations

from support.emulator.order_pattern import INIT_ONE, Pattern, kernel

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
    "rows that lanes write and one lane stores": Pattern(
        kernel("""
        const u32 rows = tile + warp * 512;
        st_shared_v4(rows + lane_id() * 16, Vec4{t, t, t, t});
        fence_proxy_async_shared();
        warp_sync();
        if (LANE0) {
            ASM("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 512;"
                :: "l"(out + warp * 128), "r"(rows) : "memory");
            ASM("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
        }"""),
        (
            ("warp_sync();", "", {"race"}, "which another lane of the warp touched"),
            (
                "fence_proxy_async_shared();\n        warp_sync();\n        if (LANE0) {",
                "warp_sync();\n        if (LANE0) { fence_proxy_async_shared();",
                {"proxy"},
                "no fence.proxy.async.shared::cta",
            ),
        ),
    ),
    "lanes that an mbarrier brings together": Pattern(
        kernel("""
        if (t < 2) mbarrier_init(smem + t * 8, 32);
        fence_mbarrier_init();
        __syncthreads();
        const u32 cells = tile + warp * 128;
        ASM("st.shared.u32 [%0], %1;" :: "r"(cells + lane_id() * 4), "r"(t) : "memory");
        mbarrier_arrive(smem + warp * 8);
        mbarrier_wait(smem + warp * 8, 0, watch);
        u32 got;
        ASM("ld.shared.u32 %0, [%1];" : "=r"(got) : "r"(cells + (lane_id() ^ 3) * 4) : "memory");
        out[t] = got;"""),
        (
            (
                "mbarrier_wait(smem + warp * 8, 0, watch);",
                "",
                {"race"},
                "which another lane of the warp touched",
            ),
        ),
    ),
    "an mbarrier of one warp": Pattern(
        kernel("""
        if (LANE0) { mbarrier_init(smem + warp * 8, 32); fence_mbarrier_init(); }
        warp_sync();
        mbarrier_arrive(smem + warp * 8);
        mbarrier_wait(smem + warp * 8, 0, watch);
        out[t] = t;"""),
        (("warp_sync();", "", {"race", "barrier"}, ""),),
    ),
    "rows of matrices that other lanes read": Pattern(
        kernel("""
        const u32 rows = tile + warp * 512, lane = lane_id();
        ASM("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %1, %1, %1};"
            :: "r"(rows + lane * 16), "r"(t) : "memory");
        warp_sync();
        out[t] = ld_shared_v4(rows + lane * 16).x;"""),
        (("warp_sync();", "", {"race"}, "which another lane of the warp touched"),),
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
