#pragma once

#include "device/base.cuh"
#include "device/grid.cuh"
#include "device/math.cuh"
#include "device/mbarrier.cuh"
#include "device/memory.cuh"
#include "device/tma.cuh"
#include "kernels/gemm_sm100.cuh"
#include "kernels/norm_row.cuh"
#include "kernels/tail_operands.cuh"

namespace cake {

// A lane's vectors are taken so many at a time: a whole row's fp32 sums, or its weights beside it, are more registers
// than each of this many threads has.
constexpr u32 kPart = 4;

template <class Cfg>
__device__ __forceinline__ RowVectors<Cfg> sum_partials_in_parts(
    const u16* row, u32 lane, u32 num_partials, u32 partial_stride) {
    RowVectors<Cfg> rounded = load_vectors<Cfg>(row, lane);
    if (num_partials == 1) {
        return rounded;
    }
#pragma unroll
    for (u32 first = 0; first < Cfg::kVectorsPerLane; first += kPart) {
        const u32 end = min(first + kPart, static_cast<u32>(Cfg::kVectorsPerLane));
        float sums[kPart][8];
#pragma unroll
        for (u32 v = first; v < end; ++v) {
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                const u32 pair = rounded.pairs[v][i / 2];
                sums[v - first][i] = i % 2 == 0 ? bf16_low(pair) : bf16_high(pair);
            }
        }
#pragma unroll 1
        for (u32 partial = 1; partial < num_partials; ++partial) {
            const u16* source = row + static_cast<u64>(partial) * partial_stride;
#pragma unroll
            for (u32 v = first; v < end; ++v) {
                const Vec4 next =
                    owns_vector<Cfg>(lane, v) ? ld_global_v4(source + (lane + 32 * v) * 8) : Vec4{0, 0, 0, 0};
                const u32 pairs[4] = {next.x, next.y, next.z, next.w};
#pragma unroll
                for (u32 i = 0; i < 8; ++i) {
                    sums[v - first][i] += i % 2 == 0 ? bf16_low(pairs[i / 2]) : bf16_high(pairs[i / 2]);
                }
            }
        }
#pragma unroll
        for (u32 v = first; v < end; ++v) {
#pragma unroll
            for (u32 word = 0; word < 4; ++word) {
                rounded.pairs[v][word] = cvt_rn_bf16x2(sums[v - first][2 * word + 1], sums[v - first][2 * word]);
            }
        }
    }
    return rounded;
}

template <class Cfg>
__device__ __forceinline__ void store_row_in_parts(
    u16* y, const RowVectors<Cfg>& rounded, const u16* norm_weight, float scale, u32 lane) {
#pragma unroll
    for (u32 first = 0; first < Cfg::kVectorsPerLane; first += kPart) {
        const u32 end = min(first + kPart, static_cast<u32>(Cfg::kVectorsPerLane));
        u32 weights[kPart][4];
#pragma unroll
        for (u32 v = first; v < end; ++v) {
            const u16* source = norm_weight + (lane + 32 * v) * 8;
            const Vec4 words = owns_vector<Cfg>(lane, v) ? ld_global_v4(source) : Vec4{0, 0, 0, 0};
            weights[v - first][0] = words.x;
            weights[v - first][1] = words.y;
            weights[v - first][2] = words.z;
            weights[v - first][3] = words.w;
        }
#pragma unroll
        for (u32 v = first; v < end; ++v) {
            if (owns_vector<Cfg>(lane, v)) {
                st_global_v4(y + (lane + 32 * v) * 8, scale_vector(rounded.pairs[v], weights[v - first], scale));
            }
        }
    }
}

// A warp a row; this CTA's arrival at the counter publishes its norm. Each writer fences its generic writes for the
// copies that will read them; the barrier brings them to one thread, whose release covers all (PTX ISA 8.8).
template <class Cfg>
__device__ __forceinline__ void normalise(const NormOperands& norm, u32 num_tokens, u32 lane, u32 smem) {
    const u32 warp = warp_index() - Cfg::kFirstEpilogueWarp;
    for (u32 row = blockIdx.x + warp * gridDim.x; row < num_tokens; row += Cfg::kEpilogueWarps * gridDim.x) {
        const u16* source = norm.routed + static_cast<u64>(row) * norm.routed_pitch;
        const RowVectors<Cfg> rounded =
            sum_partials_in_parts<Cfg>(source, lane, norm.num_partials, norm.routed_partial_stride);
        const float scale = reciprocal_norm<Cfg>(rounded);
        chaos_point(row);
        store_row_in_parts<Cfg>(norm.y + static_cast<u64>(row) * norm.y_pitch, rounded, norm.norm_weight, scale, lane);
    }
    fence_proxy_async_global();
    named_barrier_sync(Cfg::kNormBarrier, Cfg::kEpilogueWarps * 32);
    if (warp == 0 && lane == 0) {
        atomic_inc_acq_rel_gpu(norm.counters, gridDim.x - 1);
        mbarrier_arrive(smem + Cfg::kRowsArrivedOffset);
    }
}

}  // namespace cake
