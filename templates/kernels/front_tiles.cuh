enum class TileClass { kRouter, kLatent, kShared };

//% set narrow = spec.value("kBlockM") < 128
//% set clipped = spec.arch_family == "sm90"
//% set split = clipped and spec.value("kTokenParts") > 1
//% set stage_bytes = "stage_bytes" if clipped else "Cfg::kStageBytes"
// Which weight rows a CTA multiplies. A shared tile has kBlockM / 2 gate rows from `row` on and the matching up
// rows.
//% if narrow
// The last tile of a class takes the last rows of the class, of which it stores those from `first` on: the part of a
// box that lies outside its tensor is filled with zeros, and slowly.
//% endif
struct Tile {
    TileClass kind;
    u32 row;
//% if narrow
    u32 first;
//% endif
};

//% if narrow
__device__ __forceinline__ Tile tile_in(TileClass kind, u32 index, u32 rows, u32 class_rows) {
    const u32 first = index * rows;
    return {kind, min(first, class_rows - rows), first};
}

__device__ __forceinline__ Tile tile_of(u32 index) {
    if (index < Cfg::kRouterTiles) {
        return tile_in(TileClass::kRouter, index, Cfg::kBlockM, Cfg::kRouterCols);
    }
    if (index < Cfg::kRouterTiles + Cfg::kLatentTiles) {
        return tile_in(TileClass::kLatent, index - Cfg::kRouterTiles, Cfg::kBlockM, Cfg::kLatentCols);
    }
    const u32 shared = index - Cfg::kRouterTiles - Cfg::kLatentTiles;
    return tile_in(TileClass::kShared, shared, Cfg::kBlockM / 2, Cfg::kSharedCols);
}
//% else
__device__ __forceinline__ Tile tile_of(u32 index) {
    if (index < Cfg::kRouterTiles) {
        return {TileClass::kRouter, index * Cfg::kBlockM};
    }
    if (index < Cfg::kRouterTiles + Cfg::kLatentTiles) {
        return {TileClass::kLatent, (index - Cfg::kRouterTiles) * Cfg::kBlockM};
    }
    return {TileClass::kShared, (index - Cfg::kRouterTiles - Cfg::kLatentTiles) * (Cfg::kBlockM / 2)};
}
//% endif

// Ring units of a rank: rank 0 owns [0, kRank0Units), rank 1 the rest.
__device__ __forceinline__ u32 unit_count(u32 rank) {
    return rank == 0 ? Cfg::kRank0Units : Cfg::kRank1Units;
}

__device__ __forceinline__ void load_weights(
    const TensorMap& router_map, const TensorMap& latent_map, const TensorMap& shared_map,
    const Tile& tile, u32 a, u32 chunk, u32 barrier) {
    if (tile.kind == TileClass::kShared) {
        tma_load_3d(a, shared_map, 0, tile.row, chunk, barrier);
        constexpr u32 kGateBytes = Cfg::kChunksPerStage * Cfg::kChunkABytes / 2;
        tma_load_3d(a + kGateBytes, shared_map, 0, Cfg::kSharedCols + tile.row, chunk, barrier);
    } else {
        tma_load_3d(a, tile.kind == TileClass::kRouter ? router_map : latent_map, 0, tile.row, chunk, barrier);
    }
}

//% if narrow
// The rows behind a stage's weights, which the second MMA of a shared tile reads: their sums are stored nowhere, but
// nothing else writes them.
__device__ __forceinline__ void clear_pads(u32 smem) {
    for (u32 i = threadIdx.x; i < Cfg::kNumStages * Cfg::kPadBytes / 16; i += Cfg::kNumThreads) {
        const u32 stage = i / (Cfg::kPadBytes / 16);
        const u32 pad = smem + Cfg::kARingOffset + (stage + 1) * Cfg::kStageABytes - Cfg::kPadBytes;
        st_shared_v4(pad + i % (Cfg::kPadBytes / 16) * 16, Vec4{0, 0, 0, 0});
    }
    fence_proxy_async_shared();
}

//% endif
// One lane streams this CTA's units, weights and tokens in one loop. Only the tokens depend on an earlier launch: the
// first `weights_ahead` stages of weights go ahead of the wait for it, and the first tokens queue behind them.
__device__ __forceinline__ void produce(
    const TensorMap& router_map, const TensorMap& latent_map, const TensorMap& shared_map, const TensorMap& x_map,
//% if clipped
    const Tile& tile, u32 rank, u32 num_tokens, u32 weights_ahead, u32 smem, const Watch& watch) {
//% if split
    const u32 first_row = first_loaded(num_tokens);
    num_tokens = loaded_tokens(num_tokens);
//% endif
    const u32 stage_bytes = Cfg::kStageWeightBytes + Cfg::kChunksPerStage * num_tokens * kTokenBytes;
    // A box that holds fewer rows than a chunk has room for can't hold two: the second would begin too early.
    const u32 box_chunks = num_tokens < Cfg::kNPad ? 1 : Cfg::kChunksPerStage;
//% else
    const Tile& tile, u32 rank, u32 weights_ahead, u32 smem, const Watch& watch) {
//% endif
    const u32 units = unit_count(rank);
    const u32 first_chunk = rank * Cfg::kRank0Units * Cfg::kChunksPerStage;
    const u32 ahead = min(weights_ahead, min(units, static_cast<u32>(Cfg::kNumStages)));
    for (u32 unit = 0; unit < ahead; ++unit) {
        const u32 full = smem + Cfg::kStageFullOffset + unit * 8;
        const u32 a = smem + Cfg::kARingOffset + unit * Cfg::kStageABytes;
        mbarrier_arrive_expect_tx(full, ${stage_bytes | code});
        load_weights(
            router_map, latent_map, shared_map, tile, a, first_chunk + unit * Cfg::kChunksPerStage, full);
    }
    griddepcontrol_wait();
    Ring load;
    for (u32 unit = 0; unit < units; ++unit) {
        const u32 full = smem + Cfg::kStageFullOffset + load.stage * 8;
        const u32 b = smem + Cfg::kBRingOffset + load.stage * Cfg::kStageBBytes;
        const u32 chunk = first_chunk + unit * Cfg::kChunksPerStage;
        if (unit >= ahead) {
            const u32 a = smem + Cfg::kARingOffset + load.stage * Cfg::kStageABytes;
            mbarrier_wait(smem + Cfg::kStageEmptyOffset + load.stage * 8, load.phase ^ 1, watch);
            mbarrier_arrive_expect_tx(full, ${stage_bytes | code});
            load_weights(router_map, latent_map, shared_map, tile, a, chunk, full);
        }
//% if clipped
        for (u32 i = 0; i < Cfg::kChunksPerStage; i += box_chunks) {
            tma_load_3d(b + i * Cfg::kChunkBBytes, x_map, 0, ${("first_row" if split else "0") | code}, chunk + i, full);
        }
//% else
        tma_load_3d(b, x_map, 0, 0, chunk, full);
//% endif
        load.advance();
    }
}
