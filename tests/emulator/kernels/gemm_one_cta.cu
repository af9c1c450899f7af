// out [m, n] fp32 = a [m, k] b [n, k]^T, bf16; one CTA a tile of 128 x 64.
//
// load warp --full--> multiply warp --acc_full--> four epilogue warps
//           <-empty--
// full: one arrival and the bytes of both tiles. empty and acc_full: one commit each.

constexpr u32 kTileM = 128, kTileN = 64, kTileK = 64, kStages = 3, kColumns = 64;
constexpr u32 kBytesA = kTileM * 128, kBytesB = kTileN * 128, kStage = kBytesA + kBytesB;
constexpr u32 kFull = 0, kEmpty = 8 * kStages, kAccFull = 16 * kStages, kBase = kAccFull + 8, kRing = 1024;

__device__ void load(u32 smem, const TensorMap& a, const TensorMap& b, u32 blocks, const Watch& watch) {
    for (u32 i = 0; i < blocks; ++i) {
        const u32 stage = i % kStages, at = smem + kRing + stage * kStage, full = smem + kFull + 8 * stage;
        mbarrier_wait(smem + kEmpty + 8 * stage, i / kStages % 2 ^ 1, watch);
        mbarrier_arrive_expect_tx(full, kStage);
        tma_load_3d(at, a, 0, blockIdx.x * kTileM, i, full);
        tma_load_3d(at + kBytesA, b, 0, blockIdx.y * kTileN, i, full);
    }
}

__device__ void multiply(u32 smem, u32 acc, u32 blocks, const Watch& watch) {
    for (u32 i = 0; i < blocks; ++i) {
        const u32 stage = i % kStages, at = smem + kRing + stage * kStage;
        mbarrier_wait(smem + kFull + 8 * stage, i / kStages % 2, watch);
        tensor_fence_after();
        for (u32 k = 0; k < kTileK / 16; ++k) {
            const u64 a = tensor_descriptor(at + 32 * k, 0, 1024, 2);
            const u64 b = tensor_descriptor(at + kBytesA + 32 * k, 0, 1024, 2);
            tensor_mma<1>(acc, a, b, tensor_instruction(kTileM, kTileN), i + k > 0);
        }
        tensor_commit<1>(smem + kEmpty + 8 * stage);
    }
    tensor_commit<1>(smem + kAccFull);
}

__device__ void store(u32 smem, u32 acc, float* out, u32 n, const Watch& watch) {
    const u32 quadrant = threadIdx.x / 32 % 4, row = blockIdx.x * kTileM + quadrant * 32 + threadIdx.x % 32;
    mbarrier_wait(smem + kAccFull, 0, watch);
    tensor_fence_after();
    for (u32 column = 0; column < kTileN; column += 8) {
        u32 r[8];
        tensor_load_32x32b_x8(r, acc + (quadrant * 32 << 16) + column);
        tensor_wait_loads();
        for (u32 i = 0; i < 8; ++i) out[row * n + blockIdx.y * kTileN + column + i] = __uint_as_float(r[i]);
    }
}

extern "C" __global__ void __launch_bounds__(192) kernel_test(
    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, float* out, u32 n, u32 k, u64* record,
    const u16*, const u16*) {
    const u32 smem = smem_base(), warp = threadIdx.x / 32;
    const Watch watch{record, 1};
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < kStages; ++stage) {
            mbarrier_init(smem + kFull + 8 * stage, 1);
            mbarrier_init(smem + kEmpty + 8 * stage, 1);
        }
        mbarrier_init(smem + kAccFull, 1);
        fence_mbarrier_init();
    }
    if (warp == 1) {
        tensor_alloc<1>(smem + kBase, kColumns);
        tensor_relinquish<1>();
    }
    tensor_fence_before();
    __syncthreads();
    tensor_fence_after();
    const u32 acc = tensor_base(smem + kBase);
    if (warp == 0) {
        if (lane_id() == 0) load(smem, a, b, k / kTileK, watch);
    } else if (warp == 1) {
        if (lane_id() == 0) multiply(smem, acc, k / kTileK, watch);
    } else {
        store(smem, acc, out, n, watch);
    }
    tensor_fence_before();
    __syncthreads();
    tensor_fence_after();
    if (warp == 1) tensor_dealloc<1>(acc, kColumns);
}
