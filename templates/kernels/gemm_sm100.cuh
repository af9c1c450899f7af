#pragma once

#include "device/base.cuh"
#include "device/cluster.cuh"
#include "device/mbarrier.cuh"
#include "device/tcgen05.cuh"
#include "device/tcgen05_pair.cuh"
#include "device/tensor_memory.cuh"
#include "device/tma_pair.cuh"
#include "kernels/barriers.cuh"
#include "kernels/gemm_cluster_work_sm100.cuh"
#include "kernels/ring.cuh"

namespace cake {

// The first of the CTA's token rows in a tile. In the last pair row of an uneven number of row tiles they all lie past
// the end for rank 1, which then stores nothing.
template <class Cfg>
__device__ __forceinline__ u32 first_token(const TilePlace& place, u32 rank) {
    return (place.pair_row * 2 + rank) * Cfg::kBlockM;
}

// Where the CTA's token rows are loaded from. Rows past the end are the partner's once more: they are valid operands
// and in L2, while a box outside of the matrix is filled with zeros more slowly.
template <class Cfg>
__device__ __forceinline__ u32 loaded_token(u32 token, u32 num_tokens) {
    return token < num_tokens ? token : token - Cfg::kBlockM;
}

// Waits until the stage is free in this CTA; CTA 0 then expects the bytes of both. Returns the barrier, CTA 0's.
template <class Cfg>
__device__ __forceinline__ u32 begin_stage(const Ring<Cfg>& load, u32 rank, u32 smem, const Watch& watch) {
    const u32 full = smem + Cfg::kStageFullOffset + load.stage * 8;
    mbarrier_wait_cluster(smem + Cfg::kStageEmptyOffset + load.stage * 8, load.phase ^ 1, watch);
    if (rank == 0) {
        mbarrier_arrive_expect_tx(full, 2 * Cfg::kStageBytes);
    }
    return mapa(full, 0);
}

// Half of a tile's weight rows, each CTA its own.
template <class Cfg>
__device__ __forceinline__ void load_weight_rows(
    u32 destination, const TensorMap& map, u32 column, u32 row, u32 chunk, u32 full) {
    if constexpr (Cfg::kEvictFirst) {
        tma_load_3d_pair_hint(destination, map, column, row, chunk, full, evict_first_policy());
    } else {
        tma_load_3d_pair(destination, map, column, row, chunk, full);
    }
}

// Until every stage is free again: no commit of CTA 0 may arrive here after the CTA has exited.
template <class Cfg>
__device__ __forceinline__ void drain_ring(Ring<Cfg> load, u32 smem, const Watch& watch) {
    for (u32 stage = 0; stage < Cfg::kNumStages; ++stage) {
        mbarrier_wait_cluster(smem + Cfg::kStageEmptyOffset + load.stage * 8, load.phase ^ 1, watch);
        load.advance();
    }
}

// A tile's sums in tensor memory, in both CTAs: lane = token row, column = weight row. Two tiles take turns, so that
// one is stored while the next is multiplied.
template <class Cfg>
__device__ __forceinline__ u32 accumulator(u32 smem, u32 turn) {
    return tensor_memory_address(smem + Cfg::kTensorBaseOffset) + turn * Cfg::kBlockN;
}

// One K block of 64: four products of K = 16.
template <class Cfg>
__device__ __forceinline__ void multiply_block(u32 d, u32 a, bool accumulate) {
    constexpr u32 kShape = tcgen05_shape(2 * Cfg::kBlockM, Cfg::kBlockN);
    const u32 b = a + Cfg::kStageABytes;
#pragma unroll
    for (u32 k_bytes = 0; k_bytes < Cfg::kBlockK * 2; k_bytes += 32) {
        tcgen05_mma_f16_pair(
            d, tcgen05_descriptor(a + k_bytes), tcgen05_descriptor(b + k_bytes), kShape, accumulate || k_bytes > 0);
    }
}

// The tensor core reads a stage while the next is issued; its commit frees the stage in both CTAs.
template <class Cfg>
__device__ __forceinline__ void multiply(const Split& split, u32 smem, const Watch& watch) {
    ClusterWork<Cfg, Role::kMultiplier> works(split, 0, smem, watch);
    Ring<Cfg> ring;
    Work work;
    for (u32 count = 0; works.next(work, watch); ++count) {
        const u32 turn = count % 2;
        mbarrier_wait_cluster(smem + Cfg::kSumsEmptyOffset + turn * 8, (count / 2 & 1) ^ 1, watch);
        const u32 d = accumulator<Cfg>(smem, turn);
#pragma unroll 1
        for (u32 k = work.k_begin; k < work.k_end; ++k) {
            mbarrier_wait_cluster(smem + Cfg::kStageFullOffset + ring.stage * 8, ring.phase, watch);
            tcgen05_fence_after_thread_sync();
            multiply_block<Cfg>(d, smem + Cfg::kStagesOffset + ring.stage * Cfg::kStageBytes, k > work.k_begin);
            tcgen05_commit_pair(smem + Cfg::kStageEmptyOffset + ring.stage * 8);
            ring.advance();
        }
        tcgen05_commit_pair(smem + Cfg::kSumsFullOffset + turn * 8);
    }
}

// Barriers and tensor memory, and the pair in step: no CTA may reach over to its partner before that has them.
template <class Cfg>
__device__ __forceinline__ void set_up(u32 smem) {
    if (threadIdx.x == 0) {
        init_barriers<Cfg>(smem);
        fence_mbarrier_init();
    }
    if (warp_index() == Cfg::kMmaWarp) {
        tensor_memory_alloc_pair<Cfg::kTensorColumns>(smem + Cfg::kTensorBaseOffset);
        tensor_memory_relinquish_pair();
    }
    warp_sync();
    tcgen05_fence_before_thread_sync();
    cluster_arrive();
    cluster_wait();
    tcgen05_fence_after_thread_sync();
}

// The partner may still read this CTA's operands or arrive at its barriers until it has finished too.
template <class Cfg>
__device__ __forceinline__ void leave_together(u32 smem) {
    warp_sync();
    tcgen05_fence_before_thread_sync();
    cluster_arrive();
    cluster_wait();
    tcgen05_fence_after_thread_sync();
    if (warp_index() == Cfg::kMmaWarp) {
        tensor_memory_dealloc_pair<Cfg::kTensorColumns>(accumulator<Cfg>(smem, 0));
    }
}

}  // namespace cake
