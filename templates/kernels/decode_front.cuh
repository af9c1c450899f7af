#pragma once

#include "device/base.cuh"
#include "device/grid.cuh"
#include "device/mbarrier.cuh"
#include "device/memory.cuh"
#include "device/tma.cuh"
#include "kernels/activation.cuh"
#include "kernels/decode_tile.cuh"
#include "kernels/front_operands.cuh"

namespace cake {

// Which weight rows a CTA multiplies: kBlockM from `row` on, of which it stores those from `first` on. A halved tile
// has kBlockM / 2 gate rows from `row` on and the matching up rows.
struct Tile {
    TileClass kind;
    u32 row;
    u32 first;
};

// The class of halved tiles; without a gate no tile is of it.
template <class Cfg>
inline constexpr TileClass kHalved = kGated<Cfg> ? TileClass::kShared : TileClass::kNone;

// Of narrow tiles the last of a class takes the last rows of the class: the part of a box that lies outside its tensor
// is filled with zeros, and slowly.
template <class Cfg>
__device__ __forceinline__ Tile tile_in(TileClass kind, u32 index, u32 rows, u32 class_rows) {
    const u32 first = index * rows;
    return {kind, kNarrow<Cfg> ? min(first, class_rows - rows) : first, first};
}

template <class Cfg>
__device__ __forceinline__ Tile tile_of(u32 index) {
    if (index < Cfg::kRouterTiles) {
        return tile_in<Cfg>(TileClass::kRouter, index, Cfg::kBlockM, Cfg::kRouterCols);
    }
    if (index < Cfg::kRouterTiles + Cfg::kLatentTiles) {
        return tile_in<Cfg>(TileClass::kLatent, index - Cfg::kRouterTiles, Cfg::kBlockM, Cfg::kLatentCols);
    }
    const u32 shared = index - Cfg::kRouterTiles - Cfg::kLatentTiles;
    return tile_in<Cfg>(TileClass::kShared, shared, kGated<Cfg> ? Cfg::kBlockM / 2 : Cfg::kBlockM, Cfg::kSharedCols);
}

// Ring units of a rank: rank 0 owns [0, kRank0Units), rank 1 the rest.
template <class Cfg>
__device__ __forceinline__ u32 unit_count(u32 rank) {
    if constexpr (Cfg::kClusterCtas == 2) {
        return rank == 0 ? Cfg::kRank0Units : Cfg::kRank1Units;
    } else {
        return Cfg::kRank0Units;
    }
}

template <class Cfg>
__device__ __forceinline__ void load_weights(const FrontMaps& maps, const Tile& tile, u32 a, u32 chunk, u32 barrier) {
    if constexpr (!kGated<Cfg>) {
        const TensorMap& shared_or_latent = tile.kind == TileClass::kShared ? maps.shared : maps.latent;
        const TensorMap& weights = tile.kind == TileClass::kRouter ? maps.router : shared_or_latent;
        tma_load_3d(a, weights, 0, tile.row, chunk, barrier);
    } else if (tile.kind == TileClass::kShared) {
        tma_load_3d(a, maps.shared, 0, tile.row, chunk, barrier);
        constexpr u32 kGateBytes = Cfg::kChunksPerStage * Cfg::kChunkABytes / 2;
        tma_load_3d(a + kGateBytes, maps.shared, 0, Cfg::kSharedCols + tile.row, chunk, barrier);
    } else {
        tma_load_3d(a, tile.kind == TileClass::kRouter ? maps.router : maps.latent, 0, tile.row, chunk, barrier);
    }
}

// The rows behind a stage's weights, which the second MMA of a shared tile reads: their sums are stored nowhere, but
// nothing else writes them.
template <class Cfg>
__device__ __forceinline__ void clear_pads(u32 smem) {
    for (u32 i = threadIdx.x; i < Cfg::kNumStages * Cfg::kPadBytes / 16; i += Cfg::kNumThreads) {
        const u32 stage = i / (Cfg::kPadBytes / 16);
        const u32 pad = smem + Cfg::kARingOffset + (stage + 1) * Cfg::kStageABytes - Cfg::kPadBytes;
        st_shared_v4(pad + i % (Cfg::kPadBytes / 16) * 16, Vec4{0, 0, 0, 0});
    }
    fence_proxy_async_shared();
}

// One lane streams this CTA's units, weights and tokens in one loop. Only the tokens depend on an earlier launch: the
// first `weights_ahead` stages of weights go ahead of the wait for it, and the first tokens queue behind them.
template <class Cfg>
__device__ __forceinline__ void produce(
    const FrontMaps& maps, const Tile& tile, u32 rank, u32 num_tokens, u32 weights_ahead, u32 smem,
    const Watch& watch) {
    const u32 first_row = first_loaded<Cfg>(num_tokens);
    const u32 tokens = loaded_tokens<Cfg>(num_tokens);
    const u32 stage_bytes = Cfg::kStageWeightBytes + Cfg::kChunksPerStage * tokens * (Cfg::kBlockK * 2);
    // A box that holds fewer rows than a chunk has room for can't hold two: the second would begin too early.
    const u32 box_chunks = tokens < Cfg::kNPad ? 1 : Cfg::kChunksPerStage;
    const u32 units = unit_count<Cfg>(rank);
    const u32 first_chunk = rank * Cfg::kRank0Units * Cfg::kChunksPerStage;
    const u32 ahead = min(weights_ahead, min(units, static_cast<u32>(Cfg::kNumStages)));
    for (u32 unit = 0; unit < ahead; ++unit) {
        const u32 full = smem + Cfg::kStageFullOffset + unit * 8;
        const u32 a = smem + Cfg::kARingOffset + unit * Cfg::kStageABytes;
        mbarrier_arrive_expect_tx(full, stage_bytes);
        load_weights<Cfg>(maps, tile, a, first_chunk + unit * Cfg::kChunksPerStage, full);
    }
    griddepcontrol_wait();
    Ring<Cfg> load;
    for (u32 unit = 0; unit < units; ++unit) {
        const u32 full = smem + Cfg::kStageFullOffset + load.stage * 8;
        const u32 b = smem + Cfg::kBRingOffset + load.stage * Cfg::kStageBBytes;
        const u32 chunk = first_chunk + unit * Cfg::kChunksPerStage;
        if (unit >= ahead) {
            const u32 a = smem + Cfg::kARingOffset + load.stage * Cfg::kStageABytes;
            mbarrier_wait(smem + Cfg::kStageEmptyOffset + load.stage * 8, load.phase ^ 1, watch);
            mbarrier_arrive_expect_tx(full, stage_bytes);
            load_weights<Cfg>(maps, tile, a, chunk, full);
        }
        for (u32 i = 0; i < Cfg::kChunksPerStage; i += box_chunks) {
            tma_load_3d(b + i * Cfg::kChunkBBytes, maps.x, 0, first_row, chunk + i, full);
        }
        load.advance();
    }
}

// Where the tile's first own row is staged: a narrow tile at the end of its class holds rows of the one before it too.
__device__ __forceinline__ u32 own_rows(u32 staging, const Tile& tile, u32 elem_bytes) {
    return staging + (tile.first - tile.row) * elem_bytes;
}

// fp32, unrounded. Four tokens of a quad stand 2 rows apart, so a warp's 32 stores hit 32 banks.
template <class Cfg>
__device__ __forceinline__ void store_router(
    const Sums<Cfg>& sums, const Tile& tile, const Fragment& at, u32 staging, const FrontOutputs& out,
    const TokenRange& tokens) {
    constexpr u32 kPitch = staging_pitch(Cfg::kBlockM * 4);
    chaos_point(staging);
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        if (!at.owns[half]) {
            continue;
        }
#pragma unroll
        for (u32 i = 0; i < Cfg::kFinalTokens / 2; ++i) {
            const u32 row = half_row<Cfg>(at, half) + 16 * at.warp + at.lane / 4 + 8 * ((i >> 1) & 1);
            const u32 token = 8 * (i >> 2) + 2 * (at.lane % 4) + (i & 1);
            st_shared_f32(staging + token * kPitch + row * 4, sums[half][i]);
        }
    }
    named_barrier_sync(Cfg::kMmaBarrier, 128);
    store_staged<Cfg::kBlockM, 4>(
        own_rows(staging, tile, 4), at.thread, out.logits, out.logits_pitch, tile.first, Cfg::kRouterCols, tokens);
}

