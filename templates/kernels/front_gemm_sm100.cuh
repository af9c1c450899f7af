#pragma once

#include "device/base.cuh"
#include "device/cluster.cuh"
#include "device/grid.cuh"
#include "device/math.cuh"
#include "device/tcgen05.cuh"
#include "device/tma.cuh"
#include "device/tma_pair.cuh"
#include "kernels/front_columns.cuh"
#include "kernels/gemm_store_sm100.cuh"

namespace cake {

// In a gated tile rank 0 takes the gate rows and rank 1 the up rows, so that column c and column c + kBlockN / 2 of
// the sums belong together.
template <class Cfg>
__device__ __forceinline__ void load_weights(
    const FrontMaps& maps, const Columns& columns, u32 rank, u32 chunk, u32 destination, u32 full) {
    const bool is_shared = columns.kind == TileClass::kShared;
    if (kGated<Cfg> && is_shared) {
        load_weight_rows<Cfg>(destination, maps.shared, 0, columns.first + rank * Cfg::kSharedCols, chunk, full);
    } else {
        const bool is_router = columns.kind == TileClass::kRouter;
        // As with tokens: half a tile past the end is the other half once more.
        const u32 row = columns.first + rank * kHalfCols<Cfg>;
        const u32 class_cols = is_router ? Cfg::kRouterCols : is_shared ? Cfg::kSharedCols : Cfg::kLatentCols;
        const TensorMap& map = is_router ? maps.router : is_shared ? maps.shared : maps.latent;
        load_weight_rows<Cfg>(destination, map, 0, row < class_cols ? row : columns.first, chunk, full);
    }
}

template <class Cfg>
__device__ __forceinline__ void produce(
    const FrontMaps& maps, const Split& split, u32 pair_rows, u32 num_tokens, u32 rank, u32 smem, const Watch& watch) {
    prefetch_maps(maps);
    griddepcontrol_wait();
    ClusterWork<Cfg, Role::kLoader> works(split, rank, smem, watch);
    Ring<Cfg> load;
    Work work;
    while (works.next(work, watch)) {
        const TilePlace place = place_of<Cfg>(work.tile, pair_rows);
        const Columns columns = columns_of<Cfg>(place.n_tile);
        const u32 token = loaded_token<Cfg>(first_token<Cfg>(place, rank), num_tokens);
        for (u32 k = work.k_begin; k < work.k_end; ++k) {
            const u32 full = begin_stage<Cfg>(load, rank, smem, watch);
            const u32 a = smem + Cfg::kStagesOffset + load.stage * Cfg::kStageBytes;
            tma_load_3d_pair(a, maps.x, 0, token, k, full);
            load_weights<Cfg>(maps, columns, rank, k, a + Cfg::kStageABytes, full);
            load.advance();
        }
    }
    drain_ring<Cfg>(load, smem, watch);
}

// fp32, unrounded. The last tile of a class may reach past its matrix, by whole groups of 8 columns.
template <class Cfg>
__device__ __forceinline__ void store_logits(float* row, u32 column, const float (&values)[kStepCols]) {
#pragma unroll
    for (u32 i = 0; i < kStepCols; i += 8) {
        u32 words[8];
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {
            words[j] = float_to_bits(values[i + j]);
        }
        if (column + i < Cfg::kRouterCols) {
            store_words(row + column + i, words);
        }
    }
}

// kStepCols columns of one token, from `first` of the lower half of the tile on, and those half a tile further.
template <class Cfg>
__device__ __forceinline__ void store_columns(
    Sums<Cfg>& sums, const Columns& columns, u32 first, u32 token, const FrontOutputs& out) {
    const u64 row = token;
    const u32 lower = columns.first + first;
    if (columns.kind == TileClass::kRouter) {
        store_logits<Cfg>(out.logits + row * out.logits_pitch, lower, sums[0]);
        store_logits<Cfg>(out.logits + row * out.logits_pitch, lower + kHalfCols<Cfg>, sums[1]);
    } else if (columns.kind == TileClass::kLatent) {
        store_bf16_within(out.latent + row * out.latent_pitch, lower, Cfg::kLatentCols, sums[0]);
        store_bf16_within(out.latent + row * out.latent_pitch, lower + kHalfCols<Cfg>, Cfg::kLatentCols, sums[1]);
    } else if constexpr (!kGated<Cfg>) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
#pragma unroll
            for (u32 i = 0; i < kStepCols; ++i) {
                sums[half][i] = Cfg::Activation::template of<Cfg>(sums[half][i]);
            }
            const u32 column = lower + half * kHalfCols<Cfg>;
            store_bf16_within(out.shared_act + row * out.shared_act_pitch, column, Cfg::kSharedCols, sums[half]);
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < kStepCols; ++i) {
            sums[0][i] = Cfg::Activation::template of<Cfg>(sums[0][i], sums[1][i]);
        }
        store_bf16_within(out.shared_act + row * out.shared_act_pitch, lower, Cfg::kSharedCols, sums[0]);
    }
}

