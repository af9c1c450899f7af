enum class TileClass { kRouter, kLatent, kShared };

// Which weight rows a CTA multiplies. A shared tile has 64 gate rows from `row` on and the matching up rows.
struct Tile {
    TileClass kind;
    u32 row;
};

__device__ __forceinline__ Tile tile_of(u32 index) {
    if (index < Cfg::kRouterTiles) {
        return {TileClass::kRouter, index * Cfg::kBlockM};
    }
    if (index < Cfg::kRouterTiles + Cfg::kLatentTiles) {
        return {TileClass::kLatent, (index - Cfg::kRouterTiles) * Cfg::kBlockM};
    }
    return {TileClass::kShared, (index - Cfg::kRouterTiles - Cfg::kLatentTiles) * (Cfg::kBlockM / 2)};
}

// Ring units of a rank: rank 0 owns [0, kRank0Units), rank 1 the rest.
__device__ __forceinline__ u32 unit_count(u32 rank) {
    return rank == 0 ? Cfg::kRank0Units : Cfg::kRank1Units;
}

__device__ __forceinline__ void load_weights(
    const TensorMap& router_map, const TensorMap& latent_map, const TensorMap& shared_map,
    const Tile& tile, u32 a, u32 chunk, u32 barrier) {
    if (tile.kind == TileClass::kShared) {
        tma_load_3d(a, shared_map, 0, tile.row, chunk, barrier);
        tma_load_3d(a + Cfg::kStageABytes / 2, shared_map, 0, Cfg::kSharedCols + tile.row, chunk, barrier);
    } else {
        tma_load_3d(a, tile.kind == TileClass::kRouter ? router_map : latent_map, 0, tile.row, chunk, barrier);
    }
}
