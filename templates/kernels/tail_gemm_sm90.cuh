#pragma once

#include "device/base.cuh"
#include "device/cluster.cuh"
#include "device/grid.cuh"
#include "device/wgmma.cuh"
#include "kernels/gemm_load_sm90.cuh"
#include "kernels/gemm_norm_sm90.cuh"
#include "kernels/gemm_segments_sm90.cuh"
#include "kernels/gemm_sm90.cuh"
#include "kernels/gemm_store_sm90.cuh"
#include "kernels/tail_operands.cuh"

namespace cake {

template <class Cfg>
__device__ __forceinline__ void load_block(
    const TailMaps& maps, u32 k, const CtaTile& tile, const TokenRows& rows, u32 up_col0, u32 rank,
    const StageBoxes& to) {
    const u32 first = tile.n_tile * Cfg::kBlockN;
    if (k < Cfg::kDownBlocks) {
        load_tokens(maps.shared_act, tile, rows, {0, k}, k, rank, to);
        load_weights<Cfg>({&maps.shared_down, first, Cfg::kBlockN / 2}, tile, {0, k}, rank, to);
        return;
    }
    // A ragged slice is a map over columns that ends at the slice: the rest of its last block arrives as zeros.
    const u32 block = k - Cfg::kDownBlocks;
    const BlockColumns at{
        Cfg::kUpRagged ? up_col0 + block * Cfg::kBlockK : 0, Cfg::kUpRagged ? 0 : up_col0 / Cfg::kBlockK + block};
    load_tokens(maps.y, tile, rows, at, k, rank, to);
    load_weights<Cfg>({&maps.up, first, Cfg::kBlockN / 2}, tile, at, rank, to);
}

template <class Cfg, class Norm>
__device__ __forceinline__ void produce(
    const TailMaps& maps, const Norm& norm, const Split& split, u32 row_tiles, u32 num_tokens, u32 up_col0, u32 rank,
    u32 smem, const Watch& watch) {
    WorkList<Cfg> list(split, blockIdx.x / 2, gridDim.x / 2);
    Ring<Cfg> load;
    Work work;
    u32 known_pair_row = ~0u;
    bool norm_done = false;
    if constexpr (Cfg::kFusedNorm) {
        // The tokens are an earlier launch's.
        griddepcontrol_wait();
    }
    while (list.next(work)) {
        const CtaTile tile = tile_of<Cfg>(work.tile, row_tiles, rank);
        const TokenRows rows = rows_of<Cfg>(tile.row_tile, num_tokens);
        for (u32 k = work.k_begin; k < work.k_end; ++k) {
            if constexpr (Cfg::kFusedNorm) {
                if (rows.any() && k >= Cfg::kDownBlocks) {
                    wait_for_rows<Cfg>(norm, rows, tile.row_tile / 2, known_pair_row, watch);
                }
            } else if (!norm_done && k >= Cfg::kDownBlocks) {
                // y is the norm's: its launch must have completed.
                griddepcontrol_wait();
                norm_done = true;
            }
            expect_stage<Cfg>(load, rows.any(), smem, watch);
            load_block<Cfg>(maps, k, tile, rows, up_col0, rank, boxes_of<Cfg>(load, smem));
            load.advance();
        }
    }
    if constexpr (Cfg::kFusedNorm) {
        retire_counters(norm);
    }
}

template <class Cfg>
__device__ __forceinline__ void multiply_and_store(
    const Split& split, u32 row_tiles, u32 num_tokens, u32 rank, u32 smem, const Matrix& out, const Partials& partials,
    const Watch& watch) {
    const u32 warp = warp_index();
    const Fragment at{warp / 4, threadIdx.x % 128, warp % 4, lane_id()};
    WorkList<Cfg> list(split, blockIdx.x / 2, gridDim.x / 2);
    Ring<Cfg> ring;
    Work work;
    Accumulators<Cfg> acc;
    for (u32 count = 0; list.next(work); ++count) {
        if constexpr (kTakeTurns<Cfg>) {
            if (count % 2 != at.group) {
                skip<Cfg>(ring, work.k_end - work.k_begin);
                continue;
            }
            await_turn<Cfg>(count, at, smem, watch);
        }
        const CtaTile tile = tile_of<Cfg>(work.tile, row_tiles, rank);
        const TokenRows rows = rows_of<Cfg>(tile.row_tile, num_tokens);
        if (!rows.any()) {
            pass_over<Cfg>(ring, work.k_end - work.k_begin, at, rank, smem, watch);
            continue;
        }
        accumulate<Cfg>(acc, ring, work.k_end - work.k_begin, at, rank, smem, watch);
        // An earlier launch may still read `out`, or use the partials, until it has completed.
        griddepcontrol_wait();
        if (work.num_segments > 1 && !finish_segments<Cfg>(acc, work, split, partials, rank, at, smem)) {
            continue;
        }
#pragma unroll
        for (u32 block = 0; block < Cfg::kGroupBlocks; ++block) {
            const u32 row = rows.loaded + first_row<Cfg>(at, block);
            store_rows<Cfg, Cfg::kBlockN>(acc[block], out, rows, row, tile.n_tile * Cfg::kBlockN, at, smem);
        }
    }
}

// The tail for many tokens: [shared_act | y] times [shared_down | up slice]^T. K runs over the shared-down blocks
// first: they do not need y. Persistent: cluster c runs items c, c + clusters, ... `operands` is NoNorm where the norm
// is a launch of its own.
template <class Cfg, class Operands>
__device__ __forceinline__ void tail_gemm(
    const TailMaps& maps, const Operands& operands, const TailOutput& output, const Split& split,
    const Partials& partials, u32 num_tokens, u32 up_col0, u32 row_tiles, u64* wait_record) {
    static_assert(Cfg::kUpBlocks + Cfg::kDownBlocks == Cfg::kNumK, "up and down blocks make up K");
    const Watch watch{wait_record, Cfg::kProgramId};
    const u32 smem = smem_base();
    const u32 rank = cluster_ctarank();
    const auto norm = norm_of<Cfg>(operands, split, partials, num_tokens, row_tiles);
    chaos_begin(wait_record);
    set_up_ring<Cfg>(smem);
    if (warp_index() < Cfg::kMmaWarps) {
        setmaxnreg_inc<Cfg::kMmaRegisters>();
        const Matrix out{output.out, output.pitch, Cfg::kOutCols};
        if constexpr (Cfg::kFusedNorm) {
            // The routed rows are an earlier launch's, which may still read y too.
            griddepcontrol_wait();
            normalise_first<Cfg>(norm, warp_index(), lane_id());
        }
        multiply_and_store<Cfg>(split, row_tiles, num_tokens, rank, smem, out, partials, watch);
        griddepcontrol_launch_dependents();
    } else {
        setmaxnreg_dec<Cfg::kProducerRegisters>();
        if (threadIdx.x == Cfg::kMmaWarps * 32) {
            produce<Cfg>(maps, norm, split, row_tiles, num_tokens, up_col0, rank, smem, watch);
        }
        if constexpr (Cfg::kFusedNorm) {
            if (warp_index() > Cfg::kMmaWarps) {
                griddepcontrol_wait();
                normalise_others<Cfg>(norm, warp_index() - Cfg::kMmaWarps - 1, lane_id());
            }
        }
        warp_sync();
    }
    leave_together<Cfg>();
}

}  // namespace cake
