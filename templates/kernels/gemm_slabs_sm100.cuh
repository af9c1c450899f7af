#pragma once

#include "device/base.cuh"
#include "device/math.cuh"
#include "device/memory.cuh"
#include "device/tma.cuh"
#include "device/tma_store.cuh"
#include "kernels/gemm_sums_sm100.cuh"

namespace cake {

// The last tile of a cluster goes out through the drained ring: each warp has two slabs there, of 32 rows x 64 columns
// of either half of the tile, 128-byte rows with the 128-byte swizzle.
constexpr u32 kSlabBytes = 32 * 128;

template <class Cfg>
__device__ __forceinline__ u32 slab_of(u32 half, const Fragment& at, u32 smem) {
    return smem + Cfg::kStagesOffset + ((at.group * 4 + at.thread / 32) * 2 + half) * kSlabBytes;
}

template <class Cfg>
__device__ __forceinline__ void stage_bf16(u32 slab, u32 lane, u32 column, const float (&values)[kStepCols]) {
#pragma unroll
    for (u32 i = 0; i < kStepCols; i += 8) {
        const u32 unit = (column + i) / 8 ^ lane % 8;
        const Vec4 words{
            cvt_rn_bf16x2(values[i + 1], values[i]), cvt_rn_bf16x2(values[i + 3], values[i + 2]),
            cvt_rn_bf16x2(values[i + 5], values[i + 4]), cvt_rn_bf16x2(values[i + 7], values[i + 6])};
        st_shared_v4(slab + lane * 128 + unit * 16, words);
    }
}

// Rows and columns past the matrix are dropped by the copy.
template <class Cfg>
__device__ __forceinline__ void store_slabs(
    const TensorMap& out_map, u32 first_row, u32 first_column, const Fragment& at, u32 smem) {
    fence_proxy_async_shared();
    warp_sync();
    if (at.lane == 0) {
        const u32 row = first_row + at.thread;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 column = first_column + half * kHalfCols<Cfg> + at.group * kGroupCols<Cfg>;
            tma_store_3d(out_map, 0, row, column / 64, slab_of<Cfg>(half, at, smem));
        }
        bulk_commit_group();
        bulk_wait_group<0>();
    }
}

}  // namespace cake
