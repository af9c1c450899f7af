#pragma once

#include "device/base.cuh"

// bf16 as raw bits, and the approximations: PTX ISA 9.7.3 and 9.7.9.21.

namespace cake {

__device__ __forceinline__ float bits_to_float(u32 bits) {
    return __uint_as_float(bits);
}

__device__ __forceinline__ u32 float_to_bits(float value) {
    return __float_as_uint(value);
}

// Exact: a bf16 is the upper half of an fp32.
__device__ __forceinline__ float bf16_low(u32 pair) {
    return bits_to_float(pair << 16);
}

__device__ __forceinline__ float bf16_high(u32 pair) {
    return bits_to_float(pair & 0xFFFF0000u);
}

// Round to nearest even; `low` goes to bits 0 to 15. The instruction takes the upper half first.
__device__ __forceinline__ u32 cvt_rn_bf16x2(float high, float low) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float div_rn(float a, float b) {
    float quotient;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
    return quotient;
}

__device__ __forceinline__ float sqrt_rn(float a) {
    float root;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(root) : "f"(a));
    return root;
}

// Relative error at most 2^-11.
__device__ __forceinline__ float tanh_approx(float a) {
    float value;
    asm("tanh.approx.f32 %0, %1;" : "=f"(value) : "f"(a));
    return value;
}

// 2 ulp.
__device__ __forceinline__ float ex2_approx(float a) {
    float value;
    asm("ex2.approx.f32 %0, %1;" : "=f"(value) : "f"(a));
    return value;
}

// 1 ulp.
__device__ __forceinline__ float rcp_approx(float a) {
    float value;
    asm("rcp.approx.f32 %0, %1;" : "=f"(value) : "f"(a));
    return value;
}

// SiTU(gate, up) = beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta), all in fp32.
__device__ __forceinline__ float situ(float gate, float up, float beta, float linear_beta) {
    const float sigmoid = rcp_approx(1.0f + ex2_approx(gate * -1.4426950408889634f));
    const float bounded_gate = beta * tanh_approx(gate * (1.0f / beta));
    const float bounded_up = linear_beta * tanh_approx(up * (1.0f / linear_beta));
    return bounded_gate * sigmoid * bounded_up;
}

}  // namespace cake
