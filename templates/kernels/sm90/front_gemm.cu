#include "${device_common | file_name}"
#include "${device_family | file_name}"

using namespace cake;

// [T, hidden] x [gate; down; shared gate | up]^T. A pair of CTAs owns a tile of 256 x kBlockN: each its 128 token
// rows, both the same weight rows, of which each loads half for both. A lone last row tile is 128 x 2 kBlockN: each its
// weight rows, both the same tokens, of which each loads every other K block for both. Persistent: cluster c runs items
// c, c + clusters, ...
//
//   producer thread --TMA--> 128 token rows    + half of the weight rows --multicast--> both CTAs' rings
//        ^                                                                                  |
//        +-- stage_empty: its readers' warps of both CTAs --- 2 MMA warpgroups <-- stage_full (bytes of both halves)
//                                                                 |
//                        cut tiles: partials + arrival counters --+--> logits | latent | SiTU -> shared_act
//
// Barriers, each with its arrivals per phase:
//   stage_full[s]   1: the own producer's arrive.expect_tx of its tokens' bytes and both halves of the weights.
//   stage_empty[s]  kEmptyArrivals: one lane of each MMA warp that reads it, of both CTAs, since both write to it.
//% if spec.value("kTileGroups") == 1
//   turn[w]         kMmaWarps / 2: one lane of each warp of the other warpgroup, when warpgroup w may issue wgmma.
//% endif

/*% include "kernels/gemm_constants.cuh" %*/

/*% include "kernels/sm90/gemm.cuh" %*/

/*% include "kernels/front_columns.cuh" %*/

// The first half of a shared tile is gate rows and the second their up rows, so that column c and column
// c + kBlockN / 2 of the accumulator belong together.
__device__ __forceinline__ WeightRows weights_of(const Maps& maps, const Columns& columns) {
    if (columns.kind == TileClass::kShared) {
        return {&maps.shared, columns.first, kSharedCols};
    }
    return {columns.kind == TileClass::kRouter ? &maps.gate : &maps.down, columns.first, Cfg::kBlockN / 2};
}

__device__ __forceinline__ void produce(
    const Maps& maps, const Split& split, u32 row_tiles, u32 num_tokens, u32 rank, u32 smem, const Watch& watch) {
    griddepcontrol_wait();
    WorkList list(split, blockIdx.x / 2, gridDim.x / 2);
    Ring load;
    Work work;
    while (list.next(work)) {
        const CtaTile tile = tile_of(work.tile, row_tiles, rank);
        const WeightRows weights = weights_of(maps, columns_of(tile.n_tile));
        const TokenRows rows = rows_of(tile.row_tile, num_tokens);
        for (u32 k = work.k_begin; k < work.k_end; ++k) {
            expect_stage(load, rows.any(), smem, watch);
            const StageBoxes to = boxes_of(load, smem);
            load_tokens(maps.x, tile, rows, {0, k}, k, rank, to);
            load_weights(weights, tile, {0, k}, rank, to);
            load.advance();
        }
    }
}

struct Outputs {
    float* logits;
    u32 logits_pitch;
    Matrix latent;
    Matrix shared_act;
};

// fp32, unrounded, straight from the registers: a quad of lanes writes 32 neighbouring bytes.
__device__ __forceinline__ void store_router(
    const BlockSums& acc, const Outputs& out, const TokenRows& rows, u32 row, u32 column, const Fragment& at) {
#pragma unroll
    for (u32 i = 0; i < Cfg::kBlockN / 2; i += 2) {
        const u32 token = row + at.lane / 4 + 8 * ((i >> 1) & 1);
        const u32 expert = column + 8 * (i >> 2) + 2 * (at.lane % 4);
        if (rows.holds(token) && expert < Cfg::kRouterCols) {
            st_global_v2_f32(out.logits + static_cast<u64>(token) * out.logits_pitch + expert, acc[i], acc[i + 1]);
        }
    }
}

__device__ __forceinline__ void store_block(
    BlockSums& acc, const Columns& columns, const Outputs& out, const TokenRows& rows, u32 row, const Fragment& at,
    u32 smem) {
    if (columns.kind == TileClass::kRouter) {
        store_router(acc, out, rows, row, columns.first, at);
    } else if (columns.kind == TileClass::kLatent) {
        store_rows<Cfg::kBlockN>(acc, out.latent, rows, row, columns.first, at, smem);
    } else {
        // The up value of a gate value sits half a tile of columns further, in the same thread.
#pragma unroll
        for (u32 i = 0; i < Cfg::kBlockN / 4; ++i) {
            acc[i] = situ(acc[i], acc[i + Cfg::kBlockN / 4], Cfg::kSituBeta, Cfg::kSituLinearBeta);
        }
        store_rows<Cfg::kBlockN / 2>(acc, out.shared_act, rows, row, columns.first, at, smem);
    }
}

__device__ __forceinline__ void multiply_and_store(
    const Split& split, u32 row_tiles, u32 num_tokens, u32 rank, u32 smem, const Outputs& out, float* partials,
    u32* counters, const Watch& watch) {
    const u32 warp = warp_index();
    const Fragment at{warp / 4, threadIdx.x % 128, warp % 4, lane_id()};
    // An earlier launch may still read the outputs, or use the partials, until it has completed.
    griddepcontrol_wait();
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
        if (work.num_segments > 1 && !finish_segments(acc, work, split, partials, counters, rank, at, smem)) {
            continue;
        }
#pragma unroll
        for (u32 block = 0; block < Cfg::kGroupBlocks; ++block) {
            const u32 row = rows.loaded + at.first_row(block);
            store_block(acc[block], columns_of(tile.n_tile), out, rows, row, at, smem);
        }
    }
}

/*% include "kernels/gemm_entry.cuh" %*/
    chaos_begin(wait_record);
    set_up_ring(smem);
    if (warp_index() < Cfg::kMmaWarps) {
        setmaxnreg_inc<Cfg::kMmaRegisters>();
        const Outputs out{
            logits, static_cast<u32>(logits_pitch),
            {latent, static_cast<u32>(latent_pitch), Cfg::kLatentCols},
            {shared_act, static_cast<u32>(shared_act_pitch), kSharedCols}};
        multiply_and_store(split, row_tiles, rows, rank, smem, out, partials, counters, watch);
        griddepcontrol_launch_dependents();
    } else {
        setmaxnreg_dec<Cfg::kProducerRegisters>();
        if (threadIdx.x == Cfg::kMmaWarps * 32) {
            const Maps maps{gate_weight_map, down_weight_map, shared_gate_up_weight_map, x_map};
            produce(maps, split, row_tiles, rows, rank, smem, watch);
        }
        warp_sync();
    }
    leave_together();
}
