#pragma once

#include "device/base.cuh"

// between CTAs and between launches: PTX ISA 9.7.13.13 griddepcontrol, 9.7.13.5 atom, 9.7.9.8 ld.

namespace cake {

// Until every earlier grid of a programmatic chain has completed and its writes are visible; at once otherwise.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Dependents may be scheduled once every CTA has issued this or ended. It publishes nothing.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Adds one, and wraps to 0 after `last`: the last of last + 1 arrivals leaves the counter as it was found.
__device__ __forceinline__ u32 atomic_inc_acq_rel_gpu(u32* counter, u32 last) {
    u32 before;
    chaos_point(11);
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
    return before;
}

__device__ __forceinline__ u32 atomic_add_acq_rel_gpu(u32* counter, u32 value) {
    u32 before;
    chaos_point(17);
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
    return before;
}

// As atomic_add_acq_rel_gpu, for a caller that does not wait for what was there: it publishes, and acquires nothing.
__device__ __forceinline__ void reduce_add_release_gpu(u32* counter, u32 value) {
    chaos_point(23);
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

__device__ __forceinline__ void st_relaxed_gpu(u32* address, u32 value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ u32 ld_acquire_gpu(const u32* address) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

// Until the counter has wrapped to 0: every CTA of the grid has arrived. The caller's own CTA must have arrived
// before.
__device__ __forceinline__ void counter_wait_wrapped(const u32* counter, const Watch& watch) {
    chaos_point(13);
    WaitClock<kGridPatience> clock;
    for (u32 seen = ld_acquire_gpu(counter); seen != 0; seen = ld_acquire_gpu(counter)) {
        if (clock.expired(watch)) {
            report_and_trap(watch, kGridCounter, 0, seen);
        }
    }
}

// Until the counter has reached a value that it does not pass.
__device__ __forceinline__ void counter_wait_reached(const u32* counter, u32 value, const Watch& watch) {
    chaos_point(19);
    WaitClock<kGridPatience> clock;
    for (u32 seen = ld_acquire_gpu(counter); seen != value; seen = ld_acquire_gpu(counter)) {
        if (clock.expired(watch)) {
            report_and_trap(watch, kGridCounter, value, seen);
        }
    }
}

}  // namespace cake
