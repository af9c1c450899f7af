#pragma once

#include "device/base.cuh"

// tensor memory: 128 lanes of 512 columns of 32 bits an SM; an address is lane << 16 | column.

namespace cake {

// PTX ISA 9.7.16.7: a whole warp takes `kColumns` (a power of two, 32 to 512) and writes their address to shared
// memory. It waits for as long as other CTAs of the SM hold too many.
template <u32 kColumns>
__device__ __forceinline__ void tensor_memory_alloc(u32 address_word) {
    chaos_point(address_word);
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(address_word), "n"(kColumns)
                 : "memory");
}

// What tensor_memory_alloc wrote; a barrier must lie between the two.
__device__ __forceinline__ u32 tensor_memory_address(u32 address_word) {
    u32 address;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(address) : "r"(address_word) : "memory");
    return address;
}

// This CTA takes no more, so that the next one on the SM may.
__device__ __forceinline__ void tensor_memory_relinquish() {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}

// Every access of the CTA must be complete. A kernel gives all of it back.
template <u32 kColumns>
__device__ __forceinline__ void tensor_memory_dealloc(u32 address) {
    chaos_point(address);
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "n"(kColumns) : "memory");
}

// Loads 16 lanes from `address` on, of 2 * kRegisters columns. A warp reaches the 32 lanes from 32 * (its index % 4)
// on. In lane l register i holds lane l / 4 + 8 ((i >> 1) & 1), column 8 (i >> 2) + 2 (l % 4) + (i & 1) (PTX ISA
// 9.7.16.2.3), which is also how wgmma leaves its sums. The values are there after tensor_memory_wait_load.
template <u32 kRegisters>
__device__ void tensor_memory_load_16x256b(float (&d)[kRegisters], u32 address);

//% for registers in [4, 8, 16, 32, 64]
template <>
__device__ __forceinline__ void tensor_memory_load_16x256b<${registers | i32}>(
    float (&d)[${registers | i32}], u32 address) {
    asm volatile(
        "tcgen05.ld.sync.aligned.16x256b.x${(registers // 4) | i32}.b32 {"
//% for row in range(0, registers, 16)
        "${(", " if row else "") | code}%${range(row, [row + 16, registers] | min) | map("i32") | join(", %") | code}"
//% endfor
        "}, [%${registers | i32}];"
        : "=f"(d[${range(0, 4) | map("i32") | join(']), "=f"(d[') | code}])
//% for row in range(4, registers, 4)
          , "=f"(d[${range(row, row + 4) | map("i32") | join(']), "=f"(d[') | code}])
//% endfor
        : "r"(address)
        : "memory");
}

//% endfor
// Until this thread's loads are complete. The empty statements keep the compiler from using a register before that.
template <u32 kRegisters>
__device__ __forceinline__ void tensor_memory_wait_load(float (&d)[2][kRegisters]) {
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
#pragma unroll
    for (u32 i = 0; i < kRegisters; ++i) {
        asm volatile("" : "+f"(d[0][i]), "+f"(d[1][i])::"memory");
    }
}

}  // namespace cake
