#pragma once

#include "device/base.cuh"

// tensor and bulk copies: PTX ISA 9.7.9.25 to 9.7.9.27; proxies: 9.7.13.4.

namespace cake {

__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Loads one box whose corner is element (x, y, z), fastest dimension first; `barrier` gets the bytes of the whole
// box, parts out of bounds included (they arrive as zeros).
__device__ __forceinline__ void tma_load_3d(
    u32 destination, const TensorMap& map, i32 x, i32 y, i32 z, u32 barrier) {
    chaos_point(destination + z);
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %4}], [%5];"
        :
        : "r"(destination), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}

// The same box to every CTA of the cluster whose bit is set, at the same offset, and its bytes to each one's barrier.
__device__ __forceinline__ void tma_load_3d_multicast(
    u32 destination, const TensorMap& map, i32 x, i32 y, i32 z, u32 barrier, u16 cta_mask) {
    chaos_point(destination + z);
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3, %4}], [%5], %6;"
        :
        : "r"(destination), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(cta_mask)
        : "memory");
}

// Copies `bytes` (a multiple of 16) from global to this CTA's shared memory.
__device__ __forceinline__ void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier) {
    chaos_point(destination);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :
        : "r"(destination), "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

// PTX ISA 9.7.9.25.5.3: brings bytes of global memory to L2, in multiples of 16; it changes nothing else.
__device__ __forceinline__ void bulk_prefetch_l2(const void* source, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

// Orders this thread's generic accesses to shared memory with later accesses of the asynchronous proxy (wgmma,
// copies).
__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory.
__device__ __forceinline__ void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace cake
