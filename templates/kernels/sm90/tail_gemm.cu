#include "${device_common | file_name}"
#include "${device_family | file_name}"

using namespace cake;

// [shared_act | y] x [shared_down | up slice]^T. A pair of CTAs owns a tile of 256 x kBlockN: each its 128 token rows,
// both the same weight rows, of which each loads half for both. A lone last row tile is 128 x 2 kBlockN: each its
// weight rows, both the same tokens, of which each loads every other K block for both. K runs over the shared-down
// blocks first: they do not need y, so a programmatic launch overlaps them with the norm. Persistent: cluster c runs
// items c, c + clusters, ...
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

__device__ __forceinline__ void load_block(
    const Maps& maps, u32 k, const CtaTile& tile, const TokenRows& rows, u32 up_col0, u32 rank, const StageBoxes& to) {
    const u32 first = tile.n_tile * Cfg::kBlockN;
    if (k < kDownBlocks) {
        load_tokens(maps.shared_act, tile, rows, {0, k}, k, rank, to);
        load_weights({&maps.shared_down, first, Cfg::kBlockN / 2}, tile, {0, k}, rank, to);
        return;
    }
    // A ragged slice is a map over columns that ends at the slice: the rest of its last block arrives as zeros.
    const u32 block = k - kDownBlocks;
    const BlockColumns at{
        Cfg::kUpRagged ? up_col0 + block * Cfg::kBlockK : 0, Cfg::kUpRagged ? 0 : up_col0 / Cfg::kBlockK + block};
    load_tokens(maps.y, tile, rows, at, k, rank, to);
    load_weights({&maps.up, first, Cfg::kBlockN / 2}, tile, at, rank, to);
}

__device__ __forceinline__ void produce(
    const Maps& maps, const Split& split, u32 row_tiles, u32 num_tokens, u32 up_col0, u32 rank, u32 smem,
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
        const CtaTile tile = tile_of(work.tile, row_tiles, rank);
        const TokenRows rows = rows_of(tile.row_tile, num_tokens);
        for (u32 k = work.k_begin; k < work.k_end; ++k) {
//% if spec.value("kFusedNorm")
            if (rows.any() && k >= kDownBlocks) {
                wait_for_rows(norm, rows, tile.row_tile / 2, known_pair_row, watch);
            }
//% else
            if (!norm_done && k >= kDownBlocks) {
                // y is the norm's: its launch must have completed.
                griddepcontrol_wait();
                norm_done = true;
            }
//% endif
            expect_stage(load, rows.any(), smem, watch);
            load_block(maps, k, tile, rows, up_col0, rank, boxes_of(load, smem));
            load.advance();
        }
    }
//% if spec.value("kFusedNorm")
    retire_counters(norm);
//% endif
}

__device__ __forceinline__ void multiply_and_store(
    const Split& split, u32 row_tiles, u32 num_tokens, u32 rank, u32 smem, const Matrix& out, float* partials,
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
        const CtaTile tile = tile_of(work.tile, row_tiles, rank);
        const TokenRows rows = rows_of(tile.row_tile, num_tokens);
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
            store_rows<Cfg::kBlockN>(acc[block], out, rows, row, tile.n_tile * Cfg::kBlockN, at, smem);
        }
    }
}

/*% include "kernels/gemm_entry.cuh" %*/
//% if spec.value("kFusedNorm")
    const Norm norm{
        routed, norm_weight, y_workspace, static_cast<u32>(routed_pitch), static_cast<u32>(y_pitch),
        static_cast<u32>(num_tokens), (row_tiles + 1) / 2, static_cast<u32>(norm_first_rows),
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
            split, row_tiles, static_cast<u32>(num_tokens), rank, smem, matrix, partials, counters, watch);
        griddepcontrol_launch_dependents();
    } else {
        setmaxnreg_dec<Cfg::kProducerRegisters>();
        if (threadIdx.x == Cfg::kMmaWarps * 32) {
            const Maps maps{shared_down_weight_map, up_weight_map, shared_act_map, y_workspace_map};
            produce(
                maps, split, row_tiles, static_cast<u32>(num_tokens), static_cast<u32>(up_col0), rank, smem,
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
