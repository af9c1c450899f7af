#pragma once

#include "device/base.cuh"
#include "device/math.cuh"

// What becomes of a sum in fp32, or of a gate sum and the up sum beside it; what is stored is rounded once more.

namespace cake {

// Whether a tile of the activation's weight rows is half gate rows, half up rows. A function of each activation says
// so: a member would be a word of global memory in every program.
template <class Cfg>
inline constexpr bool kGated = Cfg::Activation::is_gated();

__device__ __forceinline__ float sigmoid(float a) {
    return rcp_approx(1.0f + ex2_approx(a * -1.4426950408889634f));
}

struct Situ {
    static constexpr __device__ bool is_gated() {
        return true;
    }

    template <class Cfg>
    static __device__ __forceinline__ float of(float gate, float up) {
        return situ(gate, up, Cfg::kSituBeta, Cfg::kSituLinearBeta);
    }
};

struct Swiglu {
    static constexpr __device__ bool is_gated() {
        return true;
    }

    template <class Cfg>
    static __device__ __forceinline__ float of(float gate, float up) {
        return gate * sigmoid(gate) * up;
    }
};

// 1 + tanh(z) = 2 sigmoid(2 z): where z is large and negative, the sum of the left cancels and an approximate tanh is
// all that is left of it.
struct GegluTanh {
    static constexpr __device__ bool is_gated() {
        return true;
    }

    template <class Cfg>
    static __device__ __forceinline__ float of(float gate, float up) {
        const float z = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
        return gate * sigmoid(2.0f * z) * up;
    }
};

// The square of what is already bf16: torch's bf16 steps round there too.
struct Relu2 {
    static constexpr __device__ bool is_gated() {
        return false;
    }

    template <class Cfg>
    static __device__ __forceinline__ float of(float up) {
        const float rounded = bf16_low(cvt_rn_bf16x2(0.0f, up));
        return rounded < 0.0f ? 0.0f : rounded * rounded;  // a NaN stays one
    }
};

}  // namespace cake
