//% set clipped = spec.arch_family == "sm90"
//% set split = clipped and spec.value("kTokenParts") > 1
//% if clipped
// A rank's share of K, in units of a stage: `down` from `first_down` on, then `up` from `first_up` on.
//% else
// A rank's share of K, in chunks: `down` from `first_down` on, then `up` from `first_up` on.
//% endif
struct Share {
    u32 first_down;
    u32 down;
    u32 first_up;
    u32 up;
};

__device__ __forceinline__ Share share_of(u32 rank) {
    if (rank == 0) {
//% if clipped
        return {0, Cfg::kRank0DownUnits, 0, Cfg::kRank0UpUnits};
    }
    return {Cfg::kRank0DownUnits, Cfg::kRank1DownUnits, Cfg::kRank0UpUnits, Cfg::kRank1UpUnits};
//% else
        return {0, Cfg::kRank0DownChunks, 0, Cfg::kRank0UpChunks};
    }
    return {Cfg::kRank0DownChunks, Cfg::kRank1DownChunks, Cfg::kRank0UpChunks, Cfg::kRank1UpChunks};
//% endif
}

// The kernel's operands, as every role needs them.
struct Operands {
    const TensorMap& shared_down_map;
    const TensorMap& up_map;
    const TensorMap& shared_act_map;
    const TensorMap& y_map;
//% if spec.value("kFusedNorm")
    const u16* routed;
    const u16* norm_weight;
    u16* y;
    u32* counters;
    u32 num_partials;
    u32 routed_pitch;
    u32 routed_partial_stride;
    u32 y_pitch;
//% endif
    u16* out;
    u32 num_tokens;
    u32 out_pitch;
    u32 up_col0;        // first latent column of this rank's slice
    u32 weights_ahead;  // weight stages that go ahead of the wait for an earlier launch
};

// One up chunk of a [rows, latent] operand. A ragged slice is a map over columns that ends at the slice, so that the
// rest of its last chunk arrives as zeros; else the map counts whole chunks.
__device__ __forceinline__ void load_up_chunk(
    u32 destination, const TensorMap& map, u32 row, u32 up_col0, u32 chunk, u32 barrier) {
    if constexpr (Cfg::kUpRagged) {
        tma_load_3d(destination, map, up_col0 + chunk * Cfg::kBlockK, row, 0, barrier);
    } else {
        tma_load_3d(destination, map, 0, row, up_col0 / Cfg::kBlockK + chunk, barrier);
    }
}

// ---- producer: one lane ----

__device__ __forceinline__ bool is_down(const Share& share, u32 unit) {
    return unit < share.down;
}

//% set tokens = "loaded_tokens(operands.num_tokens)" if split else "operands.num_tokens"
//% if clipped
// The first chunk of a unit, in its segment.
__device__ __forceinline__ u32 first_chunk(const Share& share, u32 unit) {
    const u32 of_segment = is_down(share, unit) ? share.first_down + unit : share.first_up + unit - share.down;
    return of_segment * Cfg::kChunksPerStage;
}

// The tokens' boxes of a down unit, always; of an up unit unless y is resident.
__device__ __forceinline__ u32 unit_bytes(bool down, u32 num_tokens) {
    const u32 tokens = down || !Cfg::kResidentB ? num_tokens * kTokenBytes : 0;
    return Cfg::kChunksPerStage * (Cfg::kChunkABytes + tokens);
}

__device__ __forceinline__ void load_unit_weights(
    const Operands& operands, const Share& share, u32 tile_row, u32 unit, u32 a, u32 full) {
    const u32 chunk = first_chunk(share, unit);
    mbarrier_arrive_expect_tx(full, unit_bytes(is_down(share, unit), ${tokens | code}));
    if (is_down(share, unit)) {
        tma_load_3d(a, operands.shared_down_map, 0, tile_row, chunk, full);
    } else {
        load_up_chunk(a, operands.up_map, tile_row, operands.up_col0, chunk, full);
    }
}

// The tokens of a unit, from row `first_row` on.
__device__ __forceinline__ void load_unit_tokens(
    const Operands& operands, const Share& share, u32 first_row, u32 unit, u32 b, u32 full) {
    // A box that holds fewer rows than a chunk has room for can't hold two: the second would begin too early.
    const u32 box_chunks = ${tokens | code} < Cfg::kNPad ? 1 : Cfg::kChunksPerStage;
    const u32 chunk = first_chunk(share, unit);
    for (u32 i = 0; i < Cfg::kChunksPerStage; i += box_chunks) {
        if (is_down(share, unit)) {
            tma_load_3d(b + i * Cfg::kChunkBBytes, operands.shared_act_map, 0, first_row, chunk + i, full);
        } else {
            load_up_chunk(
                b + i * Cfg::kChunkBBytes, operands.y_map, first_row, operands.up_col0, chunk + i, full);
        }
    }
}
//% else
// The tokens' box of a down unit, always; of an up unit unless y is resident.
__device__ __forceinline__ u32 unit_bytes(bool down) {
    return down || !Cfg::kResidentB ? Cfg::kChunkABytes + Cfg::kChunkBBytes : Cfg::kChunkABytes;
}

