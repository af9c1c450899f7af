#include "${device_common | file_name}"
#include "${device_family | file_name}"
#include "${shared["device"] | file_name}"

using namespace cake;

// [shared_act | y] x [shared_down | up slice]^T. A pair of CTAs owns a tile of 256 x kBlockN: each its 128 token rows
// and half of the weight rows; the tensor core of each multiplies its tokens with both halves. K runs over the
// shared-down blocks first, since they do not need y.
//
//   loader of each CTA --TMA--> its ring: 128 tokens, half the weights --stage_full--> one thread of CTA 0 multiplies
//        ^                                                                              |      for both (tcgen05)
//        +-------------------------- stage_empty, in both CTAs -------------------------+
//                                                                                       | sums_full, in both CTAs
//                              out <-- 8 epilogue warps of each CTA <-- 2 accumulators in tensor memory
//                                                  ^   |                                ^
//             cut tiles: partials + counters ------+   +-- sums_empty, in CTA 0 --------+
//
//% if spec.value("kFusedNorm")
// The grid has a cluster an item, all of them resident. The epilogue warps first normalise rows cta, cta + grid, ...
// into y in global memory --grid counter (rows_arrived)--> loaders, before their first up block.
//% else
// The grid has a cluster an item; a cluster that has finished one takes the place of a cluster that has not started. A
// programmatic launch: the shared-down blocks overlap the norm, for which a loader waits before its first up block.
//% endif
//
// Barriers, each with its arrivals per phase:
//   stage_full[s]   1: in CTA 0, its loader's arrive.expect_tx of 2 kStageBytes, the copies of both CTAs.
//   stage_empty[s]  1: in each CTA, the commit behind the products that read the stage of both.
//   sums_full[a]    1: in each CTA, the commit behind the last product of a tile.
//   sums_empty[a]   kSumsReaders: in CTA 0, one lane of each epilogue warp of both CTAs.
//   item_full[n]    1: in each CTA, its loader's arrive.expect_tx of the answer's kAnswerBytes.
//   item_empty[n]   kItemReaders: in CTA 0, whoever has read the answer: 2 loaders, the multiplying thread, the warps.
//% if spec.value("kFusedNorm")
//   rows_arrived    1: one epilogue thread, once this CTA has arrived at the grid counter.
//% endif

/*% include "kernels/gemm_constants.cuh" %*/
static_assert(Cfg::kOutCols % 64 == 0, "whole slabs, and masked by 8 columns");

#include "${shared["gemm"] | file_name}"
//% if spec.value("kFusedNorm")
#include "${shared["norm_row"] | file_name}"
//% endif

// ---- loaders ----

struct Maps {
    const TensorMap& shared_down;
    const TensorMap& up;
    const TensorMap& shared_act;
    const TensorMap& y;
};

// One K block: the CTA's token rows, and its half of the weight rows.
__device__ __forceinline__ void load_block(
    const Maps& maps, u32 k, u32 token, u32 weight_row, u32 up_col0, u32 a, u32 full) {
    const u32 b = a + Cfg::kStageABytes;
    if (k < kDownBlocks) {
        tma_load_3d_pair(a, maps.shared_act, 0, token, k, full);
        load_weight_rows(b, maps.shared_down, 0, weight_row, k, full);
        return;
    }
    // A ragged slice is a map over columns that ends at the slice: the rest of its last block arrives as zeros.
    const u32 block = k - kDownBlocks;
    const u32 column = Cfg::kUpRagged ? up_col0 + block * Cfg::kBlockK : 0;
    const u32 chunk = Cfg::kUpRagged ? 0 : up_col0 / Cfg::kBlockK + block;
    tma_load_3d_pair(a, maps.y, column, token, chunk, full);
    load_weight_rows(b, maps.up, column, weight_row, chunk, full);
}

