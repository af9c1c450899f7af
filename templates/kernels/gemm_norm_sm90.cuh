#pragma once

#include "device/base.cuh"
#include "device/grid.cuh"
#include "device/memory.cuh"
#include "device/tma.cuh"
#include "kernels/gemm_operands.cuh"
#include "kernels/gemm_tile_sm90.cuh"
#include "kernels/norm_row.cuh"
#include "kernels/tail_operands.cuh"

namespace cake {

// RMSNorm inside the GEMM: spare warps of every CTA normalise, and the producers wait for the rows that they copy.
// A pair row of tiles has a counter of its normalised rows. Behind the counters one word counts the CTAs that need them
// no more.
template <class Cfg>
constexpr u32 kPairRows = 2 * Cfg::kBlockM;

// What a norm of a single partial takes: rows with a pitch in elements, of which the first `first_rows` are normalised
// before any tile.
struct OnePartialNorm {
    const u16* routed;
    const u16* norm_weight;
    u16* y;
    u32 routed_pitch;
    u32 y_pitch;
    u32 first_rows;
};

struct GemmNorm {
    const u16* routed;
    const u16* weight;
    u16* y;
    u32 routed_pitch;
    u32 y_pitch;
    u32 num_tokens;
    u32 pair_rows;
    u32 first_rows;
    u32* counters;
};

// The norm's counters lie behind those of the segments.
template <class Cfg>
__device__ __forceinline__ GemmNorm
norm_of(const OnePartialNorm& norm, const Split& split, const Partials& partials, u32 num_tokens, u32 row_tiles) {
    u32* counters = partials.counters + split.sk_total / Cfg::kNumK * 2 * Cfg::kTileGroups;
    return {norm.routed, norm.norm_weight,    norm.y,          norm.routed_pitch, norm.y_pitch,
            num_tokens,  (row_tiles + 1) / 2, norm.first_rows, counters};
}

template <class Cfg>
__device__ __forceinline__ NoNorm norm_of(const NoNorm& norm, const Split&, const Partials&, u32, u32) {
    return norm;
}

// Some vectors of a row, each on its way at once. A lane gets zeros for those that it does not own.
template <class Cfg, u32 kCount>
__device__ __forceinline__ void load_group(u32 (&group)[kCount][4], const u16* row, u32 first, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) {
        const u32 v = first + i;
        const bool owned = v < Cfg::kVectorsPerLane && owns_vector<Cfg>(lane, v);
        const Vec4 words = owned ? ld_global_kept_v4(row + (lane + 32 * v) * 8) : Vec4{0, 0, 0, 0};
        group[i][0] = words.x;
        group[i][1] = words.y;
        group[i][2] = words.z;
        group[i][3] = words.w;
    }
}

// One row of one partial, held in registers.
template <class Cfg>
__device__ __forceinline__ void normalise_held(u16* y, const u16* source, const u16* weight, u32 lane) {
    const RowVectors<Cfg> rounded = load_vectors<Cfg>(source, lane);
    const RowVectors<Cfg> weights = load_vectors<Cfg>(weight, lane);
    store_row<Cfg>(y, rounded, weights, reciprocal_norm<Cfg>(rounded), lane);
}

// The same in few registers: the row is read twice, the second time, it is hoped, from L1.
template <class Cfg>
__device__ __forceinline__ void normalise_reread(u16* y, const u16* source, const u16* weight, u32 lane) {
    constexpr u32 kSummed = 7;
    constexpr u32 kScaled = 4;
    float squares = 0.0f;
#pragma unroll 1
    for (u32 first = 0; first < Cfg::kVectorsPerLane; first += kSummed) {
        u32 group[kSummed][4];
        load_group<Cfg>(group, source, first, lane);
#pragma unroll
        for (u32 i = 0; i < kSummed; ++i) {
            squares = add_squares(squares, group[i]);
        }
    }
    const float scale = reciprocal_root<Cfg>(squares);
#pragma unroll 1
    for (u32 first = 0; first < Cfg::kVectorsPerLane; first += kScaled) {
        u32 group[kScaled][4];
        u32 weights[kScaled][4];
        load_group<Cfg>(group, source, first, lane);
        load_group<Cfg>(weights, weight, first, lane);
#pragma unroll
        for (u32 i = 0; i < kScaled; ++i) {
            const u32 v = first + i;
            if (v < Cfg::kVectorsPerLane && owns_vector<Cfg>(lane, v)) {
                st_global_v4(y + (lane + 32 * v) * 8, scale_vector(group[i], weights[i], scale));
            }
        }
    }
}

