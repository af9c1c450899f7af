#pragma once

#include "device/base.cuh"
#include "device/cluster.cuh"
#include "device/grid.cuh"
#include "device/mbarrier.cuh"
#include "device/wgmma.cuh"
#include "kernels/decode_rows.cuh"
#include "kernels/decode_sm90.cuh"
#include "kernels/decode_tail.cuh"
#include "kernels/pair_sum.cuh"

namespace cake {

// The MMA warpgroup: adds the next `units` units. A stage is free once the wgmmas of the next one are issued and at
// most that one group is unfinished. The last one is freed where the tokens are split: another sum may follow.
template <class Cfg>
__device__ __forceinline__ void accumulate(
    Accumulators<Cfg>& acc, Ring<Cfg>& ring, u32 units, const Share& share, const Fragment& at, u32 smem,
    const Watch& watch) {
    static_assert(!Cfg::kResidentB || Cfg::kTokenParts == 1, "the units of a resident y are counted from the first");
    u32 previous_empty = 0;
    wgmma_pin(acc[0]);
    wgmma_pin(acc[1]);
#pragma unroll 1
    for (u32 unit = 0; unit < units; ++unit) {
        const u32 a = smem + Cfg::kARingOffset + ring.stage * Cfg::kStageABytes;
        u32 b = smem + Cfg::kBRingOffset + ring.stage * Cfg::kStageBBytes;
        if constexpr (Cfg::kResidentB) {
            if (unit == share.down) {
                mbarrier_wait(smem + Cfg::kYResidentOffset, 0, watch);
            }
            if (!is_down(share, unit)) {
                b = smem + Cfg::kResidentBOffset + (unit - share.down) * Cfg::kStageBBytes;
            }
        }
        mbarrier_wait(smem + Cfg::kStageFullOffset + ring.stage * 8, ring.phase, watch);
        wgmma_fence();
#pragma unroll
        for (u32 chunk = 0; chunk < Cfg::kChunksPerStage; ++chunk) {
            const u32 weights = a + chunk * Cfg::kChunkABytes;
            multiply_chunk<Cfg>(acc, weights, Cfg::kChunkABytes / 2, b + chunk * Cfg::kChunkBBytes);
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
    Accumulators<Cfg>& acc, const Fragment& at, u32 rank, u32 smem, const Watch& watch) {
    const Share share = share_of<Cfg>(rank);
    Ring<Cfg> ring;
    if constexpr (Cfg::kTokenParts == 1) {
        accumulate<Cfg>(acc, ring, share.down + share.up, share, at, smem, watch);
    } else if constexpr (Cfg::kTwoSums) {
        Accumulators<Cfg> others = {};
        accumulate<Cfg>(acc, ring, Cfg::kFirstDownUnits, share, at, smem, watch);
        accumulate<Cfg>(others, ring, Cfg::kRank0DownUnits - Cfg::kFirstDownUnits, share, at, smem, watch);
        accumulate<Cfg>(acc, ring, Cfg::kFirstUpUnits, share, at, smem, watch);
        accumulate<Cfg>(others, ring, Cfg::kRank0UpUnits - Cfg::kFirstUpUnits, share, at, smem, watch);
        add_sums<Cfg>(acc, others);
    } else {
        accumulate<Cfg>(acc, ring, Cfg::kRank0DownUnits, share, at, smem, watch);
        accumulate<Cfg>(acc, ring, Cfg::kRank0UpUnits, share, at, smem, watch);
    }
}

template <class Cfg>
__device__ __forceinline__ void store_sums(
    const Sums<Cfg>& sums, const Fragment& at, const TailOutput& out, u32 tile_row, const TokenRange& tokens,
    u32 smem) {
    // All MMA warps have drained the ring and read the landing zone: both may be written over.
    named_barrier_sync(Cfg::kMmaBarrier, 128);
    const u32 staging = smem + Cfg::kStagingOffset;
    stage_tile<Cfg>(sums, at, staging);
    named_barrier_sync(Cfg::kMmaBarrier, 128);
    store_staged<Cfg::kBlockM, 2>(staging, at.thread, out.out, out.pitch, tile_row, Cfg::kOutCols, tokens);
}

template <class Cfg>
__device__ __forceinline__ void multiply_and_store(
    const TailOutput& out, u32 num_tokens, u32 tile_row, u32 rank, u32 smem, const Watch& watch) {
    const Fragment at{threadIdx.x, warp_index(), lane_id()};
    // The tokens come from an earlier launch, which may still read `out` too. From here on waits are bounded.
    griddepcontrol_wait();
    Accumulators<Cfg> acc = {};
    accumulate_share<Cfg>(acc, at, rank, smem, watch);
    if constexpr (Cfg::kClusterCtas == 2) {
        // Only here does it matter that the partner has started.
        cluster_wait();
        Sums<Cfg> sums;
        if (combine_pair<Cfg>(acc, sums, at, rank, smem, watch)) {
            store_sums<Cfg>(sums, at, out, tile_row, final_tokens<Cfg>(rank, num_tokens), smem);
        }
    } else {
        store_sums<Cfg>(acc, at, out, tile_row, final_tokens<Cfg>(rank, num_tokens), smem);
    }
}

template <class Cfg, class Maps>
__device__ __forceinline__ void set_up(const Maps& maps, u32 rank, u32 smem) {
    if (threadIdx.x == Cfg::kProducerWarp * 32) {
        prefetch_maps<Cfg>(maps);
        init_barriers<Cfg>(smem);
        publish_barriers<Cfg>(rank, smem);
    }
    __syncthreads();
    if constexpr (Cfg::kClusterCtas == 2) {
        cluster_arrive();
    }
}

// The tail for a few tokens: [shared_act | y] times the weight rows of one tile, by one CTA or two. `norm` is NoNorm
// where an earlier launch has written y.
template <class Cfg, class Maps, class Norm>
__device__ __forceinline__ void decode_tail(
    const Maps& maps, const Norm& norm, const TailOutput& out, u32 num_tokens, u32 up_col0, u32 weights_ahead,
    u64* wait_record) {
    const Watch watch{wait_record, Cfg::kProgramId};
    const u32 smem = smem_base();
    const u32 rank = Cfg::kClusterCtas == 2 ? cluster_ctarank() : 0;
    const u32 tile_row = blockIdx.x / Cfg::kTileCtas * Cfg::kBlockM;
    chaos_begin(wait_record);
    set_up<Cfg>(maps, rank, smem);
    // A dependent launch starts once all CTAs run, so it takes nothing from this one but idle multiprocessors.
    griddepcontrol_launch_dependents();
    const u32 warp = warp_index();
    if (warp < 4) {
        clear_missing_rows<Cfg>(loaded_tokens<Cfg>(num_tokens), smem);
        multiply_and_store<Cfg>(out, num_tokens, tile_row, rank, smem, watch);
    } else if (warp == Cfg::kProducerWarp) {
        if (lane_id() == 0) {
            produce<Cfg>(
                TailOperands<Maps>{maps, num_tokens, up_col0, weights_ahead}, norm, tile_row, rank, smem, watch);
        }
    } else if constexpr (Cfg::kFusedNorm) {
        normalise<Cfg>(norm, num_tokens, up_col0, warp - 4, lane_id(), rank, smem, watch);
    }
}

}  // namespace cake
