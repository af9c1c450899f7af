#pragma once

#include "device/base.cuh"

// wgmma: PTX ISA 9.7.15. Only sm_90a has it.

namespace cake {

// Descriptor of a K-major bf16 tile in shared memory with the 128-byte swizzle (PTX ISA 9.7.15.5.1.2): start address
// in 16-byte units, 1024 bytes (64 units) between groups of 8 rows, swizzle code 1. The start is CTA-relative, hence
// the mask.
__device__ __forceinline__ u64 wgmma_descriptor(u32 address) {
    constexpr u64 kStrideAndSwizzle = (u64{1} << 62) | (u64{64} << 32) | (u64{1} << 16);
    return kStrideAndSwizzle | ((address & 0x3FFFF) >> 4);
}

// Before the first wgmma, and after other code has touched the accumulators.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Emits no instruction: the accumulators hold their values here, so that the compiler moves no copy of them between a
// fence and its wgmma, or in front of a wait (it would then inject its own, C7517 and C7519).
template <u32 kRegisters>
__device__ __forceinline__ void wgmma_pin(float (&d)[kRegisters]) {
#pragma unroll
    for (u32 i = 0; i < kRegisters; ++i) {
        asm volatile("" : "+f"(d[i])::"memory");
    }
}

// Until at most `kPending` of the newest groups are unfinished.
template <u32 kPending>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// d[64, kN] += a[64, 16] @ b[kN, 16]^T with fp32 accumulation. In thread t of the warpgroup (w = t / 32, l = t % 32)
// register i holds row 16 w + l / 4 + 8 ((i >> 1) & 1), column 8 (i >> 2) + 2 (l % 4) + (i & 1) (PTX ISA
// 9.7.15.5.1).
template <u32 kN>
__device__ void wgmma_m64_k16(float (&d)[kN / 2], u64 a, u64 b);

// Moves registers between warpgroups (PTX ISA 9.7.19.5): every warp of the warpgroup executes it; `inc` blocks until
// the pool holds enough.
template <u32 kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <u32 kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace cake
