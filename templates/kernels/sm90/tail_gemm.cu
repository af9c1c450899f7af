#include "${device_common | file_name}"
#include "${device_family | file_name}"

using namespace cake;

// [shared_act | y] x [shared_down | up slice]^T. A pair of CTAs owns a tile of 256 x kBlockN: each its 128 token rows,
// both the same weight rows, of which each loads half for both. K runs over the shared-down blocks first: they do not
// need y, so a programmatic launch overlaps them with the norm. Persistent: cluster c runs items c, c + clusters, ...
//
//   producer thread --TMA--> 128 token rows    + half of the weight rows --multicast--> both CTAs' rings
//        ^                                                                                  |
//        +-- stage_empty: its readers' warps of both CTAs --- 2 MMA warpgroups <-- stage_full (bytes of both halves)
//                                                                 |
//                        cut tiles: partials + arrival counters --+--> out
//
// Barriers, each with its arrivals per phase:
//   stage_full[s]   1: the own producer's arrive.expect_tx of its tokens' bytes and both halves of the weights.
//   stage_empty[s]  kEmptyArrivals: one lane of each MMA warp that reads it, of both CTAs, since both write to it.
//% if spec.value("kTileGroups") == 1
//   turn[w]         kMmaWarps / 2: one lane of each warp of the other warpgroup, when warpgroup w may issue wgmma.
//% endif

/*% include "kernels/gemm_constants.cuh" %*/

/*% include "kernels/sm90/gemm.cuh" %*/
//% if spec.value("kFusedNorm")

/*% include "kernels/sm90/gemm_norm.cuh" %*/
//% endif

struct Maps {
    const TensorMap& shared_down;
    const TensorMap& up;
    const TensorMap& shared_act;
    const TensorMap& y;
};

// The token rows, if any, and this rank's half of the weight rows of one K block.
__device__ __forceinline__ void load_block(
    const Maps& maps, u32 k, const TokenRows& rows, u32 weight_row, u32 up_col0, u32 a, u32 b, u32 full) {
    if (k < kDownBlocks) {
        if (rows.any()) {
            tma_load_3d(a, maps.shared_act, 0, rows.loaded, k, full);
        }
        tma_load_3d_multicast(b, maps.shared_down, 0, weight_row, k, full, 3);
        return;
    }
    // A ragged slice is a map over columns that ends at the slice: the rest of its last block arrives as zeros.
    const u32 block = k - kDownBlocks;
    const u32 column = Cfg::kUpRagged ? up_col0 + block * Cfg::kBlockK : 0;
    const u32 chunk = Cfg::kUpRagged ? 0 : up_col0 / Cfg::kBlockK + block;
    if (rows.any()) {
        tma_load_3d(a, maps.y, column, rows.loaded, chunk, full);
    }
    tma_load_3d_multicast(b, maps.up, column, weight_row, chunk, full, 3);
}

__device__ __forceinline__ void produce(
    const Maps& maps, const Split& split, u32 pair_rows, u32 num_tokens, u32 up_col0, u32 rank, u32 smem,
//% if spec.value("kFusedNorm")
    const Norm& norm,
//% endif
    const Watch& watch) {
    WorkList list(split, blockIdx.x / 2, gridDim.x / 2);
    Ring load;
    Work work;
//% if spec.value("kFusedNorm")
    u32 known_pair_row = ~0u;
    // The tokens are an earlier launch's.
    griddepcontrol_wait();
//% else
    bool norm_done = false;
//% endif
    while (list.next(work)) {
        const TilePlace place = place_of(work.tile, pair_rows);
        const TokenRows rows = rows_of(place, rank, num_tokens);
        const u32 weight_row = place.n_tile * Cfg::kBlockN + rank * (Cfg::kBlockN / 2);
        for (u32 k = work.k_begin; k < work.k_end; ++k) {
//% if spec.value("kFusedNorm")
            if (rows.any() && k >= kDownBlocks) {
                wait_for_rows(norm, rows, place.pair_row, known_pair_row, watch);
            }
//% else
            if (!norm_done && k >= kDownBlocks) {
                // y is the norm's: its launch must have completed.
                griddepcontrol_wait();
                norm_done = true;
            }
//% endif
            const u32 full = smem + Cfg::kStageFullOffset + load.stage * 8;
            const u32 a = smem + Cfg::kStagesOffset + load.stage * Cfg::kStageBytes;
            const u32 b = a + Cfg::kStageABytes + rank * Cfg::kHalfBBytes;
            expect_stage(load, rows.any(), smem, watch);
            load_block(maps, k, rows, weight_row, up_col0, a, b, full);
            load.advance();
        }
    }
//% if spec.value("kFusedNorm")
    retire_counters(norm);
//% endif
}

