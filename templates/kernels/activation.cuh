#pragma once

#include "device/base.cuh"
#include "device/math.cuh"

// What becomes of a gate sum and the up sum beside it, in fp32; what is stored is rounded once.

namespace cake {

__device__ __forceinline__ float sigmoid(float a) {
    return rcp_approx(1.0f + ex2_approx(a * -1.4426950408889634f));
}

struct Situ {
    template <class Cfg>
    static __device__ __forceinline__ float of(float gate, float up) {
        return situ(gate, up, Cfg::kSituBeta, Cfg::kSituLinearBeta);
    }
};

struct Swiglu {
    template <class Cfg>
    static __device__ __forceinline__ float of(float gate, float up) {
        return gate * sigmoid(gate) * up;
    }
};

// 1 + tanh(z) = 2 sigmoid(2 z): where z is large and negative, the sum of the left cancels and an approximate tanh is
// all that is left of it.
struct GegluTanh {
    template <class Cfg>
    static __device__ __forceinline__ float of(float gate, float up) {
        const float z = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
        return gate * sigmoid(2.0f * z) * up;
    }
};

}  // namespace cake