template <class Cfg>
__device__ __forceinline__ void store_latent(
    const Sums<Cfg>& sums, const Tile& tile, const Fragment& at, u32 staging, const FrontOutputs& out,
    const TokenRange& tokens) {
    stage_tile<Cfg>(sums, at, staging);
    named_barrier_sync(Cfg::kMmaBarrier, 128);
    store_staged<Cfg::kBlockM, 2>(
        own_rows(staging, tile, 2), at.thread, out.latent, out.latent_pitch, tile.first, Cfg::kLatentCols, tokens);
}

// Every sum is one output.
template <class Cfg>
__device__ __forceinline__ void store_ungated(
    Sums<Cfg>& sums, const Tile& tile, const Fragment& at, u32 staging, const FrontOutputs& out,
    const TokenRange& tokens) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
#pragma unroll
        for (u32 i = 0; i < Cfg::kFinalTokens / 2; ++i) {
            sums[half][i] = Cfg::Activation::template of<Cfg>(sums[half][i]);
        }
    }
    stage_tile<Cfg>(sums, at, staging);
    named_barrier_sync(Cfg::kMmaBarrier, 128);
    store_staged<Cfg::kBlockM, 2>(
        own_rows(staging, tile, 2), at.thread, out.shared_act, out.shared_act_pitch, tile.first, Cfg::kSharedCols,
        tokens);
}

