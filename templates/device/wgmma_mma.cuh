#pragma once

#include "device/wgmma.cuh"

// One width of wgmma_m64_k16.

namespace cake {

template <>
__device__ __forceinline__ void wgmma_m64_k16<${n | i32}>(float (&d)[${(n // 2) | i32}], u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n${n | i32}k16.f32.bf16.bf16 {"
//% for row in range(0, n // 2, 16)
        "${(", " if row else "") | code}%${range(row, [row + 16, n // 2] | min) | map("i32") | join(", %") | code}"
//% endfor
        "}, %${(n // 2) | i32}, %${(n // 2 + 1) | i32}, 1, 1, 1, 0, 0;"
        : "+f"(d[${range(0, 4) | map("i32") | join(']), "+f"(d[') | code}])
//% for row in range(4, n // 2, 4)
          , "+f"(d[${range(row, row + 4) | map("i32") | join(']), "+f"(d[') | code}])
//% endfor
        : "l"(a), "l"(b));
}

}  // namespace cake
