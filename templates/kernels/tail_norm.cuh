#pragma once

#include "device/base.cuh"
#include "device/grid.cuh"
#include "kernels/norm_row.cuh"

namespace cake {

// One warp normalises one row: kRowsPerCta rows a CTA, no shared memory. y [num_tokens, kLatentCols] bf16 in global
// memory is read by the launch that follows in the stream.
template <class Cfg>
__device__ __forceinline__ void tail_norm(
    const u16* routed, const u16* norm_weight, u16* y, u32 num_tokens, u32 num_partials, u32 routed_pitch,
    u32 routed_partial_stride, u32 y_pitch) {
    const u32 lane = lane_id();
    const u32 row = blockIdx.x * Cfg::kRowsPerCta + warp_index();
    if constexpr (Cfg::kEarlyTrigger) {
        griddepcontrol_launch_dependents();
    }
    griddepcontrol_wait();
    if (row < num_tokens) {
        const u16* source = routed + static_cast<u64>(row) * routed_pitch;
        u16* own = y + static_cast<u64>(row) * y_pitch;
        const RowVectors<Cfg> rounded = sum_partials<Cfg>(source, lane, num_partials, routed_partial_stride);
        const RowVectors<Cfg> weights = load_vectors<Cfg>(norm_weight, lane);
        store_row<Cfg>(own, rounded, weights, reciprocal_norm<Cfg>(rounded), lane);
    }
    if constexpr (!Cfg::kEarlyTrigger) {
        griddepcontrol_launch_dependents();
    }
}

}  // namespace cake
