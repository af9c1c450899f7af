#pragma once

#include "device/base.cuh"
#include "device/grid.cuh"
#include "kernels/norm_row.cuh"

namespace cake {

template <class Cfg>
__device__ __forceinline__ void store_vectors(u16* row, const RowVectors<Cfg>& vectors, u32 lane) {
#pragma unroll
    for (u32 v = 0; v < Cfg::kVectorsPerLane; ++v) {
        if (owns_vector<Cfg>(lane, v)) {
            const u32(&words)[4] = vectors.pairs[v];
            st_global_v4(row + (lane + 32 * v) * 8, Vec4{words[0], words[1], words[2], words[3]});
        }
    }
}

// One warp adds up the partials of one row: kRowsPerCta rows a CTA, no shared memory. Its sum
// [num_tokens, kLatentCols] bf16 in global memory is read by the launch that follows in the stream.
template <class Cfg>
__device__ __forceinline__ void tail_sum(
    const u16* partials, u16* sum, u32 num_tokens, u32 num_partials, u32 partials_pitch, u32 partial_stride,
    u32 sum_pitch) {
    const u32 lane = lane_id();
    const u32 row = blockIdx.x * Cfg::kRowsPerCta + warp_index();
    if constexpr (Cfg::kEarlyTrigger) {
        griddepcontrol_launch_dependents();
    }
    griddepcontrol_wait();
    if (row < num_tokens) {
        const u16* source = partials + static_cast<u64>(row) * partials_pitch;
        u16* own = sum + static_cast<u64>(row) * sum_pitch;
        store_vectors<Cfg>(own, sum_partials<Cfg>(source, lane, num_partials, partial_stride), lane);
    }
    if constexpr (!Cfg::kEarlyTrigger) {
        griddepcontrol_launch_dependents();
    }
}

}  // namespace cake
