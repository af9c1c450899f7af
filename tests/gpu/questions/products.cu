// wgmma: what it adds up, and which bytes it reads.

constexpr u32 kRows = 64;
constexpr u32 kRowBytes = 128;  // 64 bf16, the width of the swizzle
constexpr u32 kRightOffset = kRows * kRowBytes;

__device__ __forceinline__ void copy_to_shared(u32 address, const u8* source, u32 bytes) {
    for (u32 byte = threadIdx.x * 16; byte < bytes; byte += blockDim.x * 16) {
        st_shared_v4(address + byte, ld_global_v4(source + byte));
    }
}

// Where this thread's accumulators lie in a row-major [64, kN] matrix: the first one, and each one from there.
template <u32 kN>
__device__ __forceinline__ u32 fragment_start() {
    return (threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) * kN + 2 * (threadIdx.x % 4);
}

template <u32 kN>
__device__ __forceinline__ constexpr u32 fragment_step(u32 i) {
    return 8 * (i >> 1 & 1) * kN + 8 * (i >> 2) + (i & 1);
}

// CTA i: d = c + a b^T with kSteps instructions of K = 16. a, b: images of swizzled shared memory, [64, 64] and
// [kN, 64] bf16; c, d: [64, kN] fp32.
template <u32 kN, u32 kSteps>
__device__ __forceinline__ void add_products(const u8* a, const u8* b, const float* c, float* d) {
    const u32 left = smem_base();
    const u32 right = left + kRightOffset;
    copy_to_shared(left, a + blockIdx.x * kRows * kRowBytes, kRows * kRowBytes);
    copy_to_shared(right, b + blockIdx.x * kN * kRowBytes, kN * kRowBytes);
    c += blockIdx.x * kRows * kN + fragment_start<kN>();
    d += blockIdx.x * kRows * kN + fragment_start<kN>();
    float sums[kN / 2];
#pragma unroll
    for (u32 i = 0; i < kN / 2; ++i) {
        sums[i] = c[fragment_step<kN>(i)];
    }
    fence_proxy_async_shared();
    __syncthreads();
    wgmma_pin(sums);
    wgmma_fence();
#pragma unroll
    for (u32 step = 0; step < kSteps; ++step) {
        wgmma_m64_k16<kN>(sums, wgmma_descriptor(left) + 2 * step, wgmma_descriptor(right) + 2 * step);
    }
    wgmma_commit_group();
    wgmma_pin(sums);
    wgmma_wait_group<0>();
    wgmma_pin(sums);
#pragma unroll
    for (u32 i = 0; i < kN / 2; ++i) {
        d[fragment_step<kN>(i)] = sums[i];
    }
}

extern "C" __global__ void __launch_bounds__(128) kernel_add_8_1(const u8* a, const u8* b, const float* c, float* d) {
    add_products<8, 1>(a, b, c, d);
}

extern "C" __global__ void __launch_bounds__(128) kernel_add_64_1(const u8* a, const u8* b, const float* c, float* d) {
    add_products<64, 1>(a, b, c, d);
}

extern "C" __global__ void __launch_bounds__(128) kernel_add_256_1(const u8* a, const u8* b, const float* c, float* d) {
    add_products<256, 1>(a, b, c, d);
}

extern "C" __global__ void __launch_bounds__(128) kernel_add_64_4(const u8* a, const u8* b, const float* c, float* d) {
    add_products<64, 4>(a, b, c, d);
}

// CTA i: `requests[i]` = bytes from a multiple of 1024 to the start of b, bits for the descriptor's upper half. a is the
// identity, so d[k, n] is element (n, k) of b as it was read; b is [16, 16]. The 8192 bytes behind a hold `image`.
extern "C" __global__ void __launch_bounds__(128)
    kernel_read_b(const u8* a, const u8* image, const u32* requests, float* d) {
    const u32 left = smem_base();
    const u32 right = left + kRightOffset;
    copy_to_shared(left, a, kRows * kRowBytes);
    copy_to_shared(right, image, 8192);
    float sums[8] = {};
    fence_proxy_async_shared();
    __syncthreads();
    const u64 start = wgmma_descriptor(right + requests[2 * blockIdx.x]);
    const u64 descriptor = start + (static_cast<u64>(requests[2 * blockIdx.x + 1]) << 32);
    wgmma_pin(sums);
    wgmma_fence();
    wgmma_m64_k16<16>(sums, wgmma_descriptor(left), descriptor);
    wgmma_commit_group();
    wgmma_pin(sums);
    wgmma_wait_group<0>();
    wgmma_pin(sums);
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        d[blockIdx.x * kRows * 16 + fragment_start<16>() + fragment_step<16>(i)] = sums[i];
    }
}