// The gate and the up value of one output sit in the same thread and register.
template <class Cfg>
__device__ __forceinline__ void store_gated(
    Sums<Cfg>& sums, const Tile& tile, const Fragment& at, u32 staging, const FrontOutputs& out,
    const TokenRange& tokens) {
#pragma unroll
    for (u32 i = 0; i < Cfg::kFinalTokens / 2; ++i) {
        sums[0][i] = Cfg::Activation::template of<Cfg>(sums[0][i], sums[1][i]);
    }
    constexpr u32 kPitch = staging_pitch(Cfg::kBlockM / 2 * 2);
    if (at.owns[0]) {
        stage_bf16<Cfg>(sums[0], at, staging, kPitch, 0);
    }
    named_barrier_sync(Cfg::kMmaBarrier, 128);
    store_staged<Cfg::kBlockM / 2, 2>(
        own_rows(staging, tile, 2), at.thread, out.shared_act, out.shared_act_pitch, tile.first, Cfg::kSharedCols,
        tokens);
}

template <class Cfg>
__device__ __forceinline__ void store_tile(
    Sums<Cfg>& sums, const Tile& tile, const Fragment& at, u32 staging, const FrontOutputs& out,
    const TokenRange& tokens) {
    if (tile.kind == TileClass::kRouter) {
        store_router<Cfg>(sums, tile, at, staging, out, tokens);
    } else if (tile.kind == TileClass::kLatent) {
        store_latent<Cfg>(sums, tile, at, staging, out, tokens);
    } else if constexpr (kGated<Cfg>) {
        store_gated<Cfg>(sums, tile, at, staging, out, tokens);
    } else {
        store_ungated<Cfg>(sums, tile, at, staging, out, tokens);
    }
}

}  // namespace cake
