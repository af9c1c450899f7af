#pragma once

#include "device/base.cuh"
#include "device/cluster.cuh"
#include "device/grid.cuh"
#include "device/mbarrier.cuh"
#include "device/wgmma.cuh"
#include "kernels/decode_front.cuh"
#include "kernels/decode_sm90.cuh"
#include "kernels/pair_sum.cuh"

namespace cake {

// The rows in which the MMAs of a narrow tile overlap are the first one's. Those of a halved tile, gate and up, have
// kBlockM / 2 rows each, and read on into their neighbours'.
template <class Cfg>
__device__ __forceinline__ Fragment fragment_of(const Tile& tile) {
    const u32 warp = warp_index();
    if constexpr (kNarrow<Cfg>) {
        const bool in_half = 16 * warp < Cfg::kBlockM / 2;
        const bool halved = tile.kind == kHalved<Cfg>;
        return {
            threadIdx.x,
            warp,
            lane_id(),
            {!halved || in_half, halved ? in_half : Cfg::kHalfRows + 16 * warp >= 64},
            static_cast<u32>(halved ? Cfg::kBlockM : 2 * Cfg::kHalfRows)};
    } else {
        return {threadIdx.x, warp, lane_id()};
    }
}

// The MMA warpgroup: adds the next `units` units. A stage is free once the wgmmas of the next one are issued and at
// most that one group is unfinished. The last one is freed where the tokens are split: another sum may follow.
template <class Cfg>
__device__ __forceinline__ void accumulate(
    Accumulators<Cfg>& acc, Ring<Cfg>& ring, u32 units, const Tile& tile, const Fragment& at, u32 smem,
    const Watch& watch) {
    const bool halved = tile.kind == kHalved<Cfg>;
    // A box of a halved tile holds half of the rows of all chunks of a stage, gate or up; one of another tile all rows.
    const u32 a_half = halved ? Cfg::kChunksPerStage * Cfg::kChunkABytes / 2 : Cfg::kHalfRows * Cfg::kBlockK * 2;
    const u32 a_chunk = halved ? Cfg::kChunkABytes / 2 : Cfg::kChunkABytes;
    u32 previous_empty = 0;
    wgmma_pin(acc[0]);
    wgmma_pin(acc[1]);
#pragma unroll 1
    for (u32 unit = 0; unit < units; ++unit) {
        const u32 a = smem + Cfg::kARingOffset + ring.stage * Cfg::kStageABytes;
        const u32 b = smem + Cfg::kBRingOffset + ring.stage * Cfg::kStageBBytes;
        mbarrier_wait(smem + Cfg::kStageFullOffset + ring.stage * 8, ring.phase, watch);
        wgmma_fence();
#pragma unroll
        for (u32 chunk = 0; chunk < Cfg::kChunksPerStage; ++chunk) {
            multiply_chunk<Cfg>(acc, a + chunk * a_chunk, a_half, b + chunk * Cfg::kChunkBBytes);
        }
        wgmma_commit_group();
        wgmma_wait_group<1>();
        if (unit > 0 && at.lane == 0) {
            mbarrier_arrive(previous_empty);
        }
        previous_empty = smem + Cfg::kStageEmptyOffset + ring.stage * 8;
        ring.advance();
    }
    wgmma_wait_group<0>();
    wgmma_pin(acc[0]);
    wgmma_pin(acc[1]);
    if constexpr (Cfg::kTokenParts > 1) {
        if (units > 0 && at.lane == 0) {
            mbarrier_arrive(previous_empty);
        }
    }
}

// All of the CTA's K. As two sums where its tile's CTAs split the tokens and registers allow, of the units that either
// rank of a pair has which splits K: a token gets the same bits.
template <class Cfg>
__device__ __forceinline__ void accumulate_share(
    Accumulators<Cfg>& acc, const Tile& tile, const Fragment& at, u32 rank, u32 smem, const Watch& watch) {
    Ring<Cfg> ring;
    if constexpr (Cfg::kTokenParts == 1) {
        accumulate<Cfg>(acc, ring, unit_count<Cfg>(rank), tile, at, smem, watch);
    } else if constexpr (Cfg::kTwoSums) {
        Accumulators<Cfg> others = {};
        accumulate<Cfg>(acc, ring, Cfg::kFirstUnits, tile, at, smem, watch);
        accumulate<Cfg>(others, ring, Cfg::kRank0Units - Cfg::kFirstUnits, tile, at, smem, watch);
        add_sums<Cfg>(acc, others);
    } else {
        accumulate<Cfg>(acc, ring, Cfg::kRank0Units, tile, at, smem, watch);
    }
}

template <class Cfg>
__device__ __forceinline__ void store_sums(
    Sums<Cfg>& sums, const Tile& tile, const Fragment& at, u32 smem, const FrontOutputs& out,
    const TokenRange& tokens) {
    // All MMA warps have drained the ring and read the landing zone: both may be written over.
    named_barrier_sync(Cfg::kMmaBarrier, 128);
    store_tile<Cfg>(sums, tile, at, smem + Cfg::kStagingOffset, out, tokens);
}

template <class Cfg>
__device__ __forceinline__ void multiply_and_store(
    const Tile& tile, u32 rank, u32 smem, const FrontOutputs& out, const TokenRange& tokens, const Watch& watch) {
    const Fragment at = fragment_of<Cfg>(tile);
    // The tokens come from an earlier launch, which may still read the outputs too. From here on waits are bounded.
    griddepcontrol_wait();
    Accumulators<Cfg> acc = {};
    accumulate_share<Cfg>(acc, tile, at, rank, smem, watch);
    if constexpr (Cfg::kClusterCtas == 2) {
        // Only here does it matter that the partner has started.
        cluster_wait();
        Sums<Cfg> sums;
        if (combine_pair<Cfg>(acc, sums, at, rank, smem, watch)) {
            store_sums<Cfg>(sums, tile, at, smem, out, tokens);
        }
    } else {
        store_sums<Cfg>(acc, tile, at, smem, out, tokens);
    }
}

template <class Cfg>
__device__ __forceinline__ void set_up(const FrontMaps& maps, u32 rank, u32 smem) {
    if (threadIdx.x == Cfg::kProducerWarp * 32) {
        prefetch_maps(maps);
        init_barriers<Cfg>(smem);
        publish_barriers<Cfg>(rank, smem);
    }
    if constexpr (kNarrow<Cfg> && kGated<Cfg>) {
        clear_pads<Cfg>(smem);
    }
    __syncthreads();
    if constexpr (Cfg::kClusterCtas == 2) {
        cluster_arrive();
    }
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
    if (warp_index() < Cfg::kProducerWarp) {
        clear_missing_rows<Cfg>(loaded_tokens<Cfg>(num_tokens), smem);
        multiply_and_store<Cfg>(tile, rank, smem, out, final_tokens<Cfg>(rank, num_tokens), watch);
    } else if (lane_id() == 0) {
        produce<Cfg>(maps, tile, rank, num_tokens, weights_ahead, smem, watch);
    }
}

}  // namespace cake
