#pragma once

#include "device/base.cuh"

// clusters: PTX ISA 9.7.13.3 barrier.cluster, 9.7.9.23 mapa, 9.7.9.12 st.async.

namespace cake {

__device__ __forceinline__ u32 cluster_ctarank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_arrive() {
    chaos_point(7);
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    chaos_point(19);
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address that names `address` (own CTA) in the CTA of that rank.
__device__ __forceinline__ u32 mapa(u32 address, u32 rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

// Stores 16 bytes to another CTA and completes 16 bytes on its barrier.
__device__ __forceinline__ void st_async_v4(u32 destination, const Vec4& value, u32 barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
        :
        : "r"(destination), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier)
        : "memory");
}

}  // namespace cake
