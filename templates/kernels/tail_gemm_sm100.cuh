#pragma once

#include "device/base.cuh"
#include "device/cluster.cuh"
#include "device/grid.cuh"
#include "device/mbarrier.cuh"
#include "device/tcgen05.cuh"
#include "device/tma.cuh"
#include "device/tma_pair.cuh"
#include "kernels/gemm_norm_sm100.cuh"
#include "kernels/gemm_slabs_sm100.cuh"
#include "kernels/gemm_store_sm100.cuh"

namespace cake {

// The output where a cluster's last tile leaves through a tensor map.
struct MappedOutput {
    const TensorMap& map;
    u16* out;
    u32 pitch;
};

// One K block: the CTA's token rows, and its half of the weight rows.
template <class Cfg>
__device__ __forceinline__ void load_block(
    const TailMaps& maps, u32 k, u32 token, u32 weight_row, u32 up_col0, u32 a, u32 full) {
    const u32 b = a + Cfg::kStageABytes;
    if (k < Cfg::kDownBlocks) {
        tma_load_3d_pair(a, maps.shared_act, 0, token, k, full);
        load_weight_rows<Cfg>(b, maps.shared_down, 0, weight_row, k, full);
        return;
    }
    // A ragged slice is a map over columns that ends at the slice: the rest of its last block arrives as zeros.
    const u32 block = k - Cfg::kDownBlocks;
    const u32 column = Cfg::kUpRagged ? up_col0 + block * Cfg::kBlockK : 0;
    const u32 chunk = Cfg::kUpRagged ? 0 : up_col0 / Cfg::kBlockK + block;
    tma_load_3d_pair(a, maps.y, column, token, chunk, full);
    load_weight_rows<Cfg>(b, maps.up, column, weight_row, chunk, full);
}

template <class Cfg>
__device__ __forceinline__ void produce(
    const TailMaps& maps, const Split& split, u32 pair_rows, u32 num_tokens, u32 up_col0, const u32* counters, u32 rank,
    u32 smem, const Watch& watch) {
    prefetch_tensormap(maps.shared_act);
    prefetch_tensormap(maps.shared_down);
    prefetch_tensormap(maps.y);
    prefetch_tensormap(maps.up);
    if constexpr (Cfg::kFusedNorm) {
        // shared_act is an earlier launch's. From here on waits are bounded.
        griddepcontrol_wait();
    }
    ClusterWork<Cfg, Role::kLoader> works(split, rank, smem, watch);
    Ring<Cfg> load;
    Work work;
    bool has_y = false;
    while (works.next(work, watch)) {
        const TilePlace place = place_of<Cfg>(work.tile, pair_rows);
        const u32 token = loaded_token<Cfg>(first_token<Cfg>(place, rank), num_tokens);
        // As with tokens: half a tile past the end is the other half once more.
        const u32 own_row = place.n_tile * Cfg::kBlockN + rank * kHalfCols<Cfg>;
        const u32 weight_row = own_row < Cfg::kOutCols ? own_row : own_row - kHalfCols<Cfg>;
        for (u32 k = work.k_begin; k < work.k_end; ++k) {
            if (!has_y && k >= Cfg::kDownBlocks) {
                if constexpr (Cfg::kFusedNorm) {
                    // This CTA has arrived and the counter has wrapped, so every other has arrived too. The fence takes
                    // the acquired writes over to the copies.
                    mbarrier_wait(smem + Cfg::kRowsArrivedOffset, 0, watch);
                    counter_wait_wrapped(counters, watch);
                    fence_proxy_async_global();
                } else {
                    // y is the norm's: its launch must have completed.
                    griddepcontrol_wait();
                }
                has_y = true;
            }
            const u32 full = begin_stage<Cfg>(load, rank, smem, watch);
            load_block<Cfg>(
                maps, k, token, weight_row, up_col0, smem + Cfg::kStagesOffset + load.stage * Cfg::kStageBytes, full);
            load.advance();
        }
    }
    drain_ring<Cfg>(load, smem, watch);
}

template <class Cfg, class Output>
__device__ __forceinline__ void finish(
    const Split& split, u32 pair_rows, u32 num_tokens, u32 rank, u32 smem, const Output& out, const Partials& partials,
    const Watch& watch) {
    static_assert(Cfg::kOutCols % 64 == 0, "whole slabs, and masked by 8 columns");
    const Fragment at = fragment<Cfg>();
    ClusterWork<Cfg, Role::kEpilogue> works(split, rank, smem, watch);
    Work work;
    for (u32 count = 0; works.next(work, watch); ++count) {
        const TilePlace place = place_of<Cfg>(work.tile, pair_rows);
        const u32 first_row = first_token<Cfg>(place, rank);
        const u32 token = first_row + at.thread;
        const u32 first_column = place.n_tile * Cfg::kBlockN;
        u16* row = out.out + static_cast<u64>(token) * out.pitch;
        await_sums<Cfg>(count, smem, watch);
        bool is_last = false;
        if constexpr (Cfg::kStagedStore) {
            is_last = works.is_last(watch);
        }
        if (first_row < num_tokens) {
            const Segments segments = segments_of<Cfg>(work, split, partials, rank, at);
            const bool finishes = finish_tile<Cfg>(
                accumulator<Cfg>(smem, count % 2), work, segments, at, smem, [&](Sums<Cfg>& sums, u32 column) {
                    if constexpr (Cfg::kStagedStore) {
                        if (is_last) {
                            stage_bf16<Cfg>(slab_of<Cfg>(0, at, smem), at.lane, column % kGroupCols<Cfg>, sums[0]);
                            stage_bf16<Cfg>(slab_of<Cfg>(1, at, smem), at.lane, column % kGroupCols<Cfg>, sums[1]);
                            return;
                        }
                    }
                    if (token < num_tokens) {
                        store_bf16_within(row, first_column + column, Cfg::kOutCols, sums[0]);
                        store_bf16_within(row, first_column + column + kHalfCols<Cfg>, Cfg::kOutCols, sums[1]);
                    }
                });
            if constexpr (Cfg::kStagedStore) {
                if (is_last && finishes) {
                    store_slabs<Cfg>(out.map, first_row, first_column, at, smem);
                }
            }
        }
        release_sums<Cfg>(count, at, rank, smem);
    }
}

// The first words of the launch's counters: the norm's, which come before those of the segments.
__device__ __forceinline__ const u32* norm_counters(const NormOperands& norm) {
    return norm.counters;
}

__device__ __forceinline__ const u32* norm_counters(const NoNorm&) {
    return nullptr;
}

// The tail for many tokens: [shared_act | y] times [shared_down | up slice]^T. K runs over the shared-down blocks
// first, since they do not need y. The grid has a cluster an item. `norm` is NoNorm where the norm is a launch of its
// own.
template <class Cfg, class Norm, class Output>
__device__ __forceinline__ void tail_gemm(
    const TailMaps& maps, const Norm& norm, const Output& out, const Split& split, const Partials& partials,
    u32 num_tokens, u32 up_col0, u32 row_tiles, u64* wait_record) {
    static_assert(Cfg::kUpBlocks + Cfg::kDownBlocks == Cfg::kNumK, "up and down blocks make up K");
    const Watch watch{wait_record, Cfg::kProgramId};
    const u32 smem = smem_base();
    const u32 rank = cluster_ctarank();
    const u32 pair_rows = row_tiles / 2;
    chaos_begin(wait_record);
    set_up<Cfg>(smem);
    const u32 warp = warp_index();
    if (warp >= Cfg::kFirstEpilogueWarp) {
        // An earlier launch may still read y and out, or use the partials, until it has completed.
        griddepcontrol_wait();
        if constexpr (Cfg::kFusedNorm) {
            normalise<Cfg>(norm, num_tokens, lane_id(), smem);
        }
        const Partials segments{partials.sums, partials.counters + Cfg::kNormCounters};
        finish<Cfg>(split, pair_rows, num_tokens, rank, smem, out, segments, watch);
        griddepcontrol_launch_dependents();
    } else if (warp == Cfg::kMmaWarp) {
        if (rank == 0 && elect_one()) {
            if constexpr (Cfg::kFusedNorm) {
                // The tokens come from an earlier launch: no bounded wait for them begins before it has ended.
                griddepcontrol_wait();
            }
            multiply<Cfg>(split, smem, watch);
        }
    } else if (lane_id() == 0) {
        produce<Cfg>(maps, split, pair_rows, num_tokens, up_col0, norm_counters(norm), rank, smem, watch);
    }
    leave_together<Cfg>(smem);
}

}  // namespace cake
