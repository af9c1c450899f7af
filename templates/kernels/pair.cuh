//% set narrow = spec.value("kBlockM") < 128
//% set split = spec.arch_family == "sm90" and spec.value("kTokenParts") > 1
// ---- shared by the decode programs: accumulators, the pair's sum, staged stores ----

//% if spec.arch_family == "sm90"
// Accumulators of one thread: two 64-row halves of the weight tile (a shared tile: gate rows, then up rows).
using Accumulators = float[2][Cfg::kNPad / 2];

// The warpgroup's position inside the tile: fixes which accumulator is which output (see wgmma_m64_k16).
//% else
// Accumulators of one thread: two groups of 16 weight rows of its warp, one after the other (a shared tile: 16 gate
// rows and their up rows).
using Accumulators = float[2][Cfg::kNPad / 2];

// The thread's position in the tile: fixes which accumulator is which output (see tensor_memory_load_16x256b).
//% endif
struct Fragment {
    u32 thread;  // 0 to 127
    u32 warp;    // 0 to 3
    u32 lane;
//% if narrow
    bool owns[2];  // whether the warp's 16 rows of each MMA are the tile's, and no other warp's
    u32 second;    // by how many threads the second MMA's sums land behind the first one's: only owned ones land
//% endif
};

//% if spec.arch_family == "sm90"
//% if narrow
// First row of the second MMA; the two overlap, since a tile has fewer than 128 rows.
//% else
// First row of the second MMA.
//% endif
constexpr u32 kSecondRow = Cfg::kBlockM - 64;

// One K chunk of 64: four k-steps of 16 for both halves. `a_half` is the distance of the second half's rows.
__device__ __forceinline__ void multiply_chunk(Accumulators& acc, u32 a, u32 a_half, u32 b) {
#pragma unroll
    for (u32 k_bytes = 0; k_bytes < Cfg::kBlockK * 2; k_bytes += 32) {
        const u64 tokens = wgmma_descriptor(b + k_bytes);
        wgmma_m64_k16<Cfg::kNPad>(acc[0], wgmma_descriptor(a + k_bytes), tokens);
        wgmma_m64_k16<Cfg::kNPad>(acc[1], wgmma_descriptor(a + a_half + k_bytes), tokens);
    }
}

//% endif
//% if split and spec.value("kTwoSums")
__device__ __forceinline__ void add_sums(Accumulators& acc, const Accumulators& others) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
#pragma unroll
        for (u32 i = 0; i < Cfg::kNPad / 2; ++i) {
            acc[half][i] += others[half][i];
        }
    }
}

//% endif
// Sums that a CTA stores: of all tokens, or of its half of them after the pair's exchange.
using Sums = float[2][Cfg::kFinalTokens / 2];

//% if spec.value("kClusterCtas") == 2
//% if narrow
// Where quad `q` of a thread's sums of one MMA lands: those of neighbours side by side, so no two share a bank.
__device__ __forceinline__ u32 landing_of(u32 landing, const Fragment& at, u32 half, u32 q) {
    return landing + (q * 2 * Cfg::kBlockM + half * at.second + at.thread) * 16;
}

// Hands sums to the partner: kBlockM rows * kFinalTokens floats * 4 bytes = kLandingBytes complete on its
// `partner_sum`.
//% else
// Hands sums to the partner: quad q of thread t lands at (q * 128 + t) * 16, so no two threads share a bank.
// kBlockM rows * kFinalTokens floats * 4 bytes = kLandingBytes complete on the partner's `partner_sum`.
//% endif
__device__ __forceinline__ void push_sums(const Sums& sums, const Fragment& at, u32 landing, u32 partner_sum) {
    constexpr u32 kQuadsPerHalf = Cfg::kFinalTokens / 8;
    chaos_point(landing);
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
//% if narrow
        if (!at.owns[half]) {
            continue;
        }
//% endif
#pragma unroll
        for (u32 q = 0; q < kQuadsPerHalf; ++q) {
            const float* four = &sums[half][4 * q];
            const Vec4 quad{
                float_to_bits(four[0]), float_to_bits(four[1]), float_to_bits(four[2]), float_to_bits(four[3])};
//% if narrow
            st_async_v4(landing_of(landing, at, half, q), quad, partner_sum);
//% else
            st_async_v4(landing + ((half * kQuadsPerHalf + q) * 128 + at.thread) * 16, quad, partner_sum);
//% endif
        }
    }
}