// Rows `first`, `first + step`, ... before `end`, by one warp. Each lane fences its writes for the copies that will
// read them; the warp's barrier brings them to one lane, whose release covers all (PTX ISA 8.8).
template <class Cfg, bool kHeld>
__device__ __forceinline__ void normalise_rows(const GemmNorm& norm, u32 first, u32 end, u32 step, u32 lane) {
#pragma unroll 1
    for (u32 row = first; row < end; row += step) {
        const u16* source = norm.routed + static_cast<u64>(row) * norm.routed_pitch;
        u16* y = norm.y + static_cast<u64>(row) * norm.y_pitch;
        if (row + step < end && lane == 0) {
            bulk_prefetch_l2(source + static_cast<u64>(step) * norm.routed_pitch, Cfg::kLatentCols * 2);
        }
        chaos_point(row);
        if constexpr (kHeld) {
            normalise_held<Cfg>(y, source, norm.weight, lane);
        } else {
            normalise_reread<Cfg>(y, source, norm.weight, lane);
        }
        fence_proxy_async_global();
        warp_sync();
        if (lane == 0) {
            reduce_add_release_gpu(norm.counters + row / kPairRows<Cfg>, 1);
        }
    }
}

// The first rows are the MMA warps', before their first tile: the first tiles want them soonest, and there is nothing
// to multiply yet. Rows lie over all CTAs, so that they are done about in their order.
template <class Cfg>
__device__ __forceinline__ void normalise_first(const GemmNorm& norm, u32 mma_warp, u32 lane) {
    const u32 end = min(norm.first_rows, norm.num_tokens);
    normalise_rows<Cfg, true>(norm, mma_warp * gridDim.x + blockIdx.x, end, Cfg::kMmaWarps * gridDim.x, lane);
}

// The others are normalised while the MMA warps multiply.
template <class Cfg>
__device__ __forceinline__ void normalise_others(const GemmNorm& norm, u32 norm_warp, u32 lane) {
    const u32 first = norm.first_rows + norm_warp * gridDim.x + blockIdx.x;
    normalise_rows<Cfg, false>(norm, first, norm.num_tokens, Cfg::kNormWarps * gridDim.x, lane);
}

// Until the rows that a tile of a pair row loads are in y. All CTAs are resident and those that normalise wait for no
// tile, so the rows come. `known` is the pair row that the caller has waited for last. The first row tile of the last
// pair row may load rows of the pair row before; the second may not: it stores a row at least, so it begins less than
// kBlockM rows in front of its first one, which lies kBlockM rows behind the pair row's. The fence takes the acquired
// writes over to the copies.
template <class Cfg>
__device__ __forceinline__ void wait_for_rows(
    const GemmNorm& norm, const TokenRows& tile, u32 last, u32& known, const Watch& watch) {
    if (last == known) {
        return;
    }
    for (u32 pair_row = tile.loaded / kPairRows<Cfg>; pair_row <= last; ++pair_row) {
        const u32 rows = min(kPairRows<Cfg>, norm.num_tokens - pair_row * kPairRows<Cfg>);
        if (pair_row != known) {
            counter_wait_reached(norm.counters + pair_row, rows, watch);
        }
    }
    known = last;
    fence_proxy_async_global();
}

// The last CTA to need no more rows leaves all counters at 0 for the next launch.
__device__ __forceinline__ void retire_counters(const GemmNorm& norm) {
    u32* left = norm.counters + norm.pair_rows;
    if (atomic_inc_acq_rel_gpu(left, gridDim.x - 1) == gridDim.x - 1) {
        for (u32 pair_row = 0; pair_row < norm.pair_rows; ++pair_row) {
            st_relaxed_gpu(norm.counters + pair_row, 0);
        }
    }
}

}  // namespace cake
