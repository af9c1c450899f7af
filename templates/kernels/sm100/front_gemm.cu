#include "${device_common | file_name}"
#include "${device_family | file_name}"
#include "${shared["device"] | file_name}"

using namespace cake;

// [T, hidden] x [gate; down; shared gate | up]^T. A pair of CTAs owns a tile of 256 x kBlockN: each its 128 token rows
// and half of the weight rows; the tensor core of each multiplies its tokens with both halves. The grid has a cluster
// an item; a cluster that has finished one takes the place of a cluster that has not started.
//
//   loader of each CTA --TMA--> its ring: 128 tokens, half the weights --stage_full--> one thread of CTA 0 multiplies
//        ^                                                                              |      for both (tcgen05)
//        +-------------------------- stage_empty, in both CTAs -------------------------+
//                                                                                       | sums_full, in both CTAs
//   logits | latent | SiTU -> shared_act <-- 8 epilogue warps of each CTA <-- 2 accumulators in tensor memory
//                                                  ^   |                                ^
//             cut tiles: partials + counters ------+   +-- sums_empty, in CTA 0 --------+
//
// Barriers, each with its arrivals per phase:
//   stage_full[s]   1: in CTA 0, its loader's arrive.expect_tx of 2 kStageBytes, the copies of both CTAs.
//   stage_empty[s]  1: in each CTA, the commit behind the products that read the stage of both.
//   sums_full[a]    1: in each CTA, the commit behind the last product of a tile.
//   sums_empty[a]   kSumsReaders: in CTA 0, one lane of each epilogue warp of both CTAs.
//   item_full[n]    1: in each CTA, its loader's arrive.expect_tx of the answer's kAnswerBytes.
//   item_empty[n]   kItemReaders: in CTA 0, whoever has read the answer: 2 loaders, the multiplying thread, the warps.

/*% include "kernels/gemm_constants.cuh" %*/

#include "${shared["gemm"] | file_name}"

/*% include "kernels/front_columns.cuh" %*/

static_assert(Cfg::kRouterCols % 8 == 0 && Cfg::kLatentCols % 8 == 0 && kSharedCols % 8 == 0, "masked by 8 columns");

// In a shared tile rank 0 takes the gate rows and rank 1 the up rows, so that column c and column c + kBlockN / 2 of
// the sums belong together.
__device__ __forceinline__ void load_weights(
    const Maps& maps, const Columns& columns, u32 rank, u32 chunk, u32 destination, u32 full) {
    if (columns.kind == TileClass::kShared) {
        load_weight_rows(destination, maps.shared, 0, columns.first + rank * kSharedCols, chunk, full);
    } else {
        const bool is_router = columns.kind == TileClass::kRouter;
        // As with tokens: half a tile past the end is the other half once more.
        const u32 row = columns.first + rank * kHalfCols;
        const bool is_inside = row < (is_router ? Cfg::kRouterCols : Cfg::kLatentCols);
        load_weight_rows(
            destination, is_router ? maps.gate : maps.down, 0, is_inside ? row : columns.first, chunk, full);
    }
}

__device__ __forceinline__ void produce(
    const Maps& maps, const Split& split, u32 pair_rows, u32 num_tokens, u32 rank, u32 smem, const Watch& watch) {
    prefetch_tensormap(maps.x);
    prefetch_tensormap(maps.gate);
    prefetch_tensormap(maps.down);
    prefetch_tensormap(maps.shared);
    griddepcontrol_wait();
    ClusterWork<Role::kLoader> works(split, rank, smem, watch);
    Ring load;
    Work work;
    while (works.next(work, watch)) {
        const TilePlace place = place_of(work.tile, pair_rows);
        const Columns columns = columns_of(place.n_tile);
        const u32 token = loaded_token(first_token(place, rank), num_tokens);
        for (u32 k = work.k_begin; k < work.k_end; ++k) {
            const u32 full = begin_stage(load, rank, smem, watch);
            const u32 a = smem + Cfg::kStagesOffset + load.stage * Cfg::kStageBytes;
            tma_load_3d_pair(a, maps.x, 0, token, k, full);
            load_weights(maps, columns, rank, k, a + Cfg::kStageABytes, full);
            load.advance();
        }
    }
    drain_ring(load, smem, watch);
}

