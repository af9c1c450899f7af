#pragma once

#include "device/base.cuh"
#include "device/cluster.cuh"
#include "device/grid.cuh"
#include "device/mbarrier.cuh"
#include "device/tcgen05.cuh"
#include "device/tensor_memory.cuh"
#include "kernels/decode_front.cuh"
#include "kernels/decode_sm100.cuh"
#include "kernels/pair_sum.cuh"

namespace cake {

// One stage. A halved tile's boxes hold 64 rows of all chunks of the stage, another tile's 128 rows; its gate rows and
// its up rows have an accumulator each.
template <class Cfg>
__device__ __forceinline__ void multiply_stage(const Tile& tile, u32 d, u32 a, u32 b, bool accumulate) {
    constexpr u32 kHalfShape = tcgen05_shape(Cfg::kBlockM / 2, Cfg::kNPad);
    constexpr u32 kHalfChunkBytes = Cfg::kChunkABytes / 2;
#pragma unroll
    for (u32 chunk = 0; chunk < Cfg::kChunksPerStage; ++chunk) {
        const u32 tokens = b + chunk * Cfg::kChunkBBytes;
        const bool add = accumulate || chunk > 0;
        if (tile.kind == kHalved<Cfg>) {
            const u32 gate = a + chunk * kHalfChunkBytes;
            multiply_chunk<Cfg, kHalfShape>(d, gate, tokens, add);
            multiply_chunk<Cfg, kHalfShape>(d + Cfg::kUpColumn, gate + Cfg::kStageABytes / 2, tokens, add);
        } else {
            multiply_chunk<Cfg, kTileShape<Cfg>>(d, a + chunk * Cfg::kChunkABytes, tokens, add);
        }
    }
}

// One thread issues all products of the CTA, since a commit tracks its own thread only. The tensor core reads a stage
// while the next is issued; its commit frees the stage.
template <class Cfg>
__device__ __forceinline__ void multiply(const Tile& tile, u32 rank, u32 smem, const Watch& watch) {
    // The tokens come from an earlier launch: no bounded wait for them begins before it has ended.
    griddepcontrol_wait();
    const u32 units = unit_count<Cfg>(rank);
    const u32 d = tensor_memory_address(smem + Cfg::kTensorBaseOffset);
    Ring<Cfg> ring;
#pragma unroll 1
    for (u32 unit = 0; unit < units; ++unit) {
        mbarrier_wait(smem + Cfg::kStageFullOffset + ring.stage * 8, ring.phase, watch);
        tcgen05_fence_after_thread_sync();
        multiply_stage<Cfg>(
            tile, d, smem + Cfg::kARingOffset + ring.stage * Cfg::kStageABytes,
            smem + Cfg::kBRingOffset + ring.stage * Cfg::kStageBBytes, unit > 0);
        tcgen05_commit(smem + Cfg::kStageEmptyOffset + ring.stage * 8);
        ring.advance();
    }
    tcgen05_commit(smem + Cfg::kSumsFullOffset);
}

// Epilogue warps.
template <class Cfg>
__device__ __forceinline__ void finish(
    const Tile& tile, u32 rank, u32 smem, const FrontOutputs& out, const TokenRange& tokens, const Watch& watch) {
    const Fragment at{threadIdx.x, warp_index(), lane_id()};
    // An earlier launch may still read the outputs. From here on waits are bounded.
    griddepcontrol_wait();
    // A halved tile's halves are two accumulators of M = 64, which use the lower 16 lanes of each warp's 32 (PTX ISA
    // 9.7.16.10.5); another tile's are the lower and the upper 16 lanes of one of M = 128.
    const u32 second = tile.kind == kHalved<Cfg> ? Cfg::kUpColumn : 16u << 16;
    Accumulators<Cfg> acc;
    take_accumulators<Cfg>(acc, at, second, smem, watch);
    if constexpr (Cfg::kClusterCtas == 2) {
        if constexpr (Cfg::kDeferredClusterWait) {
            cluster_wait();
        }
        Sums<Cfg> sums;
        if (combine_pair<Cfg>(acc, sums, at, rank, smem, watch)) {
            store_tile<Cfg>(sums, tile, at, smem + Cfg::kStagingOffset, out, tokens);
        }
    } else {
        store_tile<Cfg>(acc, tile, at, smem + Cfg::kStagingOffset, out, tokens);
    }
}

template <class Cfg>
__device__ __forceinline__ void set_up(const FrontMaps& maps, u32 rank, u32 smem) {
    if (threadIdx.x == Cfg::kProducerWarp * 32) {
        prefetch_maps(maps);
        init_barriers<Cfg>(smem);
        publish_barriers<Cfg>(rank, smem);
    }
    claim_tensor_memory<Cfg>(smem);
}

// The front for a few tokens: x [num_tokens, hidden] times the weight rows of one tile, by one CTA or a pair.
template <class Cfg>
__device__ __forceinline__ void decode_front(
    const FrontMaps& maps, const FrontOutputs& out, u32 num_tokens, u32 weights_ahead, u64* wait_record) {
    const Watch watch{wait_record, Cfg::kProgramId};
    const u32 smem = smem_base();
    const u32 rank = Cfg::kClusterCtas == 2 ? cluster_ctarank() : 0;
    const Tile tile = tile_of<Cfg>(blockIdx.x / Cfg::kTileCtas);
    chaos_begin(wait_record);
    set_up<Cfg>(maps, rank, smem);
    // A dependent launch starts once all CTAs run, so it takes nothing from this one but idle multiprocessors.
    griddepcontrol_launch_dependents();
    const u32 warp = warp_index();
    if (warp < Cfg::kProducerWarp) {
        finish<Cfg>(tile, rank, smem, out, final_tokens<Cfg>(rank, num_tokens), watch);
    } else if (warp == Cfg::kProducerWarp) {
        if (lane_id() == 0) {
            produce<Cfg>(maps, tile, rank, num_tokens, weights_ahead, smem, watch);
        }
    } else if (elect_one()) {
        multiply<Cfg>(tile, rank, smem, watch);
    }
}

}  // namespace cake
