#pragma once
// tcgen05 for the emulator's tests, one function an instruction, cta_group as a template parameter (PTX ISA 9.7.16).

namespace cake {

template <u32 kGroup>
__device__ __forceinline__ void tensor_alloc(u32 result, u32 columns) {
    if constexpr (kGroup == 1) {
        asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(result), "r"(columns)
                     : "memory");
    } else {
        asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(result), "r"(columns)
                     : "memory");
    }
}

template <u32 kGroup>
__device__ __forceinline__ void tensor_relinquish() {
    if constexpr (kGroup == 1) {
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
    } else {
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::: "memory");
    }
}

template <u32 kGroup>
__device__ __forceinline__ void tensor_dealloc(u32 address, u32 columns) {
    if constexpr (kGroup == 1) {
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns) : "memory");
    } else {
        asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns) : "memory");
    }
}

__device__ __forceinline__ void tensor_fence_before() {
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

__device__ __forceinline__ void tensor_fence_after() {
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

__device__ __forceinline__ void tensor_wait_loads() {
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void tensor_wait_stores() {
    asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
}

template <u32 kGroup>
__device__ __forceinline__ void tensor_mma(u32 d, u64 a, u64 b, u32 instruction, u32 accumulate) {
    if constexpr (kGroup == 1) {
        asm volatile(
            "{ .reg .pred p; setp.ne.u32 p, %4, 0; tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p; }" ::"r"(d),
            "l"(a), "l"(b), "r"(instruction), "r"(accumulate)
            : "memory");
    } else {
        asm volatile(
            "{ .reg .pred p; setp.ne.u32 p, %4, 0; tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p; }" ::"r"(d),
            "l"(a), "l"(b), "r"(instruction), "r"(accumulate)
            : "memory");
    }
}

template <u32 kGroup>
__device__ __forceinline__ void tensor_commit(u32 barrier) {
    if constexpr (kGroup == 1) {
        asm volatile(
            "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier) : "memory");
    } else {
        asm volatile(
            "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier) : "memory");
    }
}

template <u32 kGroup>
__device__ __forceinline__ void tensor_commit_multicast(u32 barrier, u16 mask) {
    if constexpr (kGroup == 1) {
        asm volatile(
            "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(
                barrier),
            "h"(mask)
            : "memory");
    } else {
        asm volatile(
            "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(
                barrier),
            "h"(mask)
            : "memory");
    }
}

// The start in units of 16 bytes, the constant 1 at bit 46, the swizzle in bits 61 to 63; distances in bytes.
__device__ __forceinline__ u64 tensor_descriptor(u32 start, u32 leading, u32 stride, u64 swizzle) {
    return ((start & 0x3FFFF) >> 4) | static_cast<u64>(leading >> 4) << 16 | static_cast<u64>(stride >> 4) << 32 |
        1ull << 46 | swizzle << 61;
}

// bf16 x bf16 -> fp32.
__device__ constexpr u32 tensor_instruction(u32 m, u32 n, u32 a_across = 0, u32 b_across = 0) {
    return 0x490 | a_across << 15 | b_across << 16 | (n >> 3) << 17 | (m >> 4) << 24;
}

__device__ __forceinline__ void tensor_load_32x32b_x8(u32 (&r)[8], u32 address) {
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void tensor_load_16x256b_x1(u32 (&r)[4], u32 address) {
    asm volatile("tcgen05.ld.sync.aligned.16x256b.x1.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// A box to this CTA whose bytes count on a barrier of the pair (PTX ISA 9.7.9.27).
__device__ __forceinline__ void tma_load_3d_pair(
    u32 destination, const TensorMap& map, i32 x, i32 y, i32 z, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.cta_group::2.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(destination),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}

// The response to both CTAs of the cluster, at the same offsets (PTX ISA 9.7.13.17).
__device__ __forceinline__ void try_cancel_multicast(u32 response, u32 barrier) {
    asm volatile(
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128"
        " [%0], [%1];" ::"r"(response),
        "r"(barrier)
        : "memory");
}

// x of the first CTA of the cluster whose place this one takes; -1: none.
__device__ __forceinline__ i32 query_cancel(u32 response) {
    u32 granted, x;
    asm volatile(
        "{ .reg .pred p; .reg .b128 r; ld.shared.b128 r, [%2];"
        " clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, r; selp.u32 %0, 1, 0, p; mov.u32 %1, 0;"
        " @p clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%1, _, _, _}, r; }"
        : "=r"(granted), "=r"(x)
        : "r"(response)
        : "memory");
    return granted ? static_cast<i32>(x) : -1;
}

__device__ __forceinline__ u32 tensor_base(u32 word) {
    u32 base;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(base) : "r"(word) : "memory");
    return base;
}

// For kernels of one test: barrier 0 for commits, the tensor memory's address at 8. All of the CTA's warps call both.
template <u32 kGroup = 1>
__device__ __forceinline__ u32 tensor_begin(u32 columns) {
    const u32 smem = smem_base();
    if (threadIdx.x == 0) {
        mbarrier_init(smem, 1);
        fence_mbarrier_init();
    }
    if (threadIdx.x / 32 == 0) tensor_alloc<kGroup>(smem + 8, columns);
    tensor_fence_before();
    fence_proxy_async_shared();
    __syncthreads();
    if constexpr (kGroup == 2) {
        cluster_arrive();
        cluster_wait();
    }
    tensor_fence_after();
    return tensor_base(smem + 8);
}

template <u32 kGroup = 1>
__device__ __forceinline__ void tensor_end(u32 base, u32 columns) {
    tensor_fence_before();
    __syncthreads();
    if constexpr (kGroup == 2) {
        cluster_arrive();
        cluster_wait();
    }
    tensor_fence_after();
    if (threadIdx.x / 32 == 0) {
        tensor_relinquish<kGroup>();
        tensor_dealloc<kGroup>(base, columns);
    }
}

__device__ __forceinline__ void tensor_store_word(u32 address, u32 value) {
    asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ u32 tensor_load_word(u32 address) {
    u32 value;
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];" : "=r"(value) : "r"(address) : "memory");
    tensor_wait_loads();
    return value;
}

// Lane t of this warp's quadrant, one column after another: `out [128, columns]`.
__device__ __forceinline__ void tensor_dump(u32* out, u32 base, u32 columns) {
    const u32 quadrant = threadIdx.x / 32 % 4 * 32;
    for (u32 c = 0; c < columns; ++c) {
        out[(threadIdx.x % 128) * columns + c] = tensor_load_word(base + (quadrant << 16) + c);
    }
}

}  // namespace cake
