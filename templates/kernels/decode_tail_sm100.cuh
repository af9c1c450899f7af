#pragma once

#include "device/base.cuh"
#include "device/cluster.cuh"
#include "device/grid.cuh"
#include "device/mbarrier.cuh"
#include "device/tcgen05.cuh"
#include "device/tensor_memory.cuh"
#include "kernels/decode_rows.cuh"
#include "kernels/decode_sm100.cuh"
#include "kernels/decode_tail.cuh"
#include "kernels/pair_sum.cuh"

namespace cake {

// One thread issues all products of the CTA, since a commit tracks its own thread only. The tensor core reads a stage
// while the next is issued; its commit frees the stage.
template <class Cfg>
__device__ __forceinline__ void multiply(u32 rank, u32 smem, const Watch& watch) {
    // The tokens come from an earlier launch: no bounded wait for them begins before it has ended.
    griddepcontrol_wait();
    const Share share = share_of<Cfg>(rank);
    const u32 units = share.down + share.up;
    const u32 d = tensor_memory_address(smem + Cfg::kTensorBaseOffset);
    Ring<Cfg> ring;
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
        tcgen05_fence_after_thread_sync();
        multiply_chunk<Cfg, kTileShape<Cfg>>(d, a, b, unit > 0);
        tcgen05_commit(smem + Cfg::kStageEmptyOffset + ring.stage * 8);
        ring.advance();
    }
    tcgen05_commit(smem + Cfg::kSumsFullOffset);
}

template <class Cfg>
__device__ __forceinline__ void store_sums(
    const Sums<Cfg>& sums, const Fragment& at, const TailOutput& out, u32 tile_row, const TokenRange& tokens,
    u32 smem) {
    const u32 staging = smem + Cfg::kStagingOffset;
    stage_tile<Cfg>(sums, at, staging);
    named_barrier_sync(Cfg::kMmaBarrier, 128);
    store_staged<Cfg::kBlockM, 2>(staging, at.thread, out.out, out.pitch, tile_row, Cfg::kOutCols, tokens);
}

// Epilogue warps: the norm first, then the sums.
template <class Cfg, class Norm>
__device__ __forceinline__ void finish(
    const TailOutput& out, const Norm& norm, u32 num_tokens, u32 up_col0, u32 tile_row, u32 rank, u32 smem,
    const Watch& watch) {
    const Fragment at{threadIdx.x, warp_index(), lane_id()};
    // An earlier launch may still read `y` and `out`. From here on waits are bounded.
    griddepcontrol_wait();
    if constexpr (Cfg::kFusedNorm) {
        normalise<Cfg>(norm, num_tokens, up_col0, at.warp, at.lane, rank, smem, watch);
    }
    Accumulators<Cfg> acc;
    take_accumulators<Cfg>(acc, at, 16u << 16, smem, watch);
    if constexpr (Cfg::kClusterCtas == 2) {
        if constexpr (Cfg::kDeferredClusterWait) {
            cluster_wait();
        }
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
    claim_tensor_memory<Cfg>(smem);
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
    if (warp < Cfg::kProducerWarp) {
        finish<Cfg>(out, norm, num_tokens, up_col0, tile_row, rank, smem, watch);
    } else if (warp == Cfg::kProducerWarp) {
        if (lane_id() == 0) {
            produce<Cfg>(
                TailOperands<Maps>{maps, num_tokens, up_col0, weights_ahead}, norm, tile_row, rank, smem, watch);
        }
    } else if (elect_one()) {
        multiply<Cfg>(rank, smem, watch);
    }
}

}  // namespace cake
