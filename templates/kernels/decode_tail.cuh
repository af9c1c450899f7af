#pragma once

#include "device/base.cuh"
#include "device/grid.cuh"
#include "device/mbarrier.cuh"
#include "device/tma.cuh"
#include "kernels/decode_tile.cuh"
#include "kernels/tail_operands.cuh"

namespace cake {

// A rank's share of K, in units of a stage: `down` from `first_down` on, then `up` from `first_up` on.
struct Share {
    u32 first_down;
    u32 down;
    u32 first_up;
    u32 up;
};

template <class Cfg>
__device__ __forceinline__ Share share_of(u32 rank) {
    if constexpr (Cfg::kClusterCtas == 2) {
        if (rank == 1) {
            return {Cfg::kRank0DownUnits, Cfg::kRank1DownUnits, Cfg::kRank0UpUnits, Cfg::kRank1UpUnits};
        }
    }
    return {0, Cfg::kRank0DownUnits, 0, Cfg::kRank0UpUnits};
}

// What the producer reads.
template <class Maps>
struct TailOperands {
    const Maps& maps;
    u32 num_tokens;
    u32 up_col0;        // first latent column of this rank's slice
    u32 weights_ahead;  // weight stages that go ahead of the wait for an earlier launch
};

template <class Cfg, class Maps>
__device__ __forceinline__ void prefetch_maps(const Maps& maps) {
    if constexpr (!Cfg::kNoPrefetch) {
        prefetch_tensormap(maps.shared_down);
        prefetch_tensormap(maps.up);
        prefetch_tensormap(maps.shared_act);
        if constexpr (!Cfg::kResidentB) {
            prefetch_tensormap(maps.y);
        }
    }
}

// One up chunk of a [rows, latent] operand. A ragged slice is a map over columns that ends at the slice, so that the
// rest of its last chunk arrives as zeros; else the map counts whole chunks.
template <class Cfg>
__device__ __forceinline__ void load_up_chunk(
    u32 destination, const TensorMap& map, u32 row, u32 up_col0, u32 chunk, u32 barrier) {
    if constexpr (Cfg::kUpRagged) {
        tma_load_3d(destination, map, up_col0 + chunk * Cfg::kBlockK, row, 0, barrier);
    } else {
        tma_load_3d(destination, map, 0, row, up_col0 / Cfg::kBlockK + chunk, barrier);
    }
}

__device__ __forceinline__ bool is_down(const Share& share, u32 unit) {
    return unit < share.down;
}

// The first chunk of a unit, in its segment.
template <class Cfg>
__device__ __forceinline__ u32 first_chunk(const Share& share, u32 unit) {
    const u32 of_segment = is_down(share, unit) ? share.first_down + unit : share.first_up + unit - share.down;
    return of_segment * Cfg::kChunksPerStage;
}

// The tokens' boxes of a down unit, always; of an up unit unless y is resident.
template <class Cfg>
__device__ __forceinline__ u32 unit_bytes(bool down, u32 tokens) {
    const u32 token_bytes = down || !Cfg::kResidentB ? tokens * (Cfg::kBlockK * 2) : 0;
    return Cfg::kChunksPerStage * (Cfg::kChunkABytes + token_bytes);
}

template <class Cfg, class Maps>
__device__ __forceinline__ void load_unit_weights(
    const TailOperands<Maps>& operands, const Share& share, u32 tile_row, u32 unit, u32 a, u32 full) {
    const u32 chunk = first_chunk<Cfg>(share, unit);
    mbarrier_arrive_expect_tx(full, unit_bytes<Cfg>(is_down(share, unit), loaded_tokens<Cfg>(operands.num_tokens)));
    if (is_down(share, unit)) {
        tma_load_3d(a, operands.maps.shared_down, 0, tile_row, chunk, full);
    } else {
        load_up_chunk<Cfg>(a, operands.maps.up, tile_row, operands.up_col0, chunk, full);
    }
}

// The tokens of a unit, from row `first_row` on.
template <class Cfg, class Maps>
__device__ __forceinline__ void load_unit_tokens(
    const TailOperands<Maps>& operands, const Share& share, u32 first_row, u32 unit, u32 b, u32 full) {
    // A box that holds fewer rows than a chunk has room for can't hold two: the second would begin too early.
    const u32 box_chunks = loaded_tokens<Cfg>(operands.num_tokens) < Cfg::kNPad ? 1 : Cfg::kChunksPerStage;
    const u32 chunk = first_chunk<Cfg>(share, unit);
    for (u32 i = 0; i < Cfg::kChunksPerStage; i += box_chunks) {
        if (is_down(share, unit)) {
            tma_load_3d(b + i * Cfg::kChunkBBytes, operands.maps.shared_act, 0, first_row, chunk + i, full);
        } else if constexpr (!Cfg::kResidentB) {
            load_up_chunk<Cfg>(
                b + i * Cfg::kChunkBBytes, operands.maps.y, first_row, operands.up_col0, chunk + i, full);
        }
    }
}

// The routed rows and the norm weight, for the norm warps: (num_tokens + 1) rows of kLatentCols * 2 bytes.
template <class Cfg>
__device__ __forceinline__ void load_staged_rows(const NormOperands& norm, u32 num_tokens, u32 smem) {
    constexpr u32 kRowBytes = Cfg::kLatentCols * 2;
    const u32 staged = smem + Cfg::kRowsStagedOffset;
    mbarrier_arrive_expect_tx(staged, (num_tokens + 1) * kRowBytes);
    bulk_load(smem + Cfg::kNormWeightOffset, norm.norm_weight, kRowBytes, staged);
    for (u32 row = 0; row < num_tokens; ++row) {
        const u16* source = norm.routed + static_cast<u64>(row) * norm.routed_pitch;
        bulk_load(smem + Cfg::kStagedRowsOffset + row * kRowBytes, source, kRowBytes, staged);
    }
}

// y is complete in global memory: this CTA has arrived, and the counter has wrapped, so every other has too. The
// fence takes the acquired writes over to the copies.
template <class Cfg>
__device__ __forceinline__ void wait_for_y(const NormOperands& norm, u32 smem, const Watch& watch) {
    mbarrier_wait(smem + Cfg::kRowsArrivedOffset, 0, watch);
    counter_wait_wrapped(norm.counters, watch);
    fence_proxy_async_global();
}

// Weights run ahead of the tokens' boxes: they depend neither on an earlier launch nor on the norm. `weights` is the
// next unit to load them for.
template <class Cfg>
struct Loads {
    u32 weights = 0;
    Ring<Cfg> weights_ring;