struct Outputs {
    float* logits;
    u16* latent;
    u16* shared_act;
    u32 logits_pitch;
    u32 latent_pitch;
    u32 shared_act_pitch;
};

// fp32, unrounded. The last tile of a class may reach past its matrix, by whole groups of 8 columns.
__device__ __forceinline__ void store_logits(float* row, u32 column, const float (&values)[kStepCols]) {
#pragma unroll
    for (u32 i = 0; i < kStepCols; i += 8) {
        u32 words[8];
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {
            words[j] = float_to_bits(values[i + j]);
        }
        if (column + i < Cfg::kRouterCols) {
            store_words(row + column + i, words);
        }
    }
}

// kStepCols columns of one token, from `first` of the lower half of the tile on, and those half a tile further.
__device__ __forceinline__ void store_columns(
    Sums& sums, const Columns& columns, u32 first, u32 token, const Outputs& out) {
    const u64 row = token;
    const u32 lower = columns.first + first;
    if (columns.kind == TileClass::kRouter) {
        store_logits(out.logits + row * out.logits_pitch, lower, sums[0]);
        store_logits(out.logits + row * out.logits_pitch, lower + kHalfCols, sums[1]);
    } else if (columns.kind == TileClass::kLatent) {
        store_bf16_within(out.latent + row * out.latent_pitch, lower, Cfg::kLatentCols, sums[0]);
        store_bf16_within(out.latent + row * out.latent_pitch, lower + kHalfCols, Cfg::kLatentCols, sums[1]);
    } else {
#pragma unroll
        for (u32 i = 0; i < kStepCols; ++i) {
            sums[0][i] = situ(sums[0][i], sums[1][i], Cfg::kSituBeta, Cfg::kSituLinearBeta);
        }
        store_bf16_within(out.shared_act + row * out.shared_act_pitch, lower, kSharedCols, sums[0]);
    }
}

// Epilogue warps.
__device__ __forceinline__ void finish(
    const Split& split, u32 pair_rows, u32 num_tokens, u32 rank, u32 smem, const Outputs& out, float* partials,
    u32* counters, const Watch& watch) {
    const Fragment at = fragment();
    // An earlier launch may still read the outputs, or use the partials, until it has completed.
    griddepcontrol_wait();
    ClusterWork<Role::kEpilogue> works(split, rank, smem, watch);
    Work work;
    for (u32 count = 0; works.next(work, watch); ++count) {
        const TilePlace place = place_of(work.tile, pair_rows);
        const Columns columns = columns_of(place.n_tile);
        const u32 token = first_token(place, rank) + at.thread;
        await_sums(count, smem, watch);
        if (first_token(place, rank) < num_tokens) {
            const Segments segments = segments_of(work, split, partials, counters, rank, at);
            finish_tile(accumulator(smem, count % 2), work, segments, at, smem, [&](Sums& sums, u32 first) {
                if (token < num_tokens) {
                    store_columns(sums, columns, first, token, out);
                }
            });
        }
        release_sums(count, at, rank, smem);
    }
}

/*% include "kernels/gemm_entry.cuh" %*/
    chaos_begin(wait_record);
    set_up(smem);
    const u32 warp = warp_index();
    if (warp >= Cfg::kFirstEpilogueWarp) {
        const Outputs out{
            logits, latent, shared_act, static_cast<u32>(logits_pitch), static_cast<u32>(latent_pitch),
            static_cast<u32>(shared_act_pitch)};
        finish(split, pair_rows, rows, rank, smem, out, partials, counters, watch);
        griddepcontrol_launch_dependents();
    } else if (warp == Cfg::kMmaWarp) {
        if (rank == 0 && elect_one()) {
            // The tokens come from an earlier launch: no bounded wait for them begins before it has ended.
            griddepcontrol_wait();
            multiply(split, smem, watch);
        }
    } else if (lane_id() == 0) {
        const Maps maps{gate_weight_map, down_weight_map, shared_gate_up_weight_map, x_map};
        produce(maps, split, pair_rows, rows, rank, smem, watch);
    }
    leave_together(smem);
}
