#pragma once

#include "device/base.cuh"
#include "kernels/activation.cuh"
#include "kernels/front_operands.cuh"

namespace cake {

// Column class of a tile and its first output column.
struct Columns {
    TileClass kind;
    u32 first;
};

template <class Cfg>
__device__ __forceinline__ Columns columns_of(u32 n_tile) {
    constexpr u32 kRouterTiles = Cfg::kNumNTiles - Cfg::kSharedTiles - Cfg::kLatentTiles;
    if (n_tile < kRouterTiles) {
        return {TileClass::kRouter, n_tile * Cfg::kBlockN};
    }
    if (n_tile < kRouterTiles + Cfg::kLatentTiles) {
        return {TileClass::kLatent, (n_tile - kRouterTiles) * Cfg::kBlockN};
    }
    constexpr u32 kSharedTileCols = kGated<Cfg> ? Cfg::kBlockN / 2 : Cfg::kBlockN;
    return {TileClass::kShared, (n_tile - kRouterTiles - Cfg::kLatentTiles) * kSharedTileCols};
}

}  // namespace cake
