#pragma once

#include "device/base.cuh"
#include "device/tma.cuh"

namespace cake {

// What the rows of the front's weights are, in their order in the tile space.
enum class TileClass { kRouter, kLatent, kShared, kNone };

struct FrontMaps {
    const TensorMap& router;
    const TensorMap& latent;
    const TensorMap& shared;  // gate rows, then up rows
    const TensorMap& x;
};

// Row-major outputs, each with a pitch in elements.
struct FrontOutputs {
    float* logits;
    u16* latent;
    u16* shared_act;
    u32 logits_pitch;
    u32 latent_pitch;
    u32 shared_act_pitch;
};

__device__ __forceinline__ void prefetch_maps(const FrontMaps& maps) {
    prefetch_tensormap(maps.router);
    prefetch_tensormap(maps.latent);
    prefetch_tensormap(maps.shared);
    prefetch_tensormap(maps.x);
}

}  // namespace cake
