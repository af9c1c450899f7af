// Lanes, addresses, clocks, approximations.

// CTA i: the lanes of `masks[i]` of both warps elect. `elected[i][warp]` = the lane as the instruction names it,
// `leaders[i][warp]` = lanes whose predicate is true, as bits. PTX ISA 9.7.13.14 elect.sync.
extern "C" __global__ void kernel_elect(const u32* masks, u32* elected, u32* leaders) {
    const u32 mask = masks[blockIdx.x];
    const u32 slot = blockIdx.x * 2 + threadIdx.x / 32;
    if (!(mask >> (threadIdx.x % 32) & 1)) {
        return;
    }
    u32 lane;
    u32 leads;
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "elect.sync %0|p, %2;\n\t"
        "selp.u32 %1, 1, 0, p;\n\t"
        "}"
        : "=r"(lane), "=r"(leads)
        : "r"(mask));
    if (leads) {
        elected[slot] = lane;
        leaders[slot] = 1u << (threadIdx.x % 32);
    }
}

// `seen[CTA]` = rank, address of dynamic shared memory, and that address in each CTA of the cluster of 4.
extern "C" __global__ void kernel_window(u32* seen) {
    if (threadIdx.x == 0) {
        seen += blockIdx.x * 6;
        seen[0] = cluster_ctarank();
        seen[1] = smem_base();
        for (u32 rank = 0; rank < 4; ++rank) {
            seen[2 + rank] = mapa(smem_base(), rank);
        }
    }
}

// `times[i]` = the i-th reading of the clock by one thread, one after the other.
extern "C" __global__ void kernel_clock(u64* times, i32 count) {
    if (threadIdx.x == 0) {
        for (i32 i = 0; i < count; ++i) {
            times[i] = globaltimer_ns();
        }
    }
}

// Element by element: 0 ex2.approx, 1 rcp.approx, 2 tanh.approx, 3 sqrt.rn, 4 x / y rounded.
extern "C" __global__ void kernel_functions(const float* x, const float* y, float* out, i32 count, i32 function) {
    const i32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) {
        return;
    }
    switch (function) {
        case 0: out[i] = ex2_approx(x[i]); break;
        case 1: out[i] = rcp_approx(x[i]); break;
        case 2: out[i] = tanh_approx(x[i]); break;
        case 3: out[i] = sqrt_rn(x[i]); break;
        default: out[i] = div_rn(x[i], y[i]); break;
    }
}
