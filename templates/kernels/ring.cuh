#pragma once

#include "device/base.cuh"

namespace cake {

// Position in the ring of stages: the parity of `phase` flips each time round.
template <class Cfg>
struct Ring {
    u32 stage = 0;
    u32 phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == Cfg::kNumStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

}  // namespace cake
