#pragma once

#include "device/base.cuh"

// tensor copies of a pair of CTAs, PTX ISA 9.7.9.27 with .cta_group::2.

namespace cake {

// As tma_load_3d to this CTA's shared memory; `barrier` may be the other CTA's of the pair (mapa).
__device__ __forceinline__ void tma_load_3d_pair(
    u32 destination, const TensorMap& map, i32 x, i32 y, i32 z, u32 barrier) {
    chaos_point(destination + z);
    asm volatile(
        "cp.async.bulk.tensor.3d.cta_group::2.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %4}], [%5];"
        :
        : "r"(destination), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}

// PTX ISA 9.7.9.19, createpolicy: what is read so is the first to leave L2.
__device__ __forceinline__ u64 evict_first_policy() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void tma_load_3d_pair_hint(
    u32 destination, const TensorMap& map, i32 x, i32 y, i32 z, u32 barrier, u64 policy) {
    chaos_point(destination + z);
    asm volatile(
        "cp.async.bulk.tensor.3d.cta_group::2.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4}], [%5], %6;"
        :
        : "r"(destination), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
        : "memory");
}

}  // namespace cake
