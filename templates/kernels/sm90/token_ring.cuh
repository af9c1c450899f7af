//# The token stages of a decode kernel, whose boxes are as high as the launch has tokens, or a CTA its part of them.
//% set split = spec.value("kTokenParts") > 1
constexpr u32 kTokenBytes = Cfg::kBlockK * 2;  // a token's row of a K chunk
constexpr u32 kTokenChunks = Cfg::kNumStages * Cfg::kChunksPerStage;  // of the ring

//% if split
// The CTAs of a tile load as many tokens each; of an odd number the last one's box has a row past the end, of zeros.
__device__ __forceinline__ u32 loaded_tokens(u32 num_tokens) {
    return (num_tokens + Cfg::kTokenParts - 1) / Cfg::kTokenParts;
}

__device__ __forceinline__ u32 first_loaded(u32 num_tokens) {
    return blockIdx.x % Cfg::kTokenParts * loaded_tokens(num_tokens);
}

__device__ __forceinline__ TokenRange final_tokens(u32 num_tokens) {
    const u32 first = first_loaded(num_tokens);
    return {first, num_tokens > first ? min(num_tokens - first, loaded_tokens(num_tokens)) : 0};
}

//% endif
// A box of tokens has num_tokens rows, and the MMAs read kNPad. The sums of the rows between are stored nowhere, but
// nothing may be read that was never written, and no copy writes them: the MMA warps clear them once, while the first
// weights are on their way. Copies that land meanwhile write other rows. wgmma reads by the asynchronous proxy, hence
// each writer's fence ahead of the barrier (PTX ISA 9.7.13.4).
__device__ __forceinline__ void clear_missing_rows(u32 num_tokens, u32 smem) {
    if (num_tokens >= Cfg::kNPad) {
        return;
    }
    const u32 end = smem + Cfg::kBRingOffset + kTokenChunks * Cfg::kChunkBBytes;
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
