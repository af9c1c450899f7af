#pragma once

#include "device/base.cuh"
#include "device/cluster.cuh"
#include "device/mbarrier.cuh"
#include "device/wgmma.cuh"
#include "kernels/barriers.cuh"
#include "kernels/gemm_tile_sm90.cuh"

namespace cake {

// A stage is free for both CTAs of the pair, since each multicasts to the other: half of the weight tile, or tokens.
template <class Cfg>
__device__ __forceinline__ void release_stage(u32 smem, u32 stage, u32 rank, u32 lane) {
    if (lane == 0) {
        const u32 empty = smem + Cfg::kStageEmptyOffset + stage * 8;
        mbarrier_arrive(empty);
        mbarrier_arrive_cluster_after_reads(mapa(empty, rank ^ 1));
    }
}

template <class Cfg>
__device__ __forceinline__ void pin(Accumulators<Cfg>& acc) {
#pragma unroll
    for (u32 block = 0; block < Cfg::kGroupBlocks; ++block) {
        wgmma_pin(acc[block]);
    }
}

// Until the other warpgroup has issued the last wgmma of the work before. Not only for speed: a wait for a stage tells
// one time round the ring from the next, but not from the one after it, and the other may be two times round behind.
template <class Cfg>
__device__ __forceinline__ void await_turn(u32 count, const Fragment& at, u32 smem, const Watch& watch) {
    // Warpgroup 0 goes first: the phase before a barrier's first one counts as complete.
    const u32 phase = (count / 2 + at.group + 1) & 1;
    mbarrier_wait(smem + Cfg::kTurnOffset + at.group * 8, phase, watch);
}

template <class Cfg>
__device__ __forceinline__ void pass_turn(const Fragment& at, u32 smem) {
    if (at.lane == 0) {
        mbarrier_arrive(smem + Cfg::kTurnOffset + (at.group ^ 1) * 8);
    }
}

// Sums `iterations` K blocks of 64. A stage is freed when at most the wgmmas of the next one are unfinished.
template <class Cfg>
__device__ __forceinline__ void accumulate(
    Accumulators<Cfg>& acc, Ring<Cfg>& ring, u32 iterations, const Fragment& at, u32 rank, u32 smem,
    const Watch& watch) {
#pragma unroll
    for (u32 block = 0; block < Cfg::kGroupBlocks; ++block) {
#pragma unroll
        for (u32 i = 0; i < Cfg::kBlockN / 2; ++i) {
            acc[block][i] = 0.0f;
        }
    }
    pin<Cfg>(acc);
    constexpr u32 kBlockABytes = 64 * Cfg::kBlockK * 2;
    u32 previous = 0;
#pragma unroll 1
    for (u32 k = 0; k < iterations; ++k) {
        const u32 a = smem + Cfg::kStagesOffset + ring.stage * Cfg::kStageBytes + part_of<Cfg>(at) * kBlockABytes;
        const u32 b = smem + Cfg::kStagesOffset + ring.stage * Cfg::kStageBytes + Cfg::kStageABytes;
        mbarrier_wait(smem + Cfg::kStageFullOffset + ring.stage * 8, ring.phase, watch);
        wgmma_fence();
#pragma unroll
        for (u32 k_bytes = 0; k_bytes < Cfg::kBlockK * 2; k_bytes += 32) {
#pragma unroll
            for (u32 block = 0; block < Cfg::kGroupBlocks; ++block) {
                const u64 rows = wgmma_descriptor(a + block * kBlockABytes + k_bytes);
                wgmma_m64_k16<Cfg::kBlockN>(acc[block], rows, wgmma_descriptor(b + k_bytes));
            }
        }
        wgmma_commit_group();
        wgmma_wait_group<1>();
        if (k > 0) {
            release_stage<Cfg>(smem, previous, rank, at.lane);
        }
        previous = ring.stage;
        ring.advance();
    }
    if constexpr (kTakeTurns<Cfg>) {
        pass_turn<Cfg>(at, smem);
    }
    wgmma_wait_group<0>();
    pin<Cfg>(acc);
    release_stage<Cfg>(smem, previous, rank, at.lane);
}

// Frees the stages of `iterations` K blocks that need no multiplication.
template <class Cfg>
__device__ __forceinline__ void pass_over(
    Ring<Cfg>& ring, u32 iterations, const Fragment& at, u32 rank, u32 smem, const Watch& watch) {
#pragma unroll 1
    for (u32 k = 0; k < iterations; ++k) {
        mbarrier_wait(smem + Cfg::kStageFullOffset + ring.stage * 8, ring.phase, watch);
        release_stage<Cfg>(smem, ring.stage, rank, at.lane);
        ring.advance();
    }
    if constexpr (kTakeTurns<Cfg>) {
        pass_turn<Cfg>(at, smem);
    }
}

// Barriers of the ring, and the pair in step: no CTA may write to its partner before the partner has them.
template <class Cfg>
__device__ __forceinline__ void set_up_ring(u32 smem) {
    if (threadIdx.x == 0) {
        init_barriers<Cfg>(smem);
        fence_mbarrier_init();
    }
    __syncthreads();
    cluster_arrive();
    cluster_wait();
}

// The partner may still multicast to this CTA's shared memory or arrive at its barriers until it has finished too.
template <class Cfg>
__device__ __forceinline__ void leave_together() {
    cluster_arrive();
    cluster_wait();
}

}  // namespace cake
