#pragma once

#include "device/base.cuh"

// tcgen05 for a pair of CTAs (cta_group::2): one thread of the even CTA issues for both, PTX ISA 9.7.16.5.

namespace cake {

// PTX ISA 9.7.16.7: the same warp of both CTAs takes the same columns, and waits for the other.
template <u32 kColumns>
__device__ __forceinline__ void tensor_memory_alloc_pair(u32 address_word) {
    chaos_point(address_word);
    asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(address_word), "n"(kColumns)
                 : "memory");
}

__device__ __forceinline__ void tensor_memory_relinquish_pair() {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::: "memory");
}

// Every access of both CTAs must be complete.
template <u32 kColumns>
__device__ __forceinline__ void tensor_memory_dealloc_pair(u32 address) {
    chaos_point(address);
    asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(address), "n"(kColumns) : "memory");
}

// d[m, n] (+)= a[m, 16] @ b[n, 16]^T (PTX ISA 9.7.16.10.9). Descriptors and `d` hold in both CTAs: each has half of the
// rows of a and of d, and half of the rows of b, which both read. d is read only where `accumulate` is set.
__device__ __forceinline__ void tcgen05_mma_f16_pair(u32 d, u64 a, u64 b, u32 shape, bool accumulate) {
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "setp.ne.u32 p, %4, 0;\n\t"
        "tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p;\n\t"
        "}"
        :
        : "r"(d), "l"(a), "l"(b), "r"(shape), "r"(static_cast<u32>(accumulate))
        : "memory");
}

// Arrives once on the barrier at this offset in both CTAs when all earlier products of this thread are complete (PTX
// ISA 9.7.16.12).
__device__ __forceinline__ void tcgen05_commit_pair(u32 barrier) {
    chaos_point(barrier);
    constexpr u16 kBoth = 3;
    asm volatile(
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;"
        :
        : "r"(barrier), "h"(kBoth)
        : "memory");
}

// Loads 32 lanes from `address` on, of 16 columns: register i of lane l holds lane l, column i (PTX ISA 9.7.16.2.3). A
// warp reaches the 32 lanes from 32 * (its index % 4) on. The values are there after tensor_memory_wait_load.
__device__ __forceinline__ void tensor_memory_load_32x32b(float (&d)[16], u32 address) {
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x16.b32 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, [%16];"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
          , "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7])
          , "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11])
          , "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15])
        : "r"(address)
        : "memory");
}

}  // namespace cake
