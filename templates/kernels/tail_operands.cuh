#pragma once

#include "device/base.cuh"

namespace cake {

struct TailMaps {
    const TensorMap& shared_down;
    const TensorMap& up;
    const TensorMap& shared_act;
    const TensorMap& y;
};

// A row-major bf16 output, with a pitch in elements.
struct TailOutput {
    u16* out;
    u32 pitch;
};

// The operands of a norm inside the launch: rows of each of the partials, pitches and strides in elements.
struct NormOperands {
    const u16* routed;
    const u16* norm_weight;
    u16* y;
    u32* counters;
    u32 num_partials;
    u32 routed_pitch;
    u32 routed_partial_stride;
    u32 y_pitch;
};

// In their place where an earlier launch has normalised the rows.
struct NoNorm {};

}  // namespace cake