__device__ __forceinline__ void produce(
    const Maps& maps, const Split& split, u32 pair_rows, u32 num_tokens, u32 up_col0, const u32* counters, u32 rank,
    u32 smem, const Watch& watch) {
    prefetch_tensormap(maps.shared_act);
    prefetch_tensormap(maps.shared_down);
    prefetch_tensormap(maps.y);
    prefetch_tensormap(maps.up);
//% if spec.value("kFusedNorm")
    // shared_act is an earlier launch's. From here on waits are bounded.
    griddepcontrol_wait();
//% endif
    ClusterWork<Role::kLoader> works(split, rank, smem, watch);
    Ring load;
    Work work;
    bool has_y = false;
    while (works.next(work, watch)) {
        const TilePlace place = place_of(work.tile, pair_rows);
        const u32 token = loaded_token(first_token(place, rank), num_tokens);
        // As with tokens: half a tile past the end is the other half once more.
        const u32 own_row = place.n_tile * Cfg::kBlockN + rank * kHalfCols;
        const u32 weight_row = own_row < Cfg::kOutCols ? own_row : own_row - kHalfCols;
        for (u32 k = work.k_begin; k < work.k_end; ++k) {
            if (!has_y && k >= kDownBlocks) {
//% if spec.value("kFusedNorm")
                // This CTA has arrived and the counter has wrapped, so every other has arrived too. The fence takes
                // the acquired writes over to the copies.
                mbarrier_wait(smem + Cfg::kRowsArrivedOffset, 0, watch);
                counter_wait_wrapped(counters, watch);
                fence_proxy_async_global();
//% else
                // y is the norm's: its launch must have completed.
                griddepcontrol_wait();
//% endif
                has_y = true;
            }
            const u32 full = begin_stage(load, rank, smem, watch);
            load_block(
                maps, k, token, weight_row, up_col0, smem + Cfg::kStagesOffset + load.stage * Cfg::kStageBytes, full);
            load.advance();
        }
    }
    drain_ring(load, smem, watch);
}

// ---- epilogue warps ----

//% if spec.value("kFusedNorm")
struct Rows {
    const u16* routed;
    const u16* norm_weight;
    u16* y;
    u32 num_tokens;
    u32 num_partials;
    u32 routed_pitch;
    u32 routed_partial_stride;
    u32 y_pitch;
};

// A lane's vectors are taken so many at a time: a whole row's fp32 sums, or its weights beside it, are more registers
// than each of this many threads has.
constexpr u32 kPart = 4;

__device__ __forceinline__ RowVectors sum_partials_in_parts(
    const u16* row, u32 lane, u32 num_partials, u32 partial_stride) {
    RowVectors rounded = load_vectors(row, lane);
    if (num_partials == 1) {
        return rounded;
    }
#pragma unroll
    for (u32 first = 0; first < Cfg::kVectorsPerLane; first += kPart) {
        const u32 end = min(first + kPart, static_cast<u32>(Cfg::kVectorsPerLane));
        float sums[kPart][8];
#pragma unroll
        for (u32 v = first; v < end; ++v) {
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                const u32 pair = rounded.pairs[v][i / 2];
                sums[v - first][i] = i % 2 == 0 ? bf16_low(pair) : bf16_high(pair);
            }
        }
#pragma unroll 1
        for (u32 partial = 1; partial < num_partials; ++partial) {
            const u16* source = row + static_cast<u64>(partial) * partial_stride;
#pragma unroll
            for (u32 v = first; v < end; ++v) {
                const Vec4 next = owns_vector(lane, v) ? ld_global_v4(source + (lane + 32 * v) * 8) : Vec4{0, 0, 0, 0};
                const u32 pairs[4] = {next.x, next.y, next.z, next.w};
#pragma unroll
                for (u32 i = 0; i < 8; ++i) {
                    sums[v - first][i] += i % 2 == 0 ? bf16_low(pairs[i / 2]) : bf16_high(pairs[i / 2]);
                }
            }
        }
#pragma unroll
        for (u32 v = first; v < end; ++v) {
#pragma unroll
            for (u32 word = 0; word < 4; ++word) {
                rounded.pairs[v][word] = cvt_rn_bf16x2(sums[v - first][2 * word + 1], sums[v - first][2 * word]);
            }
        }
    }
    return rounded;
}

