#pragma once

#include "device/base.cuh"
#include "device/grid.cuh"
#include "device/math.cuh"
#include "device/memory.cuh"
#include "kernels/gemm_operands.cuh"
#include "kernels/gemm_tile_sm90.cuh"
#include "kernels/group_word.cuh"

namespace cake {

// fp32 sums of 64 rows x kBlockN columns in memory: quad q of thread t at (q * 128 + t) * 16 bytes.
template <class Cfg>
constexpr u32 kBlockElems = 64 * Cfg::kBlockN;
// Of one warpgroup's rows of a tile; of all rows of a pair's tile.
template <class Cfg>
constexpr u32 kPartElems = Cfg::kGroupBlocks * kBlockElems<Cfg>;
template <class Cfg>
constexpr u32 kSegmentElems = 2 * Cfg::kTileGroups * kPartElems<Cfg>;

// One warpgroup's sums of one segment.
template <class Cfg>
__device__ __forceinline__ float* partial_slot(
    const Partials& partials, const Split& split, u32 cut, u32 segment, u32 rank, const Fragment& at) {
    const u64 slot =
        ((static_cast<u64>(cut) * split.sk_max_seg + segment) * 2 + rank) * Cfg::kTileGroups + part_of<Cfg>(at);
    return partials.sums + slot * kPartElems<Cfg> + at.thread * 4;
}

template <class Cfg>
__device__ __forceinline__ void store_partial(const BlockSums<Cfg>& acc, float* own) {
#pragma unroll
    for (u32 q = 0; q < Cfg::kBlockN / 8; ++q) {
        const Vec4 quad{
            float_to_bits(acc[4 * q]), float_to_bits(acc[4 * q + 1]), float_to_bits(acc[4 * q + 2]),
            float_to_bits(acc[4 * q + 3])};
        st_global_v4(own + q * 512, quad);
    }
}

// Whether this warpgroup is the last of its tile's segments. If not, it has left its sums in memory. Nobody waits:
// whoever finds all others done keeps its own sums in registers.
template <class Cfg>
__device__ __forceinline__ bool arrives_last(
    const Accumulators<Cfg>& acc, const Work& work, float* own, u32* counter, const Fragment& at, u32 smem) {
    const u32 others = work.num_segments - 1;
    u32 arrivals = broadcast_word<Cfg>(at.thread == 0 ? ld_acquire_gpu(counter) : 0, at.group, at.thread, smem);
    if (arrivals == others) {
        return true;
    }
#pragma unroll
    for (u32 block = 0; block < Cfg::kGroupBlocks; ++block) {
        store_partial<Cfg>(acc[block], own + block * kBlockElems<Cfg>);
    }
    // All sums of the warpgroup happen before its one arrival (PTX ISA 8.8, causality order through the barrier).
    named_barrier_sync(Cfg::kGroupBarrier + at.group, 128);
    arrivals = broadcast_word<Cfg>(at.thread == 0 ? atomic_add_acq_rel_gpu(counter, 1) : 0, at.group, at.thread, smem);
    return arrivals == others;
}

// Adds one segment's sums from memory.
template <class Cfg>
__device__ __forceinline__ void add_partial(BlockSums<Cfg>& acc, const float* source) {
#pragma unroll
    for (u32 q = 0; q < Cfg::kBlockN / 8; ++q) {
        const Vec4 quad = ld_global_v4(source + q * 512);
        acc[4 * q] += bits_to_float(quad.x);
        acc[4 * q + 1] += bits_to_float(quad.y);
        acc[4 * q + 2] += bits_to_float(quad.z);
        acc[4 * q + 3] += bits_to_float(quad.w);
    }
}

// Adds the sum of segments [0, count), itself taken in their order.
template <class Cfg>
__device__ __forceinline__ void add_prefix(BlockSums<Cfg>& acc, const float* source, u32 count) {
#pragma unroll
    for (u32 q = 0; q < Cfg::kBlockN / 8; ++q) {
        const Vec4 first = ld_global_v4(source + q * 512);
        float total[4] = {
            bits_to_float(first.x), bits_to_float(first.y), bits_to_float(first.z), bits_to_float(first.w)};
#pragma unroll 1
        for (u32 segment = 1; segment < count; ++segment) {
            const Vec4 quad = ld_global_v4(source + segment * kSegmentElems<Cfg> + q * 512);
            total[0] += bits_to_float(quad.x);
            total[1] += bits_to_float(quad.y);
            total[2] += bits_to_float(quad.z);
            total[3] += bits_to_float(quad.w);
        }
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            acc[4 * q + i] += total[i];
        }
    }
}

// The end of a segment of a cut tile: hands its sums over, or, arriving last, adds all segments from the left,
// whichever of them it holds itself. False: another CTA finishes the tile. The counter returns to 0 for the next
// launch.
template <class Cfg>
__device__ __forceinline__ bool finish_segments(
    Accumulators<Cfg>& acc, const Work& work, const Split& split, const Partials& partials, u32 rank,
    const Fragment& at, u32 smem) {
    u32* counter = partials.counters + (work.cut * 2 + rank) * Cfg::kTileGroups + part_of<Cfg>(at);
    float* own = partial_slot<Cfg>(partials, split, work.cut, work.segment, rank, at);
    if (!arrives_last<Cfg>(acc, work, own, counter, at, smem)) {
        return false;
    }
    if (at.thread == 0) {
        st_relaxed_gpu(counter, 0);
    }
#pragma unroll
    for (u32 block = 0; block < Cfg::kGroupBlocks; ++block) {
        const float* sums = own + block * kBlockElems<Cfg>;
        if (work.segment == 1) {
            add_partial<Cfg>(acc[block], sums - kSegmentElems<Cfg>);
        } else if (work.segment > 1) {
            add_prefix<Cfg>(acc[block], sums - work.segment * kSegmentElems<Cfg>, work.segment);
        }
        for (u32 segment = work.segment + 1; segment < work.num_segments; ++segment) {
            add_partial<Cfg>(acc[block], sums + (segment - work.segment) * kSegmentElems<Cfg>);
        }
    }
    return true;
}

}  // namespace cake
