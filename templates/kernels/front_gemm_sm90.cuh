#pragma once

#include "device/base.cuh"
#include "device/cluster.cuh"
#include "device/grid.cuh"
#include "device/memory.cuh"
#include "device/wgmma.cuh"
#include "kernels/front_columns.cuh"
#include "kernels/gemm_load_sm90.cuh"
#include "kernels/gemm_segments_sm90.cuh"
#include "kernels/gemm_sm90.cuh"
#include "kernels/gemm_store_sm90.cuh"

namespace cake {

// The first half of a gated tile is gate rows and the second their up rows, so that column c and column
// c + kBlockN / 2 of the accumulator belong together.
template <class Cfg>
__device__ __forceinline__ WeightRows weights_of(const FrontMaps& maps, const Columns& columns) {
    if (columns.kind == TileClass::kShared) {
        return {&maps.shared, columns.first, kGated<Cfg> ? Cfg::kSharedCols : Cfg::kBlockN / 2};
    }
    return {columns.kind == TileClass::kRouter ? &maps.router : &maps.latent, columns.first, Cfg::kBlockN / 2};
}

template <class Cfg>
__device__ __forceinline__ void produce(
    const FrontMaps& maps, const Split& split, u32 row_tiles, u32 num_tokens, u32 rank, u32 smem, const Watch& watch) {
    griddepcontrol_wait();
    WorkList<Cfg> list(split, blockIdx.x / 2, gridDim.x / 2);
    Ring<Cfg> load;
    Work work;
    while (list.next(work)) {
        const CtaTile tile = tile_of<Cfg>(work.tile, row_tiles, rank);
        const WeightRows weights = weights_of<Cfg>(maps, columns_of<Cfg>(tile.n_tile));
        const TokenRows rows = rows_of<Cfg>(tile.row_tile, num_tokens);
        for (u32 k = work.k_begin; k < work.k_end; ++k) {
            expect_stage<Cfg>(load, rows.any(), smem, watch);
            const StageBoxes to = boxes_of<Cfg>(load, smem);
            load_tokens(maps.x, tile, rows, {0, k}, k, rank, to);
            load_weights<Cfg>(weights, tile, {0, k}, rank, to);
            load.advance();
        }
    }
}

// fp32, unrounded, straight from the registers: a quad of lanes writes 32 neighbouring bytes.
template <class Cfg>
__device__ __forceinline__ void store_router(
    const BlockSums<Cfg>& acc, const FrontOutputs& out, const TokenRows& rows, u32 row, u32 column,
    const Fragment& at) {
#pragma unroll
    for (u32 i = 0; i < Cfg::kBlockN / 2; i += 2) {
        const u32 token = row + at.lane / 4 + 8 * ((i >> 1) & 1);
        const u32 expert = column + 8 * (i >> 2) + 2 * (at.lane % 4);
        if (rows.holds(token) && expert < Cfg::kRouterCols) {
            st_global_v2_f32(out.logits + static_cast<u64>(token) * out.logits_pitch + expert, acc[i], acc[i + 1]);
        }
    }
}

template <class Cfg>
__device__ __forceinline__ Matrix latent_of(const FrontOutputs& out) {
    return {out.latent, out.latent_pitch, Cfg::kLatentCols};
}

template <class Cfg>
__device__ __forceinline__ Matrix shared_act_of(const FrontOutputs& out) {
    return {out.shared_act, out.shared_act_pitch, Cfg::kSharedCols};
}

template <class Cfg>
__device__ __forceinline__ void store_block(
    BlockSums<Cfg>& acc, const Columns& columns, const FrontOutputs& out, const TokenRows& rows, u32 row,
    const Fragment& at, u32 smem) {
    if (columns.kind == TileClass::kRouter) {
        store_router<Cfg>(acc, out, rows, row, columns.first, at);
    } else if (columns.kind == TileClass::kLatent) {
        store_rows<Cfg, Cfg::kBlockN>(acc, latent_of<Cfg>(out), rows, row, columns.first, at, smem);
    } else if constexpr (!kGated<Cfg>) {
#pragma unroll
        for (u32 i = 0; i < Cfg::kBlockN / 2; ++i) {
            acc[i] = Cfg::Activation::template of<Cfg>(acc[i]);
        }
        store_rows<Cfg, Cfg::kBlockN>(acc, shared_act_of<Cfg>(out), rows, row, columns.first, at, smem);
    } else {
        // The up value of a gate value sits half a tile of columns further, in the same thread.
#pragma unroll
        for (u32 i = 0; i < Cfg::kBlockN / 4; ++i) {
            acc[i] = Cfg::Activation::template of<Cfg>(acc[i], acc[i + Cfg::kBlockN / 4]);
        }
        store_rows<Cfg, Cfg::kBlockN / 2>(acc, shared_act_of<Cfg>(out), rows, row, columns.first, at, smem);
    }
}

template <class Cfg>
__device__ __forceinline__ void multiply_and_store(
    const Split& split, u32 row_tiles, u32 num_tokens, u32 rank, u32 smem, const FrontOutputs& out,
    const Partials& partials, const Watch& watch) {
    const u32 warp = warp_index();
    const Fragment at{warp / 4, threadIdx.x % 128, warp % 4, lane_id()};
    // An earlier launch may still read the outputs, or use the partials, until it has completed.
    griddepcontrol_wait();
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
        if (work.num_segments > 1 && !finish_segments<Cfg>(acc, work, split, partials, rank, at, smem)) {
            continue;
        }
#pragma unroll
        for (u32 block = 0; block < Cfg::kGroupBlocks; ++block) {
            const u32 row = rows.loaded + first_row<Cfg>(at, block);
            store_block<Cfg>(acc[block], columns_of<Cfg>(tile.n_tile), out, rows, row, at, smem);
        }
    }
}

// The front for many tokens: x [num_tokens, hidden] times [gate; down; shared gate | up]^T. Persistent: cluster c runs
// items c, c + clusters, ...
template <class Cfg>
__device__ __forceinline__ void front_gemm(
    const FrontMaps& maps, const FrontOutputs& out, const Split& split, const Partials& partials, u32 num_tokens,
    u32 row_tiles, u64* wait_record) {
    const Watch watch{wait_record, Cfg::kProgramId};
    const u32 smem = smem_base();
    const u32 rank = cluster_ctarank();
    chaos_begin(wait_record);
    set_up_ring<Cfg>(smem);
    if (warp_index() < Cfg::kMmaWarps) {
        setmaxnreg_inc<Cfg::kMmaRegisters>();
        multiply_and_store<Cfg>(split, row_tiles, num_tokens, rank, smem, out, partials, watch);
        griddepcontrol_launch_dependents();
    } else {
        setmaxnreg_dec<Cfg::kProducerRegisters>();
        if (threadIdx.x == Cfg::kMmaWarps * 32) {
            produce<Cfg>(maps, split, row_tiles, num_tokens, rank, smem, watch);
        }
        warp_sync();
    }
    leave_together<Cfg>();
}

}  // namespace cake
