#pragma once

#include "device/base.cuh"
#include "device/math.cuh"
#include "device/memory.cuh"
#include "device/wide_store.cuh"
#include "kernels/gemm_sums_sm100.cuh"

namespace cake {

// 32 bytes of a row: one store where rows begin at multiples of 32 bytes, else two.
__device__ __forceinline__ void store_words(void* address, const u32 (&words)[8]) {
    if (reinterpret_cast<u64>(address) % 32 == 0) {
        st_global_v8(address, words);
    } else {
        st_global_v4(address, Vec4{words[0], words[1], words[2], words[3]});
        st_global_v4(static_cast<u8*>(address) + 16, Vec4{words[4], words[5], words[6], words[7]});
    }
}

// kStepCols columns of a row, rounded to bf16.
__device__ __forceinline__ void store_bf16(u16* address, const float (&values)[kStepCols]) {
    u32 words[8];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        words[i] = cvt_rn_bf16x2(values[2 * i + 1], values[2 * i]);
    }
    store_words(address, words);
}

// The same from `column` on; columns past `cols` are dropped, by whole groups of 8.
__device__ __forceinline__ void store_bf16_within(u16* row, u32 column, u32 cols, const float (&values)[kStepCols]) {
    if (column + kStepCols <= cols) {
        store_bf16(row + column, values);
    } else if (column < cols) {
        st_global_v4(
            row + column, Vec4{
                              cvt_rn_bf16x2(values[1], values[0]), cvt_rn_bf16x2(values[3], values[2]),
                              cvt_rn_bf16x2(values[5], values[4]), cvt_rn_bf16x2(values[7], values[6])});
    }
}

}  // namespace cake
