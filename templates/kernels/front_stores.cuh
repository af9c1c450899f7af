//% set narrow = spec.value("kBlockM") < 128
struct Outputs {
    float* logits;
    u16* latent;
    u16* shared_act;
    TokenRange tokens;
    u32 logits_pitch;
    u32 latent_pitch;
    u32 shared_act_pitch;
};

// fp32, unrounded. Four tokens of a quad stand 2 rows apart, so a warp's 32 stores hit 32 banks.
__device__ __forceinline__ void store_router(
    const Sums& sums, const Tile& tile, const Fragment& at, u32 staging, const Outputs& out) {
    constexpr u32 kPitch = staging_pitch(Cfg::kBlockM * 4);
    chaos_point(staging);
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
//% if narrow
        if (!at.owns[half]) {
            continue;
        }
//% endif
#pragma unroll
        for (u32 i = 0; i < Cfg::kFinalTokens / 2; ++i) {
//% if spec.arch_family == "sm90"
            const u32 row = kSecondRow * half + 16 * at.warp + at.lane / 4 + 8 * ((i >> 1) & 1);
//% else
            const u32 row = 32 * at.warp + 16 * half + at.lane / 4 + 8 * ((i >> 1) & 1);
//% endif
            const u32 token = 8 * (i >> 2) + 2 * (at.lane % 4) + (i & 1);
            st_shared_f32(staging + token * kPitch + row * 4, sums[half][i]);
        }
    }
    named_barrier_sync(Cfg::kMmaBarrier, 128);
//% if narrow
    const u32 own = staging + (tile.first - tile.row) * 4;
    store_staged<Cfg::kBlockM, 4>(
        own, at.thread, out.logits, out.logits_pitch, tile.first, Cfg::kRouterCols, out.tokens);
//% else
    store_staged<Cfg::kBlockM, 4>(
        staging, at.thread, out.logits, out.logits_pitch, tile.row, Cfg::kRouterCols, out.tokens);
//% endif
}

__device__ __forceinline__ void store_latent(
    const Sums& sums, const Tile& tile, const Fragment& at, u32 staging, const Outputs& out) {
    constexpr u32 kPitch = staging_pitch(Cfg::kBlockM * 2);
//% if spec.arch_family == "sm90"
    stage_bf16(sums[0], at, staging, kPitch, 0);
//% if narrow
    if (at.owns[1]) {
        stage_bf16(sums[1], at, staging, kPitch, kSecondRow);
    }
//% else
    stage_bf16(sums[1], at, staging, kPitch, kSecondRow);
//% endif
//% else
    stage_bf16(sums[0], at, staging, kPitch, 16 * at.warp);
    stage_bf16(sums[1], at, staging, kPitch, 16 * at.warp + 16);
//% endif
    named_barrier_sync(Cfg::kMmaBarrier, 128);
//% if narrow
    const u32 own = staging + (tile.first - tile.row) * 2;
    store_staged<Cfg::kBlockM, 2>(
        own, at.thread, out.latent, out.latent_pitch, tile.first, Cfg::kLatentCols, out.tokens);
//% else
    store_staged<Cfg::kBlockM, 2>(
        staging, at.thread, out.latent, out.latent_pitch, tile.row, Cfg::kLatentCols, out.tokens);
//% endif
}

// The gate and the up value of one output sit in the same thread and register.
__device__ __forceinline__ void store_shared(
    Sums& sums, const Tile& tile, const Fragment& at, u32 staging, const Outputs& out) {
#pragma unroll
    for (u32 i = 0; i < Cfg::kFinalTokens / 2; ++i) {
        sums[0][i] = situ(sums[0][i], sums[1][i], Cfg::kSituBeta, Cfg::kSituLinearBeta);
    }
    constexpr u32 kPitch = staging_pitch(Cfg::kBlockM / 2 * 2);
//% if narrow
    if (at.owns[0]) {
        stage_bf16(sums[0], at, staging, kPitch, 0);
    }
//% else
    stage_bf16(sums[0], at, staging, kPitch, 0);
//% endif
    named_barrier_sync(Cfg::kMmaBarrier, 128);
//% if narrow
    const u32 own = staging + (tile.first - tile.row) * 2;
    store_staged<Cfg::kBlockM / 2, 2>(
        own, at.thread, out.shared_act, out.shared_act_pitch, tile.first, Cfg::kSharedCols, out.tokens);
//% else
    store_staged<Cfg::kBlockM / 2, 2>(
        staging, at.thread, out.shared_act, out.shared_act_pitch, tile.row, Cfg::kSharedCols, out.tokens);
//% endif
}
