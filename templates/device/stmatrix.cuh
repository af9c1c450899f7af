#pragma once

#include "device/base.cuh"

// stmatrix: PTX ISA 9.7.14.5.16.

namespace cake {

// Stores four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(u32 row_address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(row_address), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// Stores two; lanes 0 to 15 give the addresses of their rows.
__device__ __forceinline__ void stmatrix_x2(u32 row_address, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(row_address), "r"(a), "r"(b)
                 : "memory");
}

// Stores two 8x8 matrices of 16-bit elements transposed; lanes 0 to 15 give the addresses of their rows.
__device__ __forceinline__ void stmatrix_x2_trans(u32 row_address, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row_address), "r"(a), "r"(b)
                 : "memory");
}

// Four matrices; all lanes give addresses.
__device__ __forceinline__ void stmatrix_x4_trans(u32 row_address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(row_address), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

}  // namespace cake
