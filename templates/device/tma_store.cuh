#pragma once

#include "device/base.cuh"

// tensor copies to global memory: PTX ISA 9.7.9.27, and 9.7.9.25 for their groups.

namespace cake {

// Stores one box whose corner is element (x, y, z) from this CTA's shared memory; parts out of bounds are dropped. What
// the source holds must be fenced for the asynchronous proxy before.
__device__ __forceinline__ void tma_store_3d(const TensorMap& map, i32 x, i32 y, i32 z, u32 source) {
    chaos_point(source + z);
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];"
        :
        : "l"(&map), "r"(x), "r"(y), "r"(z), "r"(source)
        : "memory");
}

__device__ __forceinline__ void bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until at most `kPending` of the newest groups of this thread are unfinished: sources read, and writes done.
template <u32 kPending>
__device__ __forceinline__ void bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace cake
