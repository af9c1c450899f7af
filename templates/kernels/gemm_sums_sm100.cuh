#pragma once

#include "device/base.cuh"
#include "device/grid.cuh"
#include "device/math.cuh"
#include "device/mbarrier.cuh"
#include "device/memory.cuh"
#include "device/tcgen05.cuh"
#include "device/tcgen05_pair.cuh"
#include "device/tensor_memory.cuh"
#include "kernels/gemm_operands.cuh"
#include "kernels/gemm_sm100.cuh"
#include "kernels/group_word.cuh"

namespace cake {

// A group has kGroupCols columns of the lower half of a tile, and those half a tile further: in a shared tile, the gate
// and the up value of one output.
template <class Cfg>
constexpr u32 kHalfCols = Cfg::kBlockN / 2;
template <class Cfg>
constexpr u32 kGroupCols = kHalfCols<Cfg> / 2;
constexpr u32 kStepCols = 16;
template <class Cfg>
using Sums = float[2][kStepCols];

struct Fragment {
    u32 group;   // 0 or 1
    u32 thread;  // 0 to 127: which of the CTA's token rows
    u32 lane;
};

template <class Cfg>
__device__ __forceinline__ Fragment fragment() {
    const u32 warp = warp_index();
    // Tensor memory gives a warp the lanes that its index % 4 says.
    return {(warp - Cfg::kFirstEpilogueWarp) / 4, warp % 4 * 32 + lane_id(), lane_id()};
}

// First column of a step, in a half.
template <class Cfg>
__device__ __forceinline__ u32 step_column(const Fragment& at, u32 step) {
    return at.group * kGroupCols<Cfg> + step * kStepCols;
}

template <class Cfg>
__device__ __forceinline__ void load_sums(Sums<Cfg>& sums, u32 from, const Fragment& at, u32 step) {
    const u32 lanes = from + ((at.thread - at.lane) << 16) + step_column<Cfg>(at, step);
    tensor_memory_load_32x32b(sums[0], lanes);
    tensor_memory_load_32x32b(sums[1], lanes + kHalfCols<Cfg>);
    tensor_memory_wait_load(sums);
}

// fp32 sums of one group in memory: quad q of thread t at (q * 128 + t) * 16 bytes; a step has kStepQuads.
template <class Cfg>
constexpr u32 kGroupElems = Cfg::kBlockM * 2 * kGroupCols<Cfg>;
template <class Cfg>
constexpr u32 kSegmentElems = 2 * 2 * kGroupElems<Cfg>;
constexpr u32 kStepQuads = 2 * kStepCols / 4;

template <class Cfg>
__device__ __forceinline__ void store_partial(const Sums<Cfg>& sums, float* own, u32 step) {
#pragma unroll
    for (u32 q = 0; q < kStepQuads; ++q) {
        const float* quad = sums[q / (kStepQuads / 2)] + q % (kStepQuads / 2) * 4;
        const Vec4 bits{float_to_bits(quad[0]), float_to_bits(quad[1]), float_to_bits(quad[2]), float_to_bits(quad[3])};
        st_global_v4(own + (step * kStepQuads + q) * 512, bits);
    }
}

template <class Cfg>
__device__ __forceinline__ void add_partial(Sums<Cfg>& sums, const float* source, u32 step) {
#pragma unroll
    for (u32 q = 0; q < kStepQuads; ++q) {
        float* quad = sums[q / (kStepQuads / 2)] + q % (kStepQuads / 2) * 4;
        const Vec4 bits = ld_global_v4(source + (step * kStepQuads + q) * 512);
        quad[0] += bits_to_float(bits.x);
        quad[1] += bits_to_float(bits.y);
        quad[2] += bits_to_float(bits.z);
        quad[3] += bits_to_float(bits.w);
    }
}

// The segments' sums of one group of one tile: `first` is segment 0's.
struct Segments {
    float* first;
    u32* counter;
};

template <class Cfg>
__device__ __forceinline__ Segments
segments_of(const Work& work, const Split& split, const Partials& partials, u32 rank, const Fragment& at) {
    const u64 tile = static_cast<u64>(work.cut) * split.sk_max_seg * kSegmentElems<Cfg>;
    return {
        partials.sums + tile + (rank * 2 + at.group) * kGroupElems<Cfg> + at.thread * 4,
        partials.counters + (work.cut * 2 + rank) * 2 + at.group};
}

// Whether this group is the last of its tile's segments. If not, it has left its sums in memory. Nobody waits: whoever
// finds all others done keeps its own sums in tensor memory. The counter returns to 0 for the next launch.
template <class Cfg>
__device__ __forceinline__ bool arrives_last(
    u32 from, const Work& work, const Segments& segments, const Fragment& at, u32 smem) {
    const u32 others = work.num_segments - 1;
    u32 arrivals =
        broadcast_word<Cfg>(at.thread == 0 ? ld_acquire_gpu(segments.counter) : 0, at.group, at.thread, smem);
    if (arrivals != others) {
        float* own = segments.first + work.segment * kSegmentElems<Cfg>;
#pragma unroll 1
        for (u32 step = 0; step < kGroupCols<Cfg> / kStepCols; ++step) {
            Sums<Cfg> sums;
            load_sums<Cfg>(sums, from, at, step);
            store_partial<Cfg>(sums, own, step);
        }
        // All sums of the group happen before its one arrival (PTX ISA 8.8, causality order through the barrier).
        named_barrier_sync(Cfg::kGroupBarrier + at.group, 128);
        arrivals = broadcast_word<Cfg>(
            at.thread == 0 ? atomic_add_acq_rel_gpu(segments.counter, 1) : 0, at.group, at.thread, smem);
    }
    if (arrivals != others) {
        return false;
    }
    if (at.thread == 0) {
        st_relaxed_gpu(segments.counter, 0);
    }
    return true;
}

// Adds all segments in their order, from 0 on, whichever of them this group holds itself.
template <class Cfg>
__device__ __forceinline__ void sum_segments(
    Sums<Cfg>& sums, u32 from, const Work& work, const Segments& segments, const Fragment& at, u32 step) {
    Sums<Cfg> own;
    load_sums<Cfg>(own, from, at, step);
#pragma unroll
    for (u32 i = 0; i < 2 * kStepCols; ++i) {
        sums[i / kStepCols][i % kStepCols] = 0.0f;
    }
#pragma unroll 1
    for (u32 segment = 0; segment < work.num_segments; ++segment) {
        if (segment != work.segment) {
            add_partial<Cfg>(sums, segments.first + segment * kSegmentElems<Cfg>, step);
            continue;
        }
#pragma unroll
        for (u32 i = 0; i < 2 * kStepCols; ++i) {
            sums[i / kStepCols][i % kStepCols] += own[i / kStepCols][i % kStepCols];
        }
    }
}

// The end of a work: `store(sums, column)` gets kStepCols columns of the lower half of the tile from `column` on, and
// those half a tile further. False: a segment of a tile that another finishes, of which it gets nothing.
template <class Cfg, typename Store>
__device__ __forceinline__ bool finish_tile(
    u32 from, const Work& work, const Segments& segments, const Fragment& at, u32 smem, Store store) {
    const bool is_cut = work.num_segments > 1;
    if (is_cut && !arrives_last<Cfg>(from, work, segments, at, smem)) {
        return false;
    }
#pragma unroll 1
    for (u32 step = 0; step < kGroupCols<Cfg> / kStepCols; ++step) {
        Sums<Cfg> sums;
        if (is_cut) {
            sum_segments<Cfg>(sums, from, work, segments, at, step);
        } else {
            load_sums<Cfg>(sums, from, at, step);
        }
        store(sums, step_column<Cfg>(at, step));
    }
    return true;
}

template <class Cfg>
__device__ __forceinline__ void await_sums(u32 count, u32 smem, const Watch& watch) {
    mbarrier_wait_cluster(smem + Cfg::kSumsFullOffset + count % 2 * 8, count / 2 & 1, watch);
    tcgen05_fence_after_thread_sync();
}

// The warp has read its sums of the tile.
template <class Cfg>
__device__ __forceinline__ void release_sums(u32 count, const Fragment& at, u32 rank, u32 smem) {
    tcgen05_fence_before_thread_sync();
    warp_sync();
    if (at.lane == 0) {
        arrive_at_leader(smem + Cfg::kSumsEmptyOffset + count % 2 * 8, rank);
    }
}

}  // namespace cake
