#pragma once

#include "device/base.cuh"

// cluster launch control: a running cluster takes the place of one that has not started.

namespace cake {

// PTX ISA 9.7.13.17: 16 bytes of answer to `response`, and their count to `barrier`, at these offsets in every CTA of
// the cluster. One thread of the cluster asks, and none after a refusal was seen.
__device__ __forceinline__ void try_cancel_cluster(u32 response, u32 barrier) {
    chaos_point(barrier);
    asm volatile(
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128"
        " [%0], [%1];"
        :
        : "r"(response), "r"(barrier)
        : "memory");
}

// PTX ISA 9.7.13.18: blockIdx.x of the first CTA of the cluster that will not start; kNoCluster: the request failed.
constexpr u32 kNoCluster = 0xFFFFFFFF;

__device__ __forceinline__ u32 query_cancelled_cluster(u32 response) {
    u32 first;
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        ".reg .b128 answer;\n\t"
        "ld.shared.b128 answer, [%1];\n\t"
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, answer;\n\t"
        "mov.u32 %0, 0xffffffff;\n\t"
        "@p clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %0, answer;\n\t"
        "}"
        : "=r"(first)
        : "r"(response)
        : "memory");
    return first;
}

}  // namespace cake