    template <class Maps>
    __device__ __forceinline__ void load_weights_to(
        u32 end, const TailOperands<Maps>& operands, const Share& share, u32 tile_row, u32 smem, const Watch& watch) {
        for (; weights < end; ++weights) {
            mbarrier_wait(smem + Cfg::kStageEmptyOffset + weights_ring.stage * 8, weights_ring.phase ^ 1, watch);
            load_unit_weights<Cfg>(
                operands, share, tile_row, weights, smem + Cfg::kARingOffset + weights_ring.stage * Cfg::kStageABytes,
                smem + Cfg::kStageFullOffset + weights_ring.stage * 8);
            weights_ring.advance();
        }
    }
};

// The producer: one lane.
template <class Cfg, class Maps, class Norm>
__device__ __forceinline__ void produce(
    const TailOperands<Maps>& operands, const Norm& norm, u32 tile_row, u32 rank, u32 smem, const Watch& watch) {
    const Share share = share_of<Cfg>(rank);
    const u32 units = share.down + share.up;
    Loads<Cfg> loads;
    const u32 ahead = min(operands.weights_ahead, min(units, static_cast<u32>(Cfg::kNumStages)));
    loads.load_weights_to(ahead, operands, share, tile_row, smem, watch);
    griddepcontrol_wait();
    if constexpr (Cfg::kStagedRows) {
        load_staged_rows<Cfg>(norm, operands.num_tokens, smem);
    }
    if constexpr (Cfg::kIssueGate) {
        mbarrier_wait(smem + Cfg::kRowsIssuedOffset, 0, watch);
    }
    const u32 first_row = first_loaded<Cfg>(operands.num_tokens);
    Ring<Cfg> ring;
    for (u32 unit = 0; unit < units; ++unit) {
        if constexpr (Cfg::kStaggerUnits > 0) {
            if (unit == Cfg::kStaggerUnits) {
                // Stage 0 has landed, so the rest of the cold fill does not queue in front of the row copies.
                mbarrier_wait(smem + Cfg::kStageFullOffset, 0, watch);
            }
        }
        loads.load_weights_to(unit + 1, operands, share, tile_row, smem, watch);
        const u32 full = smem + Cfg::kStageFullOffset + ring.stage * 8;
        const u32 b = smem + Cfg::kBRingOffset + ring.stage * Cfg::kStageBBytes;
        if (is_down(share, unit)) {
            load_unit_tokens<Cfg>(operands, share, first_row, unit, b, full);
        } else if constexpr (!Cfg::kResidentB) {
            if constexpr (Cfg::kFusedNorm) {
                if (unit == share.down) {
                    // Weights for as many stages as fill while y is awaited, and are free without it.
                    const u32 end = min(units, unit + Cfg::kAheadOfY);
                    loads.load_weights_to(end, operands, share, tile_row, smem, watch);
                    wait_for_y<Cfg>(norm, smem, watch);
                }
            }
            load_unit_tokens<Cfg>(operands, share, first_row, unit, b, full);
        }
        ring.advance();
    }
}

}  // namespace cake