__device__ __forceinline__ void store_row_in_parts(
    u16* y, const RowVectors& rounded, const u16* norm_weight, float scale, u32 lane) {
#pragma unroll
    for (u32 first = 0; first < Cfg::kVectorsPerLane; first += kPart) {
        const u32 end = min(first + kPart, static_cast<u32>(Cfg::kVectorsPerLane));
        u32 weights[kPart][4];
#pragma unroll
        for (u32 v = first; v < end; ++v) {
            const u16* source = norm_weight + (lane + 32 * v) * 8;
            const Vec4 words = owns_vector(lane, v) ? ld_global_v4(source) : Vec4{0, 0, 0, 0};
            weights[v - first][0] = words.x;
            weights[v - first][1] = words.y;
            weights[v - first][2] = words.z;
            weights[v - first][3] = words.w;
        }
#pragma unroll
        for (u32 v = first; v < end; ++v) {
            if (owns_vector(lane, v)) {
                st_global_v4(y + (lane + 32 * v) * 8, scale_vector(rounded.pairs[v], weights[v - first], scale));
            }
        }
    }
}

// A warp a row; this CTA's arrival at the counter publishes its rows. Each writer fences its generic writes for the
// copies that will read them; the barrier brings them to one thread, whose release covers all (PTX ISA 8.8).
__device__ __forceinline__ void normalise(const Rows& rows, u32* counter, u32 lane, u32 smem) {
    const u32 warp = warp_index() - Cfg::kFirstEpilogueWarp;
    for (u32 row = blockIdx.x + warp * gridDim.x; row < rows.num_tokens; row += Cfg::kEpilogueWarps * gridDim.x) {
        const u16* source = rows.routed + static_cast<u64>(row) * rows.routed_pitch;
        const RowVectors rounded =
            sum_partials_in_parts(source, lane, rows.num_partials, rows.routed_partial_stride);
        const float scale = reciprocal_norm(rounded);
        chaos_point(row);
        store_row_in_parts(rows.y + static_cast<u64>(row) * rows.y_pitch, rounded, rows.norm_weight, scale, lane);
    }
    fence_proxy_async_global();
    named_barrier_sync(Cfg::kNormBarrier, Cfg::kEpilogueWarps * 32);
    if (warp == 0 && lane == 0) {
        atomic_inc_acq_rel_gpu(counter, gridDim.x - 1);
        mbarrier_arrive(smem + Cfg::kRowsArrivedOffset);
    }
}

//% endif
//% if spec.value("kStagedStore")
// The last tile of a cluster goes out through the drained ring: each warp has two slabs there, of 32 rows x 64 columns
// of either half of the tile, 128-byte rows with the 128-byte swizzle.
constexpr u32 kSlabBytes = 32 * 128;

__device__ __forceinline__ u32 slab_of(u32 half, const Fragment& at, u32 smem) {
    return smem + Cfg::kStagesOffset + ((at.group * 4 + at.thread / 32) * 2 + half) * kSlabBytes;
}

__device__ __forceinline__ void stage_bf16(u32 slab, u32 lane, u32 column, const float (&values)[kStepCols]) {
#pragma unroll
    for (u32 i = 0; i < kStepCols; i += 8) {
        const u32 unit = (column + i) / 8 ^ lane % 8;
        const Vec4 words{
            cvt_rn_bf16x2(values[i + 1], values[i]), cvt_rn_bf16x2(values[i + 3], values[i + 2]),
            cvt_rn_bf16x2(values[i + 5], values[i + 4]), cvt_rn_bf16x2(values[i + 7], values[i + 6])};
        st_shared_v4(slab + lane * 128 + unit * 16, words);
    }
}

// Rows and columns past the matrix are dropped by the copy.
__device__ __forceinline__ void store_slabs(
    const TensorMap& out_map, u32 first_row, u32 first_column, const Fragment& at, u32 smem) {
    fence_proxy_async_shared();
    warp_sync();
    if (at.lane == 0) {
        const u32 row = first_row + at.thread;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 column = first_column + half * kHalfCols + at.group * kGroupCols;
            tma_store_3d(out_map, 0, row, column / 64, slab_of(half, at, smem));
        }
        bulk_commit_group();
        bulk_wait_group<0>();
    }
}

