#pragma once

#include "device/base.cuh"
#include "device/math.cuh"
#include "device/memory.cuh"

namespace cake {

// RMSNorm of one row by one warp. The order of every sum is part of the contract, since the bits of y are.

// A lane owns the 16-byte vectors lane + 32 v of a row.
template <class Cfg>
struct RowVectors {
    u32 pairs[Cfg::kVectorsPerLane][4];
};

template <class Cfg>
__device__ __forceinline__ bool owns_vector(u32 lane, u32 v) {
    return Cfg::kRowVectors % 32 == 0 || lane + 32 * v < Cfg::kRowVectors;
}

template <class Cfg>
__device__ __forceinline__ RowVectors<Cfg> load_vectors(const u16* row, u32 lane) {
    RowVectors<Cfg> loaded;
#pragma unroll
    for (u32 v = 0; v < Cfg::kVectorsPerLane; ++v) {
        const Vec4 words = owns_vector<Cfg>(lane, v) ? ld_global_v4(row + (lane + 32 * v) * 8) : Vec4{0, 0, 0, 0};
        loaded.pairs[v][0] = words.x;
        loaded.pairs[v][1] = words.y;
        loaded.pairs[v][2] = words.z;
        loaded.pairs[v][3] = words.w;
    }
    return loaded;
}

// Adds the partials p = 1, 2, ... to partial 0 in fp32, in that order, and rounds once to bf16. `row` is partial 0's.
template <class Cfg>
__device__ __forceinline__ RowVectors<Cfg> add_partials(
    const RowVectors<Cfg>& first, const u16* row, u32 lane, u32 num_partials, u32 partial_stride) {
    float sums[Cfg::kVectorsPerLane][8];
#pragma unroll
    for (u32 v = 0; v < Cfg::kVectorsPerLane; ++v) {
#pragma unroll
        for (u32 word = 0; word < 4; ++word) {
            sums[v][2 * word] = bf16_low(first.pairs[v][word]);
            sums[v][2 * word + 1] = bf16_high(first.pairs[v][word]);
        }
    }
#pragma unroll 1
    for (u32 partial = 1; partial < num_partials; ++partial) {
        const RowVectors<Cfg> next = load_vectors<Cfg>(row + static_cast<u64>(partial) * partial_stride, lane);
#pragma unroll
        for (u32 v = 0; v < Cfg::kVectorsPerLane; ++v) {
#pragma unroll
            for (u32 word = 0; word < 4; ++word) {
                sums[v][2 * word] += bf16_low(next.pairs[v][word]);
                sums[v][2 * word + 1] += bf16_high(next.pairs[v][word]);
            }
        }
    }
    RowVectors<Cfg> rounded;
#pragma unroll
    for (u32 v = 0; v < Cfg::kVectorsPerLane; ++v) {
#pragma unroll
        for (u32 word = 0; word < 4; ++word) {
            rounded.pairs[v][word] = cvt_rn_bf16x2(sums[v][2 * word + 1], sums[v][2 * word]);
        }
    }
    return rounded;
}

// The bf16 sum of a row's partials. A single partial is bf16 already.
template <class Cfg>
__device__ __forceinline__ RowVectors<Cfg> sum_partials(
    const u16* row, u32 lane, u32 num_partials, u32 partial_stride) {
    const RowVectors<Cfg> first = load_vectors<Cfg>(row, lane);
    return num_partials == 1 ? first : add_partials<Cfg>(first, row, lane, num_partials, partial_stride);
}

// A lane adds its squares in ascending order; a bf16 squared is exact in fp32.
__device__ __forceinline__ float add_squares(float squares, const u32 (&pairs)[4]) {
#pragma unroll
    for (u32 word = 0; word < 4; ++word) {
        const float low = bf16_low(pairs[word]);
        const float high = bf16_high(pairs[word]);
        squares = fmaf(low, low, squares);
        squares = fmaf(high, high, squares);
    }
    return squares;
}

// 1 / sqrt(mean of squares + eps), with IEEE division and root: the 32 lanes' sums meet in a butterfly.
template <class Cfg>
__device__ __forceinline__ float reciprocal_root(float squares) {
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) {
        squares += shuffle_xor(squares, mask);
    }
    return div_rn(1.0f, sqrt_rn(div_rn(squares, static_cast<float>(Cfg::kLatentCols)) + Cfg::kNormEps));
}

template <class Cfg>
__device__ __forceinline__ float reciprocal_norm(const RowVectors<Cfg>& row) {
    float squares = 0.0f;
#pragma unroll
    for (u32 v = 0; v < Cfg::kVectorsPerLane; ++v) {
        squares = add_squares(squares, row.pairs[v]);
    }
    return reciprocal_root<Cfg>(squares);
}

// y = bf16(weight * bf16(r * scale)) for one vector.
__device__ __forceinline__ Vec4 scale_vector(const u32 (&pairs)[4], const u32 (&weights)[4], float scale) {
    u32 scaled[4];
#pragma unroll
    for (u32 word = 0; word < 4; ++word) {
        const u32 unit = cvt_rn_bf16x2(bf16_high(pairs[word]) * scale, bf16_low(pairs[word]) * scale);
        scaled[word] =
            cvt_rn_bf16x2(bf16_high(weights[word]) * bf16_high(unit), bf16_low(weights[word]) * bf16_low(unit));
    }
    return Vec4{scaled[0], scaled[1], scaled[2], scaled[3]};
}

// Stores a whole row of y.
template <class Cfg>
__device__ __forceinline__ void store_row(
    u16* y, const RowVectors<Cfg>& rounded, const RowVectors<Cfg>& weights, float scale, u32 lane) {
#pragma unroll
    for (u32 v = 0; v < Cfg::kVectorsPerLane; ++v) {
        if (owns_vector<Cfg>(lane, v)) {
            st_global_v4(y + (lane + 32 * v) * 8, scale_vector(rounded.pairs[v], weights.pairs[v], scale));
        }
    }
}

}  // namespace cake
