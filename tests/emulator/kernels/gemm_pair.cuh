#pragma once
// The roles of a two-CTA GEMM: out [m, n] fp32 = a [m, k] b [n, k]^T, bf16; a pair of CTAs a tile of 256 x 64.
//
//   load warp of each CTA --full (leader's)--> multiply warp of the leader --acc_full (each CTA's)--> epilogue warps
//                         <--empty (each CTA's)--                <--acc_empty (leader's)--  of both
//
// full: the leader's arrival, and the bytes of both CTAs. empty, acc_full: a commit that both CTAs get. acc_empty: the
// epilogue warps of both CTAs. Two accumulators, so that a tile is stored while the next one is multiplied.

constexpr u32 kTileM = 256, kTileN = 64, kTileK = 64, kStages = 3, kColumns = 128, kEpilogueWarps = 4;
constexpr u32 kBytesA = kTileM / 2 * 128, kBytesB = kTileN / 2 * 128, kStage = kBytesA + kBytesB;
constexpr u32 kFull = 0, kEmpty = kFull + 8 * kStages, kAccFull = kEmpty + 8 * kStages, kAccEmpty = kAccFull + 16;
constexpr u32 kSchedule = kAccEmpty + 16, kBase = 160, kRing = 1024;
// Bit 24 of a shared address is the parity of the CTA's rank: without it, the leader's.
constexpr u32 kLeader = 0xFEFFFFFF;

struct Problem {
    u32 n, blocks;
    // Of a tile's number: which rows and columns.
    __device__ u32 row(u32 tile) const { return tile / (n / kTileN) * kTileM + cluster_ctarank() * (kTileM / 2); }
    __device__ u32 column(u32 tile) const { return tile % (n / kTileN) * kTileN; }
};

// Of a barrier that is used again and again: stage and parity of its i-th use.
struct Turn {
    u32 stage, parity;
    __device__ Turn(u32 i, u32 stages) : stage(i % stages), parity(i / stages % 2) {}
};

__device__ void setup(u32 smem, u32 warp) {
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < kStages; ++stage) {
            mbarrier_init(smem + kFull + 8 * stage, 1);
            mbarrier_init(smem + kEmpty + 8 * stage, 1);
        }
        for (u32 acc = 0; acc < 2; ++acc) {
            mbarrier_init(smem + kAccFull + 8 * acc, 1);
            mbarrier_init(smem + kAccEmpty + 8 * acc, 2 * kEpilogueWarps);
        }
    }
    if (warp == 1) {
        tensor_alloc<2>(smem + kBase, kColumns);
        tensor_relinquish<2>();
    }
}

__device__ void rendezvous() {
    tensor_fence_before();
    fence_mbarrier_init();
    __syncthreads();
    cluster_arrive();
    cluster_wait();
    tensor_fence_after();
}

__device__ void load_tile(
    u32 smem, const TensorMap& a, const TensorMap& b, const Problem& problem, u32 tile, u32& i, const Watch& watch) {
    const u32 rank = cluster_ctarank();
    for (u32 block = 0; block < problem.blocks; ++block, ++i) {
        const Turn turn(i, kStages);
        const u32 at = smem + kRing + turn.stage * kStage, full = (smem + kFull + 8 * turn.stage) & kLeader;
        mbarrier_wait_cluster(smem + kEmpty + 8 * turn.stage, turn.parity ^ 1, watch);
        if (rank == 0) mbarrier_arrive_expect_tx(full, 2 * kStage);
        tma_load_3d_pair(at, a, 0, problem.row(tile), block, full);
        tma_load_3d_pair(at + kBytesA, b, 0, problem.column(tile) + rank * (kTileN / 2), block, full);
    }
}

__device__ void multiply_tile(u32 smem, u32 base, const Problem& problem, u32 item, u32& i, const Watch& watch) {
    const Turn acc(item, 2);
    const u32 sums = base + acc.stage * kTileN;
    mbarrier_wait_cluster(smem + kAccEmpty + 8 * acc.stage, acc.parity ^ 1, watch);
    for (u32 block = 0; block < problem.blocks; ++block, ++i) {
        const Turn turn(i, kStages);
        const u32 at = smem + kRing + turn.stage * kStage;
        mbarrier_wait_cluster(smem + kFull + 8 * turn.stage, turn.parity, watch);
        tensor_fence_after();
        for (u32 k = 0; k < kTileK / 16; ++k) {
            const u64 a = tensor_descriptor(at + 32 * k, 0, 1024, 2);
            const u64 b = tensor_descriptor(at + kBytesA + 32 * k, 0, 1024, 2);
            tensor_mma<2>(sums, a, b, tensor_instruction(kTileM, kTileN), block + k > 0);
        }
        tensor_commit_multicast<2>(smem + kEmpty + 8 * turn.stage, 3);
    }
    tensor_commit_multicast<2>(smem + kAccFull + 8 * acc.stage, 3);
}

__device__ void store_tile(
    u32 smem, u32 base, float* out, const Problem& problem, u32 tile, u32 item, const Watch& watch) {
    const Turn acc(item, 2);
    const u32 quadrant = threadIdx.x / 32 % 4, row = problem.row(tile) + quadrant * 32 + threadIdx.x % 32;
    mbarrier_wait_cluster(smem + kAccFull + 8 * acc.stage, acc.parity, watch);
    tensor_fence_after();
    for (u32 column = 0; column < kTileN; column += 8) {
        u32 r[8];
        tensor_load_32x32b_x8(r, base + acc.stage * kTileN + (quadrant * 32 << 16) + column);
        tensor_wait_loads();
        for (u32 c = 0; c < 8; ++c) out[row * problem.n + problem.column(tile) + column + c] = __uint_as_float(r[c]);
    }
    tensor_fence_before();
    warp_sync();
    if (lane_id() == 0) mbarrier_arrive_cluster(mapa(smem + kAccEmpty + 8 * acc.stage, 0));
}
