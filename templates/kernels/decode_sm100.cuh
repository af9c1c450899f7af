#pragma once

#include "device/base.cuh"
#include "device/cluster.cuh"
#include "device/mbarrier.cuh"
#include "device/tcgen05.cuh"
#include "device/tensor_memory.cuh"
#include "kernels/decode_tile.cuh"

namespace cake {

// Sums lie in tensor memory: a lane is a weight row, a column a token.
template <class Cfg>
constexpr u32 kTileShape = tcgen05_shape(Cfg::kBlockM, Cfg::kNPad);

// One K chunk of 64: four products of K = 16 into the accumulator at `d`. `accumulate` is off for the first chunk
// only, whose first product overwrites what tensor memory held.
template <class Cfg, u32 kShape>
__device__ __forceinline__ void multiply_chunk(u32 d, u32 a, u32 b, bool accumulate) {
#pragma unroll
    for (u32 k_bytes = 0; k_bytes < Cfg::kBlockK * 2; k_bytes += 32) {
        tcgen05_mma_f16(
            d, tcgen05_descriptor(a + k_bytes), tcgen05_descriptor(b + k_bytes), kShape, accumulate || k_bytes > 0);
    }
}

// The epilogue warps' end of it: all products are complete, so the ring is drained too. `second` is the distance of
// the second half of a thread's sums. Once all four warps have read theirs, warp 0 gives tensor memory back.
template <class Cfg>
__device__ __forceinline__ void take_accumulators(
    Accumulators<Cfg>& acc, const Fragment& at, u32 second, u32 smem, const Watch& watch) {
    mbarrier_wait(smem + Cfg::kSumsFullOffset, 0, watch);
    tcgen05_fence_after_thread_sync();
    const u32 base = tensor_memory_address(smem + Cfg::kTensorBaseOffset);
    const u32 lanes = base + (32 * at.warp << 16);
    tensor_memory_load_16x256b(acc[0], lanes);
    tensor_memory_load_16x256b(acc[1], lanes + second);
    tensor_memory_wait_load(acc);
    tcgen05_fence_before_thread_sync();
    named_barrier_sync(Cfg::kMmaBarrier, 128);
    if (at.warp == 0) {
        tcgen05_fence_after_thread_sync();
        tensor_memory_dealloc<Cfg::kTensorColumns>(base);
    }
}

// After another warp has initialised the barriers: tensor memory for the CTA, then all of the set-up is known to all
// threads. In a pair, what reaches over to the partner must also know that it has started.
template <class Cfg>
__device__ __forceinline__ void claim_tensor_memory(u32 smem) {
    if (warp_index() == 0) {
        tensor_memory_alloc<Cfg::kTensorColumns>(smem + Cfg::kTensorBaseOffset);
        tensor_memory_relinquish();
    }
    tcgen05_fence_before_thread_sync();
    __syncthreads();
    tcgen05_fence_after_thread_sync();
    if constexpr (Cfg::kClusterCtas == 2) {
        cluster_arrive();
        if constexpr (!Cfg::kDeferredClusterWait) {
            cluster_wait();
        }
    }
}

}  // namespace cake