// Two terms only, so their order does not change the bits.
__device__ __forceinline__ void add_partner(Sums& sums, const Fragment& at, u32 landing) {
    constexpr u32 kQuadsPerHalf = Cfg::kFinalTokens / 8;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
//% if narrow
        if (!at.owns[half]) {
            continue;
        }
//% endif
#pragma unroll
        for (u32 q = 0; q < kQuadsPerHalf; ++q) {
//% if narrow
            const Vec4 quad = ld_shared_v4(landing_of(landing, at, half, q));
//% else
            const Vec4 quad = ld_shared_v4(landing + ((half * kQuadsPerHalf + q) * 128 + at.thread) * 16);
//% endif
            float* four = &sums[half][4 * q];
            four[0] += bits_to_float(quad.x);
            four[1] += bits_to_float(quad.y);
            four[2] += bits_to_float(quad.z);
            four[3] += bits_to_float(quad.w);
        }
    }
}

//% if spec.value("kSplitFinalize")
// The end of a pair's K split: rank r finishes tokens [r * kFinalTokens, (r + 1) * kFinalTokens) and hands the sums
// of the others to its partner. Both store, so it returns true.
__device__ __forceinline__ bool combine_pair(
    const Accumulators& acc, Sums& kept, const Fragment& at, u32 rank, u32 smem, const Watch& watch) {
    constexpr u32 kRegisters = Cfg::kFinalTokens / 2;
    Sums given;
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
        // The landing zone is the partner's ring: its four MMA warps must have read it to the end.
        if (at.lane == 0) {
            mbarrier_arrive_cluster(mapa(smem + Cfg::kRingDrainedOffset, rank ^ 1));
        }
        mbarrier_wait_cluster(smem + Cfg::kRingDrainedOffset, 0, watch);
    }
    push_sums(given, at, mapa(landing, rank ^ 1), mapa(partner_sum, rank ^ 1));
    mbarrier_wait_cluster(partner_sum, 0, watch);
    add_partner(kept, at, landing);
    return true;
}
//% else
// The end of a pair's K split: rank 1 hands all its sums to rank 0. False: this CTA has nothing to store.
__device__ __forceinline__ bool combine_pair(
    const Accumulators& acc, Sums& kept, const Fragment& at, u32 rank, u32 smem, const Watch& watch) {
    const u32 partner_sum = smem + Cfg::kPartnerSumOffset;
    const u32 landing = smem + Cfg::kLandingOffset;
    if (rank == 1) {
        if constexpr (Cfg::kLandingAlias) {
            // The landing zone is rank 0's ring: its four MMA warps must have read it to the end.
            mbarrier_wait_cluster(smem + Cfg::kRingDrainedOffset, 0, watch);
        }
        push_sums(acc, at, mapa(landing, 0), mapa(partner_sum, 0));
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
    add_partner(kept, at, landing);
    return true;
}
//% endif

//% endif
/*% include "kernels/ring.cuh" %*/

// One thread's part of the set-up; arrivals as listed at the top of the file.
__device__ __forceinline__ void init_ring_and_pair(u32 smem) {
    for (u32 stage = 0; stage < Cfg::kNumStages; ++stage) {
        mbarrier_init(smem + Cfg::kStageFullOffset + stage * 8, 1);
//% if spec.arch_family == "sm90"
        mbarrier_init(smem + Cfg::kStageEmptyOffset + stage * 8, 4);
//% else
        mbarrier_init(smem + Cfg::kStageEmptyOffset + stage * 8, 1);
//% endif
    }
    mbarrier_init(smem + Cfg::kPartnerSumOffset, 1);
    mbarrier_init(smem + Cfg::kRingDrainedOffset, 4);
}

// After the last initialisation. Where sums land, their bytes are expected before the partner can store any.
__device__ __forceinline__ void publish_barriers(u32 rank, u32 smem) {
    fence_mbarrier_init();
//% if spec.value("kClusterCtas") == 2
    if (rank == 0 || Cfg::kSplitFinalize) {
        mbarrier_arrive_expect_tx(smem + Cfg::kPartnerSumOffset, Cfg::kLandingBytes);
    }
//% endif
}

// The tokens that a CTA stores: all, or its half.
struct TokenRange {
    u32 first;
    u32 count;
};

//% if not split
__device__ __forceinline__ TokenRange final_tokens(u32 rank, u32 num_tokens) {
    const u32 first = Cfg::kFinalTokens < Cfg::kNPad ? rank * Cfg::kFinalTokens : 0;
    return {first, num_tokens > first ? min(num_tokens - first, static_cast<u32>(Cfg::kFinalTokens)) : 0};
}

//% endif
// Output rows are staged over the drained ring as [token][weight row], then leave in 16-byte stores. The pitch is 16
// bytes more than a row, which spreads 8 tokens over all banks.
__device__ constexpr u32 staging_pitch(u32 row_bytes) {
    return row_bytes + 16;
}

// Rounds 64 rows to bf16 and stages them from weight row `first_row` on. Matrix (g, h) of the fragment holds weight
// rows 16 warp + 8 h .. + 7 of tokens 8 g .. + 7; stored transposed, a row of memory is one token.
__device__ __forceinline__ void stage_bf16(
    const float (&sums)[Cfg::kFinalTokens / 2], const Fragment& at, u32 staging, u32 pitch_bytes, u32 first_row) {
    const u32 matrix = at.lane / 8;
    const u32 column = (first_row + 16 * at.warp + 8 * (matrix % 2)) * 2;
    const u32 row_address = staging + (8 * (matrix / 2) + at.lane % 8) * pitch_bytes + column;
    chaos_point(staging);
    if constexpr (Cfg::kFinalTokens == 8) {
        const u32 first = staging + (at.lane % 8) * pitch_bytes + column;
        stmatrix_x2_trans(first, cvt_rn_bf16x2(sums[1], sums[0]), cvt_rn_bf16x2(sums[3], sums[2]));
    } else {
#pragma unroll
        for (u32 i = 0; i < Cfg::kFinalTokens / 2; i += 8) {
            stmatrix_x4_trans(
                row_address + 2 * i * pitch_bytes,
                cvt_rn_bf16x2(sums[i + 1], sums[i]),
                cvt_rn_bf16x2(sums[i + 3], sums[i + 2]),
                cvt_rn_bf16x2(sums[i + 5], sums[i + 4]),
                cvt_rn_bf16x2(sums[i + 7], sums[i + 6]));
        }
    }
}

// Copies the staged rows of `tokens` to `out` (element column `column`; columns from `column_end` on belong to no
// output). The 128 threads write 16 bytes each, neighbours side by side.
template <u32 kRowElems, u32 kElemBytes>
__device__ __forceinline__ void store_staged(
    u32 staging, u32 thread, void* out, u32 pitch_elems, u32 column, u32 column_end, const TokenRange& tokens) {
    constexpr u32 kVecElems = 16 / kElemBytes;
    constexpr u32 kVecsPerRow = kRowElems / kVecElems;
    chaos_point(staging + 1);
    for (u32 i = thread; i < tokens.count * kVecsPerRow; i += 128) {
        const u32 token = i / kVecsPerRow;
        const u32 vec = i % kVecsPerRow;
        const u32 first = column + vec * kVecElems;
        if (first < column_end) {
            const Vec4 value = ld_shared_v4(staging + token * staging_pitch(kRowElems * kElemBytes) + vec * 16);
            const u64 element = static_cast<u64>(tokens.first + token) * pitch_elems + first;
            st_global_v4(static_cast<u8*>(out) + element * kElemBytes, value);
        }
    }
}