// Epilogue warps.
template <class Cfg>
__device__ __forceinline__ void finish(
    const Split& split, u32 pair_rows, u32 num_tokens, u32 rank, u32 smem, const FrontOutputs& out,
    const Partials& partials, const Watch& watch) {
    static_assert(
        Cfg::kRouterCols % 8 == 0 && Cfg::kLatentCols % 8 == 0 && Cfg::kSharedCols % 8 == 0, "masked by 8 columns");
    const Fragment at = fragment<Cfg>();
    // An earlier launch may still read the outputs, or use the partials, until it has completed.
    griddepcontrol_wait();
    ClusterWork<Cfg, Role::kEpilogue> works(split, rank, smem, watch);
    Work work;
    for (u32 count = 0; works.next(work, watch); ++count) {
        const TilePlace place = place_of<Cfg>(work.tile, pair_rows);
        const Columns columns = columns_of<Cfg>(place.n_tile);
        const u32 token = first_token<Cfg>(place, rank) + at.thread;
        await_sums<Cfg>(count, smem, watch);
        if (first_token<Cfg>(place, rank) < num_tokens) {
            const Segments segments = segments_of<Cfg>(work, split, partials, rank, at);
            finish_tile<Cfg>(
                accumulator<Cfg>(smem, count % 2), work, segments, at, smem, [&](Sums<Cfg>& sums, u32 first) {
                    if (token < num_tokens) {
                        store_columns<Cfg>(sums, columns, first, token, out);
                    }
                });
        }
        release_sums<Cfg>(count, at, rank, smem);
    }
}

// The front for many tokens: x [num_tokens, hidden] times [gate; down; shared gate | up]^T. The grid has a cluster an
// item; a cluster that has finished one takes the place of a cluster that has not started.
template <class Cfg>
__device__ __forceinline__ void front_gemm(
    const FrontMaps& maps, const FrontOutputs& out, const Split& split, const Partials& partials, u32 num_tokens,
    u32 row_tiles, u64* wait_record) {
    const Watch watch{wait_record, Cfg::kProgramId};
    const u32 smem = smem_base();
    const u32 rank = cluster_ctarank();
    const u32 pair_rows = row_tiles / 2;
    chaos_begin(wait_record);
    set_up<Cfg>(smem);
    const u32 warp = warp_index();
    if (warp >= Cfg::kFirstEpilogueWarp) {
        finish<Cfg>(split, pair_rows, num_tokens, rank, smem, out, partials, watch);
        griddepcontrol_launch_dependents();
    } else if (warp == Cfg::kMmaWarp) {
        if (rank == 0 && elect_one()) {
            // The tokens come from an earlier launch: no bounded wait for them begins before it has ended.
            griddepcontrol_wait();
            multiply<Cfg>(split, smem, watch);
        }
    } else if (lane_id() == 0) {
        produce<Cfg>(maps, split, pair_rows, num_tokens, rank, smem, watch);
    }
    leave_together<Cfg>(smem);
}

}  // namespace cake
