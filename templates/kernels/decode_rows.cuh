#pragma once

#include "device/base.cuh"
#include "device/grid.cuh"
#include "device/mbarrier.cuh"
#include "device/memory.cuh"
#include "device/tma.cuh"
#include "kernels/decode_tail.cuh"
#include "kernels/norm_row.cuh"

namespace cake {

// One row, or the norm weight, from its staged copy: a single partial, already bf16.
template <class Cfg>
__device__ __forceinline__ RowVectors<Cfg> load_staged(u32 row_offset, u32 lane, u32 smem) {
    RowVectors<Cfg> loaded;
#pragma unroll
    for (u32 v = 0; v < Cfg::kVectorsPerLane; ++v) {
        const u32 source = smem + row_offset + (lane + 32 * v) * 16;
        const Vec4 words = owns_vector<Cfg>(lane, v) ? ld_shared_v4(source) : Vec4{0, 0, 0, 0};
        loaded.pairs[v][0] = words.x;
        loaded.pairs[v][1] = words.y;
        loaded.pairs[v][2] = words.z;
        loaded.pairs[v][3] = words.w;
    }
    return loaded;
}

template <class Cfg>
__device__ __forceinline__ RowVectors<Cfg> load_row(const NormOperands& norm, u32 row, u32 lane, u32 smem) {
    if constexpr (Cfg::kStagedRows) {
        return load_staged<Cfg>(Cfg::kStagedRowsOffset + row * Cfg::kLatentCols * 2, lane, smem);
    } else {
        const u16* source = norm.routed + static_cast<u64>(row) * norm.routed_pitch;
        return sum_partials<Cfg>(source, lane, norm.num_partials, norm.routed_partial_stride);
    }
}

// All vectors at once, on their way while the row's statistics are taken: one at a time, each would wait for the
// last.
template <class Cfg>
__device__ __forceinline__ RowVectors<Cfg> load_weights(const NormOperands& norm, u32 lane, u32 smem) {
    if constexpr (Cfg::kStagedRows) {
        return load_staged<Cfg>(Cfg::kNormWeightOffset, lane, smem);
    } else {
        return load_vectors<Cfg>(norm.norm_weight, lane);
    }
}

// The producer's gate, where there is one: a warp arrives once, when its first row's loads are on their way, or when it
// turns out to have no row.
template <class Cfg>
struct RowIssues {
    bool arrived = false;

