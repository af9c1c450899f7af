#pragma once

#include "device/base.cuh"

// mbarrier: PTX ISA 9.7.13.15.

namespace cake {

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// 9.7.13.4: makes the initialisations visible to the cluster; a cluster barrier or __syncthreads must follow.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    chaos_point(barrier);
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Expects `bytes` more in this phase, then arrives once.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
    chaos_point(barrier + 1);
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// `barrier` is an address in another CTA of the cluster (mapa).
__device__ __forceinline__ void mbarrier_arrive_cluster(u32 barrier) {
    chaos_point(barrier + 2);
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same where only reads must come before: a ring stage that this CTA has finished with. The unqualified form
// releases at CTA scope and needs no memory barrier; release.cluster costs one of about 0.5 us at each arrival
// (measured, H200).
__device__ __forceinline__ void mbarrier_arrive_cluster_after_reads(u32 barrier) {
    chaos_point(barrier + 4);
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// True once the phase of that parity is complete; may be false spuriously.
__device__ __forceinline__ bool mbarrier_try_wait(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

__device__ __forceinline__ bool mbarrier_try_wait_cluster(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

// Waits for arrivals of this CTA and for bulk copies.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity, const Watch& watch) {
    chaos_point(barrier + 3 + parity);
    WaitClock<kLocalPatience> clock;
    while (!mbarrier_try_wait(barrier, parity)) {
        if (clock.expired(watch)) {
            report_and_trap(watch, (barrier - smem_base()) / 8, parity, 0);
        }
    }
}

// Waits for arrivals or stores of another CTA of the cluster.
__device__ __forceinline__ void mbarrier_wait_cluster(u32 barrier, u32 parity, const Watch& watch) {
    chaos_point(barrier + 5 + parity);
    WaitClock<kClusterPatience> clock;
    while (!mbarrier_try_wait_cluster(barrier, parity)) {
        if (clock.expired(watch)) {
            report_and_trap(watch, (barrier - smem_base()) / 8, parity, 0);
        }
    }
}

}  // namespace cake
