#pragma once

#include "device/base.cuh"

// 16-byte accesses and packed stores.

namespace cake {

// PTX ISA 9.7.9.8, ld: read again soon, so better kept in L1. Not `.nc`: an earlier launch of a programmatic chain may
// have written it while this one already ran.
__device__ __forceinline__ Vec4 ld_global_kept_v4(const void* address) {
    Vec4 value;
    asm volatile("ld.global.L1::evict_last.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address)
                 : "memory");
    return value;
}

// PTX ISA 9.7.9.8, ld: streamed once, so not kept in L1. Volatile: the order against barrier arrivals is meant.
__device__ __forceinline__ Vec4 ld_global_v4(const void* address) {
    Vec4 value;
    asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ void st_global_v4(void* address, const Vec4& value) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

__device__ __forceinline__ void st_global_v2_f32(void* address, float x, float y) {
    asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ Vec4 ld_shared_v4(u32 address) {
    Vec4 value;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ void st_shared_v4(u32 address, const Vec4& value) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

__device__ __forceinline__ void st_shared_f32(u32 address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

}  // namespace cake