    __device__ __forceinline__ void row_is_issued(u32 lane, u32 smem) {
        if constexpr (Cfg::kIssueGate) {
            if (!arrived && lane == 0) {
                mbarrier_arrive(smem + Cfg::kRowsIssuedOffset);
            }
            arrived = true;
        }
    }
};

// Rows past num_tokens, and columns past a ragged slice, must be zeros.
template <class Cfg>
__device__ __forceinline__ void clear_resident(const Share& share, u32 norm_thread, u32 smem) {
    const u32 bytes = share.up * Cfg::kStageBBytes;
    for (u32 offset = norm_thread * 16; offset < bytes; offset += Cfg::kNormWarps * 32 * 16) {
        st_shared_v4(smem + Cfg::kResidentBOffset + offset, Vec4{0, 0, 0, 0});
    }
    named_barrier_sync(Cfg::kNormBarrier, Cfg::kNormWarps * 32);
}

// Writes the vectors of y that fall into this CTA's up chunks where the MMA reads them: K-major chunks of 64 columns,
// 128-byte rows, 128-byte swizzle (bits 4 to 6 of the offset xor bits 7 to 9, PTX ISA 5.5.7).
template <class Cfg>
__device__ __forceinline__ void store_resident(
    u32 up_col0, const Share& share, u32 row, const RowVectors<Cfg>& rounded, const RowVectors<Cfg>& weights,
    float scale, u32 lane, u32 smem) {
#pragma unroll
    for (u32 v = 0; v < Cfg::kVectorsPerLane; ++v) {
        const u32 column = (lane + 32 * v) * 8 - up_col0;            // in the slice; wraps below it
        const u32 local = column - share.first_up * Cfg::kUnitCols;  // in the share; wraps below it
        if (owns_vector<Cfg>(lane, v) && column < Cfg::kUpCols && local < share.up * Cfg::kUnitCols) {
            const u32 offset = row * 128 + local % Cfg::kBlockK * 2;
            const u32 swizzled = offset ^ ((offset >> 7 & 7) << 4);
            const u32 chunk = smem + Cfg::kResidentBOffset + local / Cfg::kBlockK * Cfg::kChunkBBytes;
            st_shared_v4(chunk + swizzled, scale_vector(rounded.pairs[v], weights.pairs[v], scale));
        }
    }
}

// Every CTA normalises all rows for its own up chunks; row r goes to the y workspace from CTA r modulo the grid.
template <class Cfg>
__device__ __forceinline__ void normalise_resident(
    const NormOperands& norm, u32 num_tokens, u32 up_col0, u32 norm_warp, u32 lane, u32 rank, u32 smem,
    const Watch& watch) {
    const Share share = share_of<Cfg>(rank);
    const u32 norm_thread = norm_warp * 32 + lane;
    clear_resident<Cfg>(share, norm_thread, smem);
    griddepcontrol_wait();
    if constexpr (Cfg::kStagedRows) {
        mbarrier_wait(smem + Cfg::kRowsStagedOffset, 0, watch);
    }
    RowIssues<Cfg> issues;
    for (u32 row = norm_warp; row < num_tokens; row += Cfg::kNormWarps) {
        const RowVectors<Cfg> rounded = load_row<Cfg>(norm, row, lane, smem);
        const RowVectors<Cfg> weights = load_weights<Cfg>(norm, lane, smem);
        issues.row_is_issued(lane, smem);
        const float scale = reciprocal_norm<Cfg>(rounded);
        chaos_point(row);
        store_resident<Cfg>(up_col0, share, row, rounded, weights, scale, lane, smem);
        if (row % Cfg::kGridCtas == blockIdx.x) {
            store_row<Cfg>(norm.y + static_cast<u64>(row) * norm.y_pitch, rounded, weights, scale, lane);
        }
    }
    issues.row_is_issued(lane, smem);
    fence_proxy_async_shared();
    named_barrier_sync(Cfg::kNormBarrier, Cfg::kNormWarps * 32);
    if (norm_thread == 0) {
        mbarrier_arrive(smem + Cfg::kYResidentOffset);
    }
}

// CTA c normalises rows c, c + grid, ...; its arrival at the counter publishes them. Each writer fences its generic
// writes for the copies that will read them; the barrier brings them to one thread, whose release covers all (PTX
// ISA 8.8).
template <class Cfg>
__device__ __forceinline__ void normalise_shared(
    const NormOperands& norm, u32 num_tokens, u32 norm_warp, u32 lane, u32 smem) {
    griddepcontrol_wait();
    RowIssues<Cfg> issues;
    constexpr u32 kRowStep = Cfg::kNormWarps * Cfg::kGridCtas;
    for (u32 row = blockIdx.x + norm_warp * Cfg::kGridCtas; row < num_tokens; row += kRowStep) {
        const RowVectors<Cfg> rounded = load_row<Cfg>(norm, row, lane, smem);
        const RowVectors<Cfg> weights = load_weights<Cfg>(norm, lane, smem);
        issues.row_is_issued(lane, smem);
        u16* y = norm.y + static_cast<u64>(row) * norm.y_pitch;
        const float scale = reciprocal_norm<Cfg>(rounded);
        chaos_point(row);
        store_row<Cfg>(y, rounded, weights, scale, lane);
    }
    issues.row_is_issued(lane, smem);
    fence_proxy_async_global();
    named_barrier_sync(Cfg::kNormBarrier, Cfg::kNormWarps * 32);
    if (norm_warp == 0 && lane == 0) {
        atomic_inc_acq_rel_gpu(norm.counters, Cfg::kGridCtas - 1);
        mbarrier_arrive(smem + Cfg::kRowsArrivedOffset);
    }
}

template <class Cfg>
__device__ __forceinline__ void normalise(
    const NormOperands& norm, u32 num_tokens, u32 up_col0, u32 norm_warp, u32 lane, u32 rank, u32 smem,
    const Watch& watch) {
    if constexpr (Cfg::kResidentB) {
        normalise_resident<Cfg>(norm, num_tokens, up_col0, norm_warp, lane, rank, smem, watch);
    } else {
        normalise_shared<Cfg>(norm, num_tokens, norm_warp, lane, smem);
    }
}

}  // namespace cake
