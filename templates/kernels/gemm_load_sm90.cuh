#pragma once

#include "device/base.cuh"
#include "device/mbarrier.cuh"
#include "device/tma.cuh"
#include "kernels/gemm_tile_sm90.cuh"

namespace cake {

// The next stage, to be filled with both halves of the weights and, if the tile has any, the tokens.
template <class Cfg>
__device__ __forceinline__ void expect_stage(const Ring<Cfg>& load, bool has_tokens, u32 smem, const Watch& watch) {
    mbarrier_wait(smem + Cfg::kStageEmptyOffset + load.stage * 8, load.phase ^ 1, watch);
    const u32 bytes = has_tokens ? Cfg::kStageBytes : Cfg::kStageBytes - Cfg::kStageABytes;
    mbarrier_arrive_expect_tx(smem + Cfg::kStageFullOffset + load.stage * 8, bytes);
}

// Where a stage's boxes land, and the barrier that gets their bytes.
struct StageBoxes {
    u32 tokens;
    u32 weights;
    u32 full;
};

template <class Cfg>
__device__ __forceinline__ StageBoxes boxes_of(const Ring<Cfg>& load, u32 smem) {
    const u32 tokens = smem + Cfg::kStagesOffset + load.stage * Cfg::kStageBytes;
    return {tokens, tokens + Cfg::kStageABytes, smem + Cfg::kStageFullOffset + load.stage * 8};
}

// Which columns of a matrix: chunks of kBlockK, or columns of a map that is not in chunks.
struct BlockColumns {
    u32 column;
    u32 chunk;
};

// The tokens of K block `k`, if the tile has any. CTAs that share them load every other block for both.
__device__ __forceinline__ void load_tokens(
    const TensorMap& map, const CtaTile& tile, const TokenRows& rows, const BlockColumns& at, u32 k, u32 rank,
    const StageBoxes& to) {
    if (tile.shares_tokens) {
        if (k % 2 == rank) {
            tma_load_3d_multicast(to.tokens, map, at.column, rows.loaded, at.chunk, to.full, 3);
        }
    } else if (rows.any()) {
        tma_load_3d(to.tokens, map, at.column, rows.loaded, at.chunk, to.full);
    }
}

// A tile's rows of a weight matrix; the second half of them begins `half_rows` behind the first.
struct WeightRows {
    const TensorMap* map;
    u32 first;
    u32 half_rows;
};

// One K block of them: both halves, or this rank's for both CTAs.
template <class Cfg>
__device__ __forceinline__ void load_weights(
    const WeightRows& rows, const CtaTile& tile, const BlockColumns& at, u32 rank, const StageBoxes& to) {
    if (tile.shares_tokens) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 row = rows.first + half * rows.half_rows;
            tma_load_3d(to.weights + half * Cfg::kHalfBBytes, *rows.map, at.column, row, at.chunk, to.full);
        }
    } else {
        const u32 row = rows.first + rank * rows.half_rows;
        tma_load_3d_multicast(to.weights + rank * Cfg::kHalfBBytes, *rows.map, at.column, row, at.chunk, to.full, 3);
    }
}

}  // namespace cake
