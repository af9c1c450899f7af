#pragma once

#include "device/base.cuh"
#include "device/cluster.cuh"
#include "device/math.cuh"
#include "device/mbarrier.cuh"
#include "device/memory.cuh"
#include "kernels/decode_tile.cuh"

namespace cake {

// Where quad `q` of a thread's sums of one half lands: no two threads share a bank. A narrow tile's halves have fewer
// threads that own any, and land side by side.
template <class Cfg>
__device__ __forceinline__ u32 landing_of(u32 landing, const Fragment& at, u32 half, u32 q) {
    if constexpr (kNarrow<Cfg>) {
        return landing + (q * 2 * Cfg::kBlockM + half * at.second + at.thread) * 16;
    } else {
        constexpr u32 kQuadsPerHalf = Cfg::kFinalTokens / 8;
        return landing + ((half * kQuadsPerHalf + q) * 128 + at.thread) * 16;
    }
}

// Hands sums to the partner: kBlockM rows * kFinalTokens floats * 4 bytes = kLandingBytes complete on its
// `partner_sum`.
template <class Cfg>
__device__ __forceinline__ void push_sums(const Sums<Cfg>& sums, const Fragment& at, u32 landing, u32 partner_sum) {
    constexpr u32 kQuadsPerHalf = Cfg::kFinalTokens / 8;
    chaos_point(landing);
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        if (!at.owns[half]) {
            continue;
        }
#pragma unroll
        for (u32 q = 0; q < kQuadsPerHalf; ++q) {
            const float* four = &sums[half][4 * q];
            const Vec4 quad{
                float_to_bits(four[0]), float_to_bits(four[1]), float_to_bits(four[2]), float_to_bits(four[3])};
            st_async_v4(landing_of<Cfg>(landing, at, half, q), quad, partner_sum);
        }
    }
}

// Two terms only, so their order does not change the bits.
template <class Cfg>
__device__ __forceinline__ void add_partner(Sums<Cfg>& sums, const Fragment& at, u32 landing) {
    constexpr u32 kQuadsPerHalf = Cfg::kFinalTokens / 8;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        if (!at.owns[half]) {
            continue;
        }
#pragma unroll
        for (u32 q = 0; q < kQuadsPerHalf; ++q) {
            const Vec4 quad = ld_shared_v4(landing_of<Cfg>(landing, at, half, q));
            float* four = &sums[half][4 * q];
            four[0] += bits_to_float(quad.x);
            four[1] += bits_to_float(quad.y);
            four[2] += bits_to_float(quad.z);
            four[3] += bits_to_float(quad.w);
        }
    }
}

// Both ranks finish: rank r tokens [r * kFinalTokens, (r + 1) * kFinalTokens), and it hands the sums of the others to
// its partner.
template <class Cfg>
__device__ __forceinline__ void exchange_halves(
    const Accumulators<Cfg>& acc, Sums<Cfg>& kept, const Fragment& at, u32 rank, u32 smem, const Watch& watch) {
    constexpr u32 kRegisters = Cfg::kFinalTokens / 2;
    Sums<Cfg> given;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
#pragma unroll
        for (u32 i = 0; i < kRegisters; ++i) {
            kept[half][i] = rank == 0 ? acc[half][i] : acc[half][i + kRegisters];
            given[half][i] = rank == 0 ? acc[half][i + kRegisters] : acc[half][i];
        }
    }
    const u32 partner_sum = smem + Cfg::kPartnerSumOffset;
    const u32 landing = smem + Cfg::kLandingOffset;
    if constexpr (Cfg::kLandingAlias) {
        // The landing zone is the partner's ring: its four warps must have read it to the end.
        if (at.lane == 0) {
            mbarrier_arrive_cluster(mapa(smem + Cfg::kRingDrainedOffset, rank ^ 1));
        }
        mbarrier_wait_cluster(smem + Cfg::kRingDrainedOffset, 0, watch);
    }
    push_sums<Cfg>(given, at, mapa(landing, rank ^ 1), mapa(partner_sum, rank ^ 1));
    mbarrier_wait_cluster(partner_sum, 0, watch);
    add_partner<Cfg>(kept, at, landing);
}

// Rank 1 hands all its sums to rank 0. False: this CTA has nothing to store.
template <class Cfg>
__device__ __forceinline__ bool hand_over(
    const Accumulators<Cfg>& acc, Sums<Cfg>& kept, const Fragment& at, u32 rank, u32 smem, const Watch& watch) {
    const u32 partner_sum = smem + Cfg::kPartnerSumOffset;
    const u32 landing = smem + Cfg::kLandingOffset;
    if (rank == 1) {
        if constexpr (Cfg::kLandingAlias) {
            // The landing zone is rank 0's ring: its four warps must have read it to the end.
            mbarrier_wait_cluster(smem + Cfg::kRingDrainedOffset, 0, watch);
        }
        push_sums<Cfg>(acc, at, mapa(landing, 0), mapa(partner_sum, 0));
        return false;
    }
    if constexpr (Cfg::kLandingAlias) {
        if (at.lane == 0) {
            mbarrier_arrive_cluster(mapa(smem + Cfg::kRingDrainedOffset, 1));
        }
    }
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
#pragma unroll
        for (u32 i = 0; i < Cfg::kFinalTokens / 2; ++i) {
            kept[half][i] = acc[half][i];
        }
    }
    mbarrier_wait_cluster(partner_sum, 0, watch);
    add_partner<Cfg>(kept, at, landing);
    return true;
}

// The end of a pair's K split, in place of a copy where a CTA has all of K. False: this CTA has nothing to store.
template <class Cfg>
__device__ __forceinline__ bool combine_pair(
    const Accumulators<Cfg>& acc, Sums<Cfg>& kept, const Fragment& at, u32 rank, u32 smem, const Watch& watch) {
    if constexpr (Cfg::kSplitFinalize) {
        exchange_halves<Cfg>(acc, kept, at, rank, smem, watch);
        return true;
    } else {
        return hand_over<Cfg>(acc, kept, at, rank, smem, watch);
    }
}

}  // namespace cake