__device__ __forceinline__ void multiply_and_store(
    const Split& split, u32 pair_rows, u32 num_tokens, u32 rank, u32 smem, const Matrix& out, float* partials,
    u32* counters, const Watch& watch) {
    const u32 warp = warp_index();
    const Fragment at{warp / 4, threadIdx.x % 128, warp % 4, lane_id()};
    WorkList list(split, blockIdx.x / 2, gridDim.x / 2);
    Ring ring;
    Work work;
    Accumulators acc;
//% if spec.value("kTileGroups") == 1
    for (u32 count = 0; list.next(work); ++count) {
        if (count % 2 != at.group) {
            skip(ring, work.k_end - work.k_begin);
            continue;
        }
        await_turn(count, at, smem, watch);
//% else
    while (list.next(work)) {
//% endif
        const TilePlace place = place_of(work.tile, pair_rows);
        const TokenRows rows = rows_of(place, rank, num_tokens);
        if (!rows.any()) {
            pass_over(ring, work.k_end - work.k_begin, at, rank, smem, watch);
            continue;
        }
        accumulate(acc, ring, work.k_end - work.k_begin, at, rank, smem, watch);
        // An earlier launch may still read `out`, or use the partials, until it has completed.
        griddepcontrol_wait();
        if (work.num_segments > 1 && !finish_segments(acc, work, split, partials, counters, rank, at, smem)) {
            continue;
        }
#pragma unroll
        for (u32 block = 0; block < Cfg::kGroupBlocks; ++block) {
            const u32 row = rows.loaded + at.first_row(block);
            store_rows<Cfg::kBlockN>(acc[block], out, rows, row, place.n_tile * Cfg::kBlockN, at, smem);
        }
    }
}

/*% include "kernels/gemm_entry.cuh" %*/
//% if spec.value("kFusedNorm")
    const Norm norm{
        routed, norm_weight, y_workspace, static_cast<u32>(routed_pitch), static_cast<u32>(y_pitch),
        static_cast<u32>(num_tokens), pair_rows, static_cast<u32>(norm_first_rows),
        counters + split.sk_total / kNumK * 2 * Cfg::kTileGroups};
//% endif
    chaos_begin(wait_record);
    set_up_ring(smem);
    if (warp_index() < Cfg::kMmaWarps) {
        setmaxnreg_inc<Cfg::kMmaRegisters>();
        const Matrix matrix{out, static_cast<u32>(out_pitch), Cfg::kOutCols};
//% if spec.value("kFusedNorm")
        // The routed rows are an earlier launch's, which may still read y too.
        griddepcontrol_wait();
        normalise_first(norm, warp_index(), lane_id());
//% endif
        multiply_and_store(
            split, pair_rows, static_cast<u32>(num_tokens), rank, smem, matrix, partials, counters, watch);
        griddepcontrol_launch_dependents();
    } else {
        setmaxnreg_dec<Cfg::kProducerRegisters>();
        if (threadIdx.x == Cfg::kMmaWarps * 32) {
            const Maps maps{shared_down_weight_map, up_weight_map, shared_act_map, y_workspace_map};
            produce(
                maps, split, pair_rows, static_cast<u32>(num_tokens), static_cast<u32>(up_col0), rank, smem,
//% if spec.value("kFusedNorm")
                norm,
//% endif
                watch);
        }
//% if spec.value("kFusedNorm")
        if (warp_index() > Cfg::kMmaWarps) {
            griddepcontrol_wait();
            normalise_others(norm, warp_index() - Cfg::kMmaWarps - 1, lane_id());
        }
//% endif
        warp_sync();
    }
    leave_together();
}
