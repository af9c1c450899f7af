#pragma once

#include "device/base.cuh"

// tcgen05: the tensor core of sm_100a and sm_103a, PTX ISA 9.7.16. One thread issues for its CTA.

namespace cake {

// PTX ISA 9.7.13.16, elect.sync: true in one lane of a whole warp. ptxas then knows that a single thread issues, and
// writes no loop over the active lanes.
__device__ __forceinline__ bool elect_one() {
    u32 elected;
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "elect.sync _|p, 0xffffffff;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t"
        "}"
        : "=r"(elected)
        :
        : "memory");
    return elected != 0;
}

// Descriptor of a K-major bf16 tile in shared memory with the 128-byte swizzle (PTX ISA 9.7.16.4.1): start address in
// 16-byte units, 1024 bytes (64 units) between groups of 8 rows, constant 1 from bit 46 on, swizzle code 2 from bit 61
// on. The start is CTA-relative, hence the mask.
__device__ __forceinline__ u64 tcgen05_descriptor(u32 address) {
    constexpr u64 kStrideAndSwizzle = (u64{2} << 61) | (u64{1} << 46) | (u64{64} << 32);
    return kStrideAndSwizzle | ((address & 0x3FFFF) >> 4);
}

// Instruction descriptor of kind::f16 (PTX ISA 9.7.16.4.2): fp32 accumulators, bf16 operands, both K-major, N in units
// of 8 from bit 17 on, M in units of 16 from bit 24 on.
__device__ constexpr u32 tcgen05_shape(u32 m, u32 n) {
    return (1u << 4) | (1u << 7) | (1u << 10) | ((n / 8) << 17) | ((m / 16) << 24);
}

// d[m, n] (+)= a[m, 16] @ b[n, 16]^T (PTX ISA 9.7.16.10.9). d is read only where `accumulate` is set. Products of one
// thread into the same accumulator, of one shape, follow each other (9.7.16.6.2).
__device__ __forceinline__ void tcgen05_mma_f16(u32 d, u64 a, u64 b, u32 shape, bool accumulate) {
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "setp.ne.u32 p, %4, 0;\n\t"
        "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n\t"
        "}"
        :
        : "r"(d), "l"(a), "l"(b), "r"(shape), "r"(static_cast<u32>(accumulate))
        : "memory");
}

// Arrives once on `barrier` when all earlier products of this thread are complete: their operands are read, their
// sums are in tensor memory (PTX ISA 9.7.16.12).
__device__ __forceinline__ void tcgen05_commit(u32 barrier) {
    chaos_point(barrier);
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
                 : "memory");
}

// PTX ISA 9.7.16.11: this thread's earlier accesses to tensor memory come before what it signals next.
__device__ __forceinline__ void tcgen05_fence_before_thread_sync() {
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

// The other end: this thread's later accesses come after what it has waited for.
__device__ __forceinline__ void tcgen05_fence_after_thread_sync() {
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

}  // namespace cake
