#pragma once

#include "device/base.cuh"

// 32-byte stores: PTX ISA 9.7.9.11, st.v8.b32 to global memory (sm_100 on).

namespace cake {

__device__ __forceinline__ void st_global_v8(void* address, const u32 (&words)[8]) {
    asm volatile("st.global.v8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};"
                 :
                 : "l"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(words[4]),
                   "r"(words[5]), "r"(words[6]), "r"(words[7])
                 : "memory");
}

}  // namespace cake