//% endif
struct Output {
//% if spec.value("kStagedStore")
    const TensorMap& map;
//% endif
    u16* base;
    u32 pitch;
    u32 rows;
};

__device__ __forceinline__ void finish(
    const Split& split, u32 pair_rows, u32 rank, u32 smem, const Output& out, float* partials, u32* counters,
    const Watch& watch) {
    const Fragment at = fragment();
    ClusterWork<Role::kEpilogue> works(split, rank, smem, watch);
    Work work;
    for (u32 count = 0; works.next(work, watch); ++count) {
        const TilePlace place = place_of(work.tile, pair_rows);
        const u32 first_row = first_token(place, rank);
        const u32 token = first_row + at.thread;
        const u32 first_column = place.n_tile * Cfg::kBlockN;
        u16* row = out.base + static_cast<u64>(token) * out.pitch;
        await_sums(count, smem, watch);
//% if spec.value("kStagedStore")
        const bool is_last = works.is_last(watch);
//% endif
        if (first_row < out.rows) {
            const Segments segments = segments_of(work, split, partials, counters, rank, at);
            const bool finishes =
                finish_tile(accumulator(smem, count % 2), work, segments, at, smem, [&](Sums& sums, u32 column) {
//% if spec.value("kStagedStore")
                    if (is_last) {
                        stage_bf16(slab_of(0, at, smem), at.lane, column % kGroupCols, sums[0]);
                        stage_bf16(slab_of(1, at, smem), at.lane, column % kGroupCols, sums[1]);
                        return;
                    }
//% endif
                    if (token < out.rows) {
                        store_bf16_within(row, first_column + column, Cfg::kOutCols, sums[0]);
                        store_bf16_within(row, first_column + column + kHalfCols, Cfg::kOutCols, sums[1]);
                    }
                });
//% if spec.value("kStagedStore")
            if (is_last && finishes) {
                store_slabs(out.map, first_row, first_column, at, smem);
            }
//% endif
        }
        release_sums(count, at, rank, smem);
    }
}

/*% include "kernels/gemm_entry.cuh" %*/
    chaos_begin(wait_record);
//% if spec.value("kFusedNorm")
    if (threadIdx.x == 0) {
        mbarrier_init(smem + Cfg::kRowsArrivedOffset, 1);
    }
//% endif
    set_up(smem);
    const u32 warp = warp_index();
    if (warp >= Cfg::kFirstEpilogueWarp) {
//% if spec.value("kStagedStore")
        const Output output{out_map, out, static_cast<u32>(out_pitch), tokens};
//% else
        const Output output{out, static_cast<u32>(out_pitch), tokens};
//% endif
        // An earlier launch may still read y and out, or use the partials, until it has completed.
        griddepcontrol_wait();
//% if spec.value("kFusedNorm")
        const Rows rows{
            routed, norm_weight, y_workspace, tokens, static_cast<u32>(num_partials),
            static_cast<u32>(routed_pitch), static_cast<u32>(routed_partial_stride), static_cast<u32>(y_pitch)};
        normalise(rows, counters, lane_id(), smem);
//% endif
        finish(split, pair_rows, rank, smem, output, partials, counters + Cfg::kNormCounters, watch);
        griddepcontrol_launch_dependents();
    } else if (warp == Cfg::kMmaWarp) {
        if (rank == 0 && elect_one()) {
//% if spec.value("kFusedNorm")
            // The tokens come from an earlier launch: no bounded wait for them begins before it has ended.
            griddepcontrol_wait();
//% endif
            multiply(split, smem, watch);
        }
    } else if (lane_id() == 0) {
        const Maps maps{shared_down_weight_map, up_weight_map, shared_act_map, y_workspace_map};
        produce(maps, split, pair_rows, tokens, static_cast<u32>(up_col0), counters, rank, smem, watch);
    }
    leave_together(smem);
}