__device__ __forceinline__ void load_unit_weights(
    const Operands& operands, const Share& share, u32 tile_row, u32 unit, u32 a, u32 full) {
    mbarrier_arrive_expect_tx(full, unit_bytes(is_down(share, unit)));
    if (is_down(share, unit)) {
        tma_load_3d(a, operands.shared_down_map, 0, tile_row, share.first_down + unit, full);
    } else {
        load_up_chunk(a, operands.up_map, tile_row, operands.up_col0, share.first_up + unit - share.down, full);
    }
}
//% endif
//% if spec.value("kStagedRows")

// The routed rows and the norm weight, for the norm warps: (num_tokens + 1) rows of kLatentCols * 2 bytes.
__device__ __forceinline__ void load_staged_rows(const Operands& operands, u32 smem) {
    constexpr u32 kRowBytes = Cfg::kLatentCols * 2;
    const u32 staged = smem + Cfg::kRowsStagedOffset;
    mbarrier_arrive_expect_tx(staged, (operands.num_tokens + 1) * kRowBytes);
    bulk_load(smem + Cfg::kNormWeightOffset, operands.norm_weight, kRowBytes, staged);
    for (u32 row = 0; row < operands.num_tokens; ++row) {
        const u16* source = operands.routed + static_cast<u64>(row) * operands.routed_pitch;
        bulk_load(smem + Cfg::kStagedRowsOffset + row * kRowBytes, source, kRowBytes, staged);
    }
}
//% endif

//% if spec.value("kFusedNorm") and not spec.value("kResidentB")
// y is complete in global memory: this CTA has arrived, and the counter has wrapped, so every other has too. The
// fence takes the acquired writes over to the copies.
__device__ __forceinline__ void wait_for_y(const Operands& operands, u32 smem, const Watch& watch) {
    mbarrier_wait(smem + Cfg::kRowsArrivedOffset, 0, watch);
    counter_wait_wrapped(operands.counters, watch);
    fence_proxy_async_global();
}

//% endif
// Weights run ahead of the tokens' boxes: they depend neither on an earlier launch nor on the norm. `weights` is the
// next unit to load them for.
struct Loads {
    u32 weights = 0;
    Ring weights_ring;

    __device__ __forceinline__ void load_weights_to(
        u32 end, const Operands& operands, const Share& share, u32 tile_row, u32 smem, const Watch& watch) {
        for (; weights < end; ++weights) {
            mbarrier_wait(smem + Cfg::kStageEmptyOffset + weights_ring.stage * 8, weights_ring.phase ^ 1, watch);
            load_unit_weights(
                operands, share, tile_row, weights,
                smem + Cfg::kARingOffset + weights_ring.stage * Cfg::${("kStageABytes" if clipped else "kChunkABytes") | code},
                smem + Cfg::kStageFullOffset + weights_ring.stage * 8);
            weights_ring.advance();
        }
    }
};

__device__ __forceinline__ void produce(
    const Operands& operands, u32 tile_row, u32 rank, u32 smem, const Watch& watch) {
    const Share share = share_of(rank);
    const u32 units = share.down + share.up;
    Loads loads;
    const u32 ahead = min(operands.weights_ahead, min(units, static_cast<u32>(Cfg::kNumStages)));
    loads.load_weights_to(ahead, operands, share, tile_row, smem, watch);
    griddepcontrol_wait();
//% if spec.value("kStagedRows")
    load_staged_rows(operands, smem);
//% endif
//% if spec.value("kIssueGate")
    mbarrier_wait(smem + Cfg::kRowsIssuedOffset, 0, watch);
//% endif
//% if split
    const u32 first_row = first_loaded(operands.num_tokens);
//% endif
//% set first_row = "first_row" if split else "0"
    Ring ring;
    for (u32 unit = 0; unit < units; ++unit) {
//% if spec.value("kStaggerUnits")
        if (unit == Cfg::kStaggerUnits) {
            // Stage 0 has landed, so the rest of the cold fill does not queue in front of the row copies.
            mbarrier_wait(smem + Cfg::kStageFullOffset, 0, watch);
        }
//% endif
        loads.load_weights_to(unit + 1, operands, share, tile_row, smem, watch);
        const u32 full = smem + Cfg::kStageFullOffset + ring.stage * 8;
        const u32 b = smem + Cfg::kBRingOffset + ring.stage * Cfg::${("kStageBBytes" if clipped else "kChunkBBytes") | code};
        if (is_down(share, unit)) {
//% if clipped
            load_unit_tokens(operands, share, ${first_row | code}, unit, b, full);
//% else
            tma_load_3d(b, operands.shared_act_map, 0, 0, share.first_down + unit, full);
//% endif
        } else if constexpr (!Cfg::kResidentB) {
//% if spec.value("kFusedNorm") and not spec.value("kResidentB")
            if (unit == share.down) {
//% if spec.arch_family == "sm90"
                // A ring of weights first, but for one stage: the MMA warps free the last down unit's only once they
                // have issued the next, which needs y. The stages before it are drained without.
                const u32 end = min(units, unit + Cfg::kNumStages - 1);
//% else
                // A whole ring of weights first: each stage is freed by its own commit, none of which needs y.
                const u32 end = min(units, unit + Cfg::kNumStages);
//% endif
                loads.load_weights_to(end, operands, share, tile_row, smem, watch);
                wait_for_y(operands, smem, watch);
            }
//% endif
//% if clipped
            load_unit_tokens(operands, share, ${first_row | code}, unit, b, full);
//% else
            load_up_chunk(b, operands.y_map, 0, operands.up_col0, share.first_up + unit - share.down, full);
//% endif
        }
        ring.advance();
    }
}
