#pragma once

#include "device/base.cuh"
#include "device/math.cuh"
#include "device/memory.cuh"
#include "device/stmatrix.cuh"
#include "kernels/gemm_tile_sm90.cuh"

namespace cake {

// A bf16 output matrix with a row pitch in elements.
struct Matrix {
    u16* base;
    u32 pitch;
    u32 cols;
};

// Stores 16 rows x kCols columns of one warp, a power of two from 8 to 64, rounded to bf16: through its own slab of
// shared memory, so that a row leaves as neighbouring 16-byte stores. `sums` holds the warp's fragment of these
// columns, from `row` on; rows that the tile does not store and columns past the matrix are dropped.
template <class Cfg, u32 kCols>
__device__ __forceinline__ void store_columns(
    const float* sums, const Matrix& out, const TokenRows& rows, u32 row, u32 column, const Fragment& at, u32 smem) {
    constexpr u32 kPitch = 64 * 2 + 16;   // 16 bytes more than a row: 8 rows of a matrix hit all banks
    constexpr u32 kRowLanes = kCols / 8;  // 16 bytes each
    constexpr u32 kRowsAtOnce = kRowLanes == 1 ? 16 : 32 / kRowLanes;
    const u32 slab = smem + Cfg::kStagingOffset + (at.group * 4 + at.warp) * (16 * kPitch);
    const u32 matrix = at.lane / 8;
    const u32 row_address = slab + (8 * (matrix % 2) + at.lane % 8) * kPitch + matrix / 2 * 16;
    warp_sync();
    if constexpr (kCols == 8) {
        stmatrix_x2(row_address, cvt_rn_bf16x2(sums[1], sums[0]), cvt_rn_bf16x2(sums[3], sums[2]));
    } else {
#pragma unroll
        for (u32 i = 0; i < kCols / 2; i += 8) {
            stmatrix_x4(
                row_address + 4 * i, cvt_rn_bf16x2(sums[i + 1], sums[i]), cvt_rn_bf16x2(sums[i + 3], sums[i + 2]),
                cvt_rn_bf16x2(sums[i + 5], sums[i + 4]), cvt_rn_bf16x2(sums[i + 7], sums[i + 6]));
        }
    }
    warp_sync();
    chaos_point(slab);
#pragma unroll
    for (u32 i = 0; i < 16 / kRowsAtOnce; ++i) {
        const u32 inner_row = i * kRowsAtOnce + at.lane / kRowLanes;
        const u32 inner_column = at.lane % kRowLanes * 8;
        const u32 first = column + inner_column;
        if (inner_row < 16 && rows.holds(row + inner_row) && first < out.cols) {
            const Vec4 value = ld_shared_v4(slab + inner_row * kPitch + inner_column * 2);
            st_global_v4(out.base + static_cast<u64>(row + inner_row) * out.pitch + first, value);
        }
    }
}

// The same for any multiple of 8 columns.
template <class Cfg, u32 kCols>
__device__ __forceinline__ void store_rows(
    const float* sums, const Matrix& out, const TokenRows& rows, u32 row, u32 column, const Fragment& at, u32 smem) {
    static_assert(kCols % 8 == 0, "a matrix of stmatrix has 8 columns");
    constexpr u32 kFirst = kCols >= 64 ? 64 : kCols >= 32 ? 32 : kCols >= 16 ? 16 : 8;
    store_columns<Cfg, kFirst>(sums, out, rows, row, column, at, smem);
    if constexpr (kCols > kFirst) {
        store_rows<Cfg, kCols - kFirst>(sums + kFirst / 2, out, rows, row, column + kFirst, at, smem);
    }
}

}  // namespace cake
