#pragma once

#include "device/base.cuh"
#include "device/math.cuh"
#include "device/mbarrier.cuh"
#include "device/memory.cuh"
#include "device/stmatrix.cuh"
#include "kernels/barriers.cuh"
#include "kernels/ring.cuh"

namespace cake {

// Accumulators of one thread: two halves of 64 weight rows (a shared tile: gate rows, then up rows). On Hopper each
// half is an MMA's; on Blackwell each is 16 of the 32 rows that the thread's warp reads from tensor memory.
template <class Cfg>
using Accumulators = float[2][Cfg::kNPad / 2];

// Sums that a CTA stores: of all tokens, or of its half of them after the pair's exchange.
template <class Cfg>
using Sums = float[2][Cfg::kFinalTokens / 2];

// A tile of fewer rows than its two MMAs, which overlap in the rows between.
template <class Cfg>
constexpr bool kNarrow = Cfg::kBlockM < 128;

// The thread's position in the tile: fixes which accumulator is which output (see wgmma_m64_k16 and
// tensor_memory_load_16x256b).
struct Fragment {
    u32 thread;  // 0 to 127
    u32 warp;    // 0 to 3
    u32 lane;
    bool owns[2] = {true, true};  // whether the warp's 16 rows of each half are the tile's, and no other warp's
    u32 second = 0;  // of a narrow tile: by how many threads the second half's sums land behind the first one's
};

// Where the rows of a half begin, in a tile that is not a shared one; a warp's are the 16 from there + 16 * warp on.
template <class Cfg>
__device__ __forceinline__ u32 half_row(const Fragment& at, u32 half) {
    return Cfg::kHalfRows * half + (Cfg::kWarpRows - 16) * at.warp;
}

// After the last initialisation. Where sums land, their bytes are expected before the partner can store any.
template <class Cfg>
__device__ __forceinline__ void publish_barriers(u32 rank, u32 smem) {
    fence_mbarrier_init();
    if constexpr (Cfg::kClusterCtas == 2) {
        if (rank == 0 || Cfg::kSplitFinalize) {
            mbarrier_arrive_expect_tx(smem + Cfg::kPartnerSumOffset, Cfg::kLandingBytes);
        }
    }
}

// Tokens that a CTA loads: the whole box where kTokenParts is 0, else its part of the request's. The CTAs of a tile
// load as many each; of an odd number the last one's box has a row past the end, of zeros.
template <class Cfg>
__device__ __forceinline__ u32 loaded_tokens(u32 num_tokens) {
    if constexpr (Cfg::kTokenParts == 0) {
        return Cfg::kNPad;
    } else {
        return (num_tokens + Cfg::kTokenParts - 1) / Cfg::kTokenParts;
    }
}

// The first of them.
template <class Cfg>
__device__ __forceinline__ u32 first_loaded(u32 num_tokens) {
    if constexpr (Cfg::kTokenParts > 1) {
        return blockIdx.x % Cfg::kTokenParts * loaded_tokens<Cfg>(num_tokens);
    } else {
        return 0;
    }
}

// The tokens that a CTA stores: all, its half of a pair's, or those that it has loaded.
struct TokenRange {
    u32 first;
    u32 count;
};

template <class Cfg>
__device__ __forceinline__ TokenRange final_tokens(u32 rank, u32 num_tokens) {
    if constexpr (Cfg::kTokenParts > 1) {
        const u32 first = first_loaded<Cfg>(num_tokens);
        return {first, num_tokens > first ? min(num_tokens - first, loaded_tokens<Cfg>(num_tokens)) : 0};
    } else {
        const u32 first = Cfg::kFinalTokens < Cfg::kNPad ? rank * Cfg::kFinalTokens : 0;
        return {first, num_tokens > first ? min(num_tokens - first, static_cast<u32>(Cfg::kFinalTokens)) : 0};
    }
}

// Output rows are staged over the drained ring as [token][weight row], then leave in 16-byte stores. The pitch is 16
// bytes more than a row, which spreads 8 tokens over all banks.
__device__ constexpr u32 staging_pitch(u32 row_bytes) {
    return row_bytes + 16;
}

// Rounds the thread's sums of a half to bf16 and stages them; `first_row` is warp 0's first weight row. Matrix
// (g, h) of the fragment holds rows 8 h .. + 7 of them, of tokens 8 g .. + 7; stored transposed, a row of memory is one
// token.
template <class Cfg>
__device__ __forceinline__ void stage_bf16(
    const float (&sums)[Cfg::kFinalTokens / 2], const Fragment& at, u32 staging, u32 pitch_bytes, u32 first_row) {
    const u32 matrix = at.lane / 8;
    const u32 column = (first_row + 16 * at.warp + 8 * (matrix % 2)) * 2;
    const u32 row_address = staging + (8 * (matrix / 2) + at.lane % 8) * pitch_bytes + column;
    chaos_point(staging);
    if constexpr (Cfg::kFinalTokens == 8) {
        const u32 first = staging + (at.lane % 8) * pitch_bytes + column;
        stmatrix_x2_trans(first, cvt_rn_bf16x2(sums[1], sums[0]), cvt_rn_bf16x2(sums[3], sums[2]));
    } else {
#pragma unroll
        for (u32 i = 0; i < Cfg::kFinalTokens / 2; i += 8) {
            stmatrix_x4_trans(
                row_address + 2 * i * pitch_bytes, cvt_rn_bf16x2(sums[i + 1], sums[i]),
                cvt_rn_bf16x2(sums[i + 3], sums[i + 2]), cvt_rn_bf16x2(sums[i + 5], sums[i + 4]),
                cvt_rn_bf16x2(sums[i + 7], sums[i + 6]));
        }
    }
}

// Copies the staged rows of `tokens` to `out` (element column `column`; columns from `column_end` on belong to no
// output). The 128 threads write 16 bytes each, neighbours side by side.
template <u32 kRowElems, u32 kElemBytes>
__device__ __forceinline__ void store_staged(
    u32 staging, u32 thread, void* out, u32 pitch_elems, u32 column, u32 column_end, const TokenRange& tokens) {
    constexpr u32 kVecElems = 16 / kElemBytes;
    constexpr u32 kVecsPerRow = kRowElems / kVecElems;
    chaos_point(staging + 1);
    for (u32 i = thread; i < tokens.count * kVecsPerRow; i += 128) {
        const u32 token = i / kVecsPerRow;
        const u32 vec = i % kVecsPerRow;
        const u32 first = column + vec * kVecElems;
        if (first < column_end) {
            const Vec4 value = ld_shared_v4(staging + token * staging_pitch(kRowElems * kElemBytes) + vec * 16);
            const u64 element = static_cast<u64>(tokens.first + token) * pitch_elems + first;
            st_global_v4(static_cast<u8*>(out) + element * kElemBytes, value);
        }
    }
}

// A whole tile's sums of bf16 outputs, staged.
template <class Cfg>
__device__ __forceinline__ void stage_tile(const Sums<Cfg>& sums, const Fragment& at, u32 staging) {
    constexpr u32 kPitch = staging_pitch(Cfg::kBlockM * 2);
    stage_bf16<Cfg>(sums[0], at, staging, kPitch, half_row<Cfg>(at, 0));
    if (at.owns[1]) {
        stage_bf16<Cfg>(sums[1], at, staging, kPitch, half_row<Cfg>(at, 1));
    }
}

}  // namespace cake
