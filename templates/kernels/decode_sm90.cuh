#pragma once

#include "device/base.cuh"
#include "device/memory.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "kernels/decode_tile.cuh"

namespace cake {

// One K chunk of 64: four k-steps of 16 for both halves. `a_half` is the distance of the second half's rows.
template <class Cfg>
__device__ __forceinline__ void multiply_chunk(Accumulators<Cfg>& acc, u32 a, u32 a_half, u32 b) {
#pragma unroll
    for (u32 k_bytes = 0; k_bytes < Cfg::kBlockK * 2; k_bytes += 32) {
        const u64 tokens = wgmma_descriptor(b + k_bytes);
        wgmma_m64_k16<Cfg::kNPad>(acc[0], wgmma_descriptor(a + k_bytes), tokens);
        wgmma_m64_k16<Cfg::kNPad>(acc[1], wgmma_descriptor(a + a_half + k_bytes), tokens);
    }
}

template <class Cfg>
__device__ __forceinline__ void add_sums(Accumulators<Cfg>& acc, const Accumulators<Cfg>& others) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
#pragma unroll
        for (u32 i = 0; i < Cfg::kNPad / 2; ++i) {
            acc[half][i] += others[half][i];
        }
    }
}

// A box of tokens has num_tokens rows, and the MMAs read kNPad. The sums of the rows between are stored nowhere, but
// nothing may be read that was never written, and no copy writes them: the MMA warps clear them once, while the first
// weights are on their way. Copies that land meanwhile write other rows. wgmma reads by the asynchronous proxy, hence
// each writer's fence ahead of the barrier (PTX ISA 9.7.13.4).
template <class Cfg>
__device__ __forceinline__ void clear_missing_rows(u32 num_tokens, u32 smem) {
    if (num_tokens >= Cfg::kNPad) {
        return;
    }
    constexpr u32 kTokenBytes = Cfg::kBlockK * 2;
    constexpr u32 kRingChunks = Cfg::kNumStages * Cfg::kChunksPerStage;
    const u32 end = smem + Cfg::kBRingOffset + kRingChunks * Cfg::kChunkBBytes;
    const u32 first = num_tokens * kTokenBytes + threadIdx.x * 16;
#pragma unroll 1
    for (u32 chunk = smem + Cfg::kBRingOffset; chunk < end; chunk += Cfg::kChunkBBytes) {
#pragma unroll 1
        for (u32 offset = first; offset < Cfg::kChunkBBytes; offset += 128 * 16) {
            st_shared_v4(chunk + offset, Vec4{0, 0, 0, 0});
        }
    }
    fence_proxy_async_shared();
    named_barrier_sync(Cfg::kMmaBarrier, 128);
}

}  // namespace cake
