// mbarriers: when a phase is complete, how many bytes a box counts, and where its elements land.

// PTX ISA 9.7.13.15.5 expect_tx, 9.7.13.15.6 complete_tx, 9.7.13.15.16 test_wait.
__device__ __forceinline__ void expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void complete_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ u32 test_parity(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}

// CTA i runs `steps[i][num_steps]` pairs (operation, value) on a barrier of `counts[i]` arrivals. `seen[i]` gets
// 1 + num_steps words: bit 0, parity 0 is complete; bit 1, parity 1 is.
extern "C" __global__ void kernel_steps(const u32* steps, const u32* counts, u32* seen, i32 num_steps) {
    const u32 barrier = smem_base();
    if (threadIdx.x != 0) {
        return;
    }
    mbarrier_init(barrier, counts[blockIdx.x]);
    steps += blockIdx.x * num_steps * 2;
    seen += blockIdx.x * (num_steps + 1);
    for (i32 step = 0; step <= num_steps; ++step) {
        seen[step] = test_parity(barrier, 0) | test_parity(barrier, 1) << 1;
        if (step == num_steps) {
            return;
        }
        const u32 value = steps[2 * step + 1];
        switch (steps[2 * step]) {
            case 1: mbarrier_arrive(barrier); break;
            case 2: expect_tx(barrier, value); break;
            case 3: complete_tx(barrier, value); break;
            case 4: mbarrier_arrive_expect_tx(barrier, value); break;
            default: break;
        }
    }
}

constexpr u32 kBoxOffset = 1024;      // bytes; the barrier lies before it
constexpr u32 kRegionBytes = 4096;    // where a box may land
constexpr u64 kLandingNs = 20000;     // longer than any copy of this size takes

__device__ __forceinline__ void sleep_ns(u64 duration) {
    const u64 start = globaltimer_ns();
    while (globaltimer_ns() - start < duration) {
    }
}

// CTA i: `requests[i]` = x, y, z, bytes from the start of the region, bytes to expect. The copy is issued before
// anything is expected, and has landed when the expectation and the only arrival come. `done[i]`: the phase is complete.
// `dump[i]`: the region afterwards. `base[0]`: the region's shared address.
extern "C" __global__ void kernel_box(
    const __grid_constant__ TensorMap map, const i32* requests, u32* done, u8* dump, u32* base) {
    const u32 barrier = smem_base();
    const u32 region = barrier + kBoxOffset;
    requests += blockIdx.x * 5;
    for (u32 byte = threadIdx.x * 16; byte < kRegionBytes; byte += blockDim.x * 16) {
        st_shared_v4(region + byte, Vec4{0xEEEEEEEE, 0xEEEEEEEE, 0xEEEEEEEE, 0xEEEEEEEE});
    }
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
    }
    fence_proxy_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
        base[0] = region;
        tma_load_3d(region + requests[3], map, requests[0], requests[1], requests[2], barrier);
        sleep_ns(kLandingNs);
        mbarrier_arrive_expect_tx(barrier, requests[4]);
        const u64 start = globaltimer_ns();
        u32 complete = test_parity(barrier, 0);
        while (!complete && globaltimer_ns() - start < kLandingNs) {
            complete = test_parity(barrier, 0);
        }
        done[blockIdx.x] = complete;
    }
    __syncthreads();
    for (u32 byte = threadIdx.x * 16; byte < kRegionBytes; byte += blockDim.x * 16) {
        st_global_v4(dump + blockIdx.x * kRegionBytes + byte, ld_shared_v4(region + byte));
    }
}
