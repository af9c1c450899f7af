enum class TileClass { kRouter, kLatent, kShared };

// Column class of a tile and its first output column.
struct Columns {
    TileClass kind;
    u32 first;
};

__device__ __forceinline__ Columns columns_of(u32 n_tile) {
    constexpr u32 kRouterTiles = kNumNTiles - kSharedTiles - Cfg::kLatentTiles;
    if (n_tile < kRouterTiles) {
        return {TileClass::kRouter, n_tile * Cfg::kBlockN};
    }
    if (n_tile < kRouterTiles + Cfg::kLatentTiles) {
        return {TileClass::kLatent, (n_tile - kRouterTiles) * Cfg::kBlockN};
    }
    return {TileClass::kShared, (n_tile - kRouterTiles - Cfg::kLatentTiles) * (Cfg::kBlockN / 2)};
}

struct Maps {
    const TensorMap& gate;
    const TensorMap& down;
    const TensorMap& shared;
    const TensorMap& x;
};
