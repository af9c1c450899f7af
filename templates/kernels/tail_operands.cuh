#pragma once

#include "device/base.cuh"

namespace cake {

struct TailMaps {
    const TensorMap& shared_down;
    const TensorMap& up;
    const TensorMap& shared_act;
    const TensorMap& y;
};

// Where y stays in shared memory, and no map of it is needed.
struct ResidentTailMaps {
    const TensorMap& shared_down;
    const TensorMap& up;
    const TensorMap& shared_act;
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
    u32 routed_pitch;
    u32 y_pitch;
    u32 num_partials = 1;  // these two, of rows that are not staged in shared memory first
    u32 routed_partial_stride = 0;
    u32* counters = nullptr;  // of a y in global memory
};

// In their place where an earlier launch has normalised the rows.
struct NoNorm {};

}  // namespace cake
