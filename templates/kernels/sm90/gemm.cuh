// ---- shared by the prefill GEMMs: work list, ring, K loop, sums of segments, bf16 rows ----

// Accumulators of one thread for 64 rows x kBlockN columns of its warpgroup (see wgmma_m64_k16 for which is which),
// and for all rows of a tile that are the warpgroup's.
using BlockSums = float[Cfg::kBlockN / 2];
using Accumulators = BlockSums[Cfg::kGroupBlocks];

/*% include "kernels/gemm_work.cuh" %*/

// What a CTA multiplies of its pair's tile: kBlockM token rows by kBlockN weight rows. The CTAs of a pair share the
// weights, each with a row tile of its own; or they share the tokens of the lone row tile that ends an uneven number,
// each with a column of tiles of its own.
struct CtaTile {
    u32 row_tile;
    u32 n_tile;
    bool shares_tokens;
};

// Raster: groups of kRasterPairRows pair rows; inside a group the tiles of two columns follow each other, and of these
// the rows are fastest, so that neighbours in time share a weight tile. The lone row tile ends the last group: one pair
// takes it for two columns. Of an uneven number of columns the last has no other: there the CTAs share its weights, and
// rank 1's row tile lies past the end.
__device__ __forceinline__ CtaTile tile_of(u32 tile, u32 row_tiles, u32 rank) {
    const u32 pair_rows = row_tiles / 2;
    const u32 last_group = (max(pair_rows, 1u) - 1) / Cfg::kRasterPairRows;
    const u32 group = min(tile / (Cfg::kRasterPairRows * kNumNTiles), last_group);
    const u32 first_row = group * Cfg::kRasterPairRows;
    const u32 rows = min(static_cast<u32>(Cfg::kRasterPairRows), pair_rows - first_row);
    const u32 two_columns = 2 * rows + (group == last_group ? row_tiles % 2 : 0);
    const u32 inside = tile - first_row * kNumNTiles;
    const u32 first_column = inside / two_columns * 2;
    const u32 columns = min(2u, kNumNTiles - first_column);
    const u32 place = inside % two_columns;
    const bool paired = place < rows * columns;
    const bool shares_tokens = !paired && columns == 2;
    const u32 row_tile = paired ? 2 * (first_row + place % rows) : row_tiles - 1;
    const u32 n_tile = first_column + (paired ? place / rows : 0);
    return {row_tile + (shares_tokens ? 0 : rank), n_tile + (shares_tokens ? rank : 0), shares_tokens};
}

// The CTA's token rows in a tile: it loads and multiplies kBlockM rows from `loaded` on, and stores those of them in
// [first, end). A box that reaches past the matrix is filled with zeros slowly. So a ragged last row tile loads the
// last kBlockM rows of the matrix, the first of which are another tile's; a matrix of fewer rows is one box all the
// same. A row tile past the end has no rows, and `loaded` lies there too: its CTA loads its half of the weights, which
// its partner needs, but no tokens, and neither multiplies nor stores.
struct TokenRows {
    u32 loaded;
    u32 first;
    u32 end;

    __device__ __forceinline__ bool any() const {
        return loaded < end;
    }

    __device__ __forceinline__ bool holds(u32 row) const {
        return row >= first && row < end;
    }
};

__device__ __forceinline__ TokenRows rows_of(u32 row_tile, u32 num_tokens) {
    const u32 first = row_tile * Cfg::kBlockM;
    const u32 last_box = max(num_tokens, static_cast<u32>(Cfg::kBlockM)) - Cfg::kBlockM;
    return {first < num_tokens ? min(first, last_box) : first, first, num_tokens};
}

/*% include "kernels/ring.cuh" %*/

//% set alternating = spec.value("kTileGroups") == 1
//% if alternating
// Goes past K blocks that the other warpgroup multiplies.
__device__ __forceinline__ void skip(Ring& ring, u32 iterations) {
    const u32 stage = ring.stage + iterations;
    ring.stage = stage % Cfg::kNumStages;
    ring.phase ^= stage / Cfg::kNumStages & 1;
}

// The thread's position among the MMA warpgroups. They take turns: each owns all 128 rows of every other tile.
//% else
// The thread's position among the MMA warpgroups, each of which owns 64 rows of every tile.
//% endif
struct Fragment {
    u32 group;   // 0 or 1
    u32 thread;  // 0 to 127
    u32 warp;    // 0 to 3
    u32 lane;

    // Which of the kTileGroups parts of a tile's rows is the warpgroup's.
    __device__ __forceinline__ u32 part() const {
        return ${("0" if alternating else "group") | code};
    }

    // First of the warp's 16 rows of a block, in the CTA's 128.
    __device__ __forceinline__ u32 first_row(u32 block) const {
        return 64 * (part() + block) + 16 * warp;
    }
};

// A stage is free for both CTAs of the pair, since each multicasts to the other: half of the weight tile, or tokens.
__device__ __forceinline__ void release_stage(u32 smem, u32 stage, u32 rank, u32 lane) {
    if (lane == 0) {
        const u32 empty = smem + Cfg::kStageEmptyOffset + stage * 8;
        mbarrier_arrive(empty);
        mbarrier_arrive_cluster_after_reads(mapa(empty, rank ^ 1));
    }
}

__device__ __forceinline__ void pin(Accumulators& acc) {
#pragma unroll
    for (u32 block = 0; block < Cfg::kGroupBlocks; ++block) {
        wgmma_pin(acc[block]);
    }
}

//% if alternating
// Until the other warpgroup has issued the last wgmma of the work before. Not only for speed: a wait for a stage tells
// one time round the ring from the next, but not from the one after it, and the other may be two times round behind.
__device__ __forceinline__ void await_turn(u32 count, const Fragment& at, u32 smem, const Watch& watch) {
    // Warpgroup 0 goes first: the phase before a barrier's first one counts as complete.
    const u32 phase = (count / 2 + at.group + 1) & 1;
    mbarrier_wait(smem + Cfg::kTurnOffset + at.group * 8, phase, watch);
}

__device__ __forceinline__ void pass_turn(const Fragment& at, u32 smem) {
    if (at.lane == 0) {
        mbarrier_arrive(smem + Cfg::kTurnOffset + (at.group ^ 1) * 8);
    }
}

//% endif
// Sums `iterations` K blocks of 64. A stage is freed when at most the wgmmas of the next one are unfinished.
__device__ __forceinline__ void accumulate(
    Accumulators& acc, Ring& ring, u32 iterations, const Fragment& at, u32 rank, u32 smem, const Watch& watch) {
#pragma unroll
    for (u32 block = 0; block < Cfg::kGroupBlocks; ++block) {
#pragma unroll
        for (u32 i = 0; i < Cfg::kBlockN / 2; ++i) {
            acc[block][i] = 0.0f;
        }
    }
    pin(acc);
    constexpr u32 kBlockABytes = 64 * Cfg::kBlockK * 2;
    u32 previous = 0;
#pragma unroll 1
    for (u32 k = 0; k < iterations; ++k) {
        const u32 a = smem + Cfg::kStagesOffset + ring.stage * Cfg::kStageBytes + at.part() * kBlockABytes;
        const u32 b = smem + Cfg::kStagesOffset + ring.stage * Cfg::kStageBytes + Cfg::kStageABytes;
        mbarrier_wait(smem + Cfg::kStageFullOffset + ring.stage * 8, ring.phase, watch);
        wgmma_fence();
#pragma unroll
        for (u32 k_bytes = 0; k_bytes < Cfg::kBlockK * 2; k_bytes += 32) {
#pragma unroll
            for (u32 block = 0; block < Cfg::kGroupBlocks; ++block) {
                const u64 rows = wgmma_descriptor(a + block * kBlockABytes + k_bytes);
                wgmma_m64_k16<Cfg::kBlockN>(acc[block], rows, wgmma_descriptor(b + k_bytes));
            }
        }
        wgmma_commit_group();
        wgmma_wait_group<1>();
        if (k > 0) {
            release_stage(smem, previous, rank, at.lane);
        }
        previous = ring.stage;
        ring.advance();
    }
//% if alternating
    pass_turn(at, smem);
//% endif
    wgmma_wait_group<0>();
    pin(acc);
    release_stage(smem, previous, rank, at.lane);
}

// Frees the stages of `iterations` K blocks that need no multiplication.
__device__ __forceinline__ void pass_over(
    Ring& ring, u32 iterations, const Fragment& at, u32 rank, u32 smem, const Watch& watch) {
#pragma unroll 1
    for (u32 k = 0; k < iterations; ++k) {
        mbarrier_wait(smem + Cfg::kStageFullOffset + ring.stage * 8, ring.phase, watch);
        release_stage(smem, ring.stage, rank, at.lane);
        ring.advance();
    }
//% if alternating
    pass_turn(at, smem);
//% endif
}

// fp32 sums of 64 rows x kBlockN columns in memory: quad q of thread t at (q * 128 + t) * 16 bytes.
constexpr u32 kBlockElems = 64 * Cfg::kBlockN;
// Of one warpgroup's rows of a tile; of all rows of a pair's tile.
constexpr u32 kPartElems = Cfg::kGroupBlocks * kBlockElems;
constexpr u32 kSegmentElems = 2 * Cfg::kTileGroups * kPartElems;

// One warpgroup's sums of one segment.
__device__ __forceinline__ float* partial_slot(
    float* partials, const Split& split, u32 cut, u32 segment, u32 rank, const Fragment& at) {
    const u64 slot = ((static_cast<u64>(cut) * split.sk_max_seg + segment) * 2 + rank) * Cfg::kTileGroups + at.part();
    return partials + slot * kPartElems + at.thread * 4;
}

/*% include "kernels/group_word.cuh" %*/

__device__ __forceinline__ void store_partial(const BlockSums& acc, float* own) {
#pragma unroll
    for (u32 q = 0; q < Cfg::kBlockN / 8; ++q) {
        const Vec4 quad{
            float_to_bits(acc[4 * q]), float_to_bits(acc[4 * q + 1]),
            float_to_bits(acc[4 * q + 2]), float_to_bits(acc[4 * q + 3])};
        st_global_v4(own + q * 512, quad);
    }
}

// Whether this warpgroup is the last of its tile's segments. If not, it has left its sums in memory. Nobody waits:
// whoever finds all others done keeps its own sums in registers.
__device__ __forceinline__ bool arrives_last(
    const Accumulators& acc, const Work& work, float* own, u32* counter, const Fragment& at, u32 smem) {
    const u32 others = work.num_segments - 1;
    u32 arrivals = broadcast_word(at.thread == 0 ? ld_acquire_gpu(counter) : 0, at, smem);
    if (arrivals == others) {
        return true;
    }
#pragma unroll
    for (u32 block = 0; block < Cfg::kGroupBlocks; ++block) {
        store_partial(acc[block], own + block * kBlockElems);
    }
    // All sums of the warpgroup happen before its one arrival (PTX ISA 8.8, causality order through the barrier).
    named_barrier_sync(Cfg::kGroupBarrier + at.group, 128);
    arrivals = broadcast_word(at.thread == 0 ? atomic_add_acq_rel_gpu(counter, 1) : 0, at, smem);
    return arrivals == others;
}

// Adds one segment's sums from memory.
__device__ __forceinline__ void add_partial(BlockSums& acc, const float* source) {
#pragma unroll
    for (u32 q = 0; q < Cfg::kBlockN / 8; ++q) {
        const Vec4 quad = ld_global_v4(source + q * 512);
        acc[4 * q] += bits_to_float(quad.x);
        acc[4 * q + 1] += bits_to_float(quad.y);
        acc[4 * q + 2] += bits_to_float(quad.z);
        acc[4 * q + 3] += bits_to_float(quad.w);
    }
}

// Adds the sum of segments [0, count), itself taken in their order.
__device__ __forceinline__ void add_prefix(BlockSums& acc, const float* source, u32 count) {
#pragma unroll
    for (u32 q = 0; q < Cfg::kBlockN / 8; ++q) {
        const Vec4 first = ld_global_v4(source + q * 512);
        float total[4] = {
            bits_to_float(first.x), bits_to_float(first.y), bits_to_float(first.z), bits_to_float(first.w)};
#pragma unroll 1
        for (u32 segment = 1; segment < count; ++segment) {
            const Vec4 quad = ld_global_v4(source + segment * kSegmentElems + q * 512);
            total[0] += bits_to_float(quad.x);
            total[1] += bits_to_float(quad.y);
            total[2] += bits_to_float(quad.z);
            total[3] += bits_to_float(quad.w);
        }
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            acc[4 * q + i] += total[i];
        }
    }
}

// The end of a segment of a cut tile: hands its sums over, or, arriving last, adds all segments from the left,
// whichever of them it holds itself. False: another CTA finishes the tile. The counter returns to 0 for the next
// launch.
__device__ __forceinline__ bool finish_segments(
    Accumulators& acc, const Work& work, const Split& split, float* partials, u32* counters, u32 rank,
    const Fragment& at, u32 smem) {
    u32* counter = counters + (work.cut * 2 + rank) * Cfg::kTileGroups + at.part();
    float* own = partial_slot(partials, split, work.cut, work.segment, rank, at);
    if (!arrives_last(acc, work, own, counter, at, smem)) {
        return false;
    }
    if (at.thread == 0) {
        st_relaxed_gpu(counter, 0);
    }
#pragma unroll
    for (u32 block = 0; block < Cfg::kGroupBlocks; ++block) {
        const float* sums = own + block * kBlockElems;
        if (work.segment == 1) {
            add_partial(acc[block], sums - kSegmentElems);
        } else if (work.segment > 1) {
            add_prefix(acc[block], sums - work.segment * kSegmentElems, work.segment);
        }
        for (u32 segment = work.segment + 1; segment < work.num_segments; ++segment) {
            add_partial(acc[block], sums + (segment - work.segment) * kSegmentElems);
        }
    }
    return true;
}

// A bf16 output matrix with a row pitch in elements.
struct Matrix {
    u16* base;
    u32 pitch;
    u32 cols;
};

// Stores 16 rows x kCols columns of one warp, a power of two from 8 to 64, rounded to bf16: through its own slab of
// shared memory, so that a row leaves as neighbouring 16-byte stores. `sums` holds the warp's fragment of these
// columns, from `row` on; rows that the tile does not store and columns past the matrix are dropped.
template <u32 kCols>
__device__ __forceinline__ void store_columns(
    const float* sums, const Matrix& out, const TokenRows& rows, u32 row, u32 column, const Fragment& at, u32 smem) {
    constexpr u32 kPitch = 64 * 2 + 16;  // 16 bytes more than a row: 8 rows of a matrix hit all banks
    constexpr u32 kRowLanes = kCols / 8;  // 16 bytes each
    constexpr u32 kRowsAtOnce = kRowLanes == 1 ? 16 : 32 / kRowLanes;
    const u32 slab = smem + Cfg::kStagingOffset + (at.group * 4 + at.warp) * (16 * kPitch);
    const u32 matrix = at.lane / 8;
    const u32 row_address = slab + (8 * (matrix % 2) + at.lane % 8) * kPitch + matrix / 2 * 16;
    warp_sync();
    if constexpr (kCols == 8) {
        stmatrix_x2(row_address, cvt_rn_bf16x2(sums[1], sums[0]), cvt_rn_bf16x2(sums[3], sums[2]));
    } else {
#pragma unroll
        for (u32 i = 0; i < kCols / 2; i += 8) {
            stmatrix_x4(
                row_address + 4 * i,
                cvt_rn_bf16x2(sums[i + 1], sums[i]),
                cvt_rn_bf16x2(sums[i + 3], sums[i + 2]),
                cvt_rn_bf16x2(sums[i + 5], sums[i + 4]),
                cvt_rn_bf16x2(sums[i + 7], sums[i + 6]));
        }
    }
    warp_sync();
    chaos_point(slab);
#pragma unroll
    for (u32 i = 0; i < 16 / kRowsAtOnce; ++i) {
        const u32 inner_row = i * kRowsAtOnce + at.lane / kRowLanes;
        const u32 inner_column = at.lane % kRowLanes * 8;
        const u32 first = column + inner_column;
        if (inner_row < 16 && rows.holds(row + inner_row) && first < out.cols) {
            const Vec4 value = ld_shared_v4(slab + inner_row * kPitch + inner_column * 2);
            st_global_v4(out.base + static_cast<u64>(row + inner_row) * out.pitch + first, value);
        }
    }
}

// The same for any multiple of 8 columns.
template <u32 kCols>
__device__ __forceinline__ void store_rows(
    const float* sums, const Matrix& out, const TokenRows& rows, u32 row, u32 column, const Fragment& at, u32 smem) {
    static_assert(kCols % 8 == 0, "a matrix of stmatrix has 8 columns");
    constexpr u32 kFirst = kCols >= 64 ? 64 : kCols >= 32 ? 32 : kCols >= 16 ? 16 : 8;
    store_columns<kFirst>(sums, out, rows, row, column, at, smem);
    if constexpr (kCols > kFirst) {
        store_rows<kCols - kFirst>(sums + kFirst / 2, out, rows, row, column + kFirst, at, smem);
    }
}

// The next stage, to be filled with both halves of the weights and, if the tile has any, the tokens.
__device__ __forceinline__ void expect_stage(const Ring& load, bool has_tokens, u32 smem, const Watch& watch) {
    mbarrier_wait(smem + Cfg::kStageEmptyOffset + load.stage * 8, load.phase ^ 1, watch);
    const u32 bytes = has_tokens ? Cfg::kStageBytes : Cfg::kStageBytes - Cfg::kStageABytes;
    mbarrier_arrive_expect_tx(smem + Cfg::kStageFullOffset + load.stage * 8, bytes);
}

// Where a stage's boxes land, and the barrier that gets their bytes.
struct StageBoxes {
    u32 tokens;
    u32 weights;
    u32 full;
};

__device__ __forceinline__ StageBoxes boxes_of(const Ring& load, u32 smem) {
    const u32 tokens = smem + Cfg::kStagesOffset + load.stage * Cfg::kStageBytes;
    return {tokens, tokens + Cfg::kStageABytes, smem + Cfg::kStageFullOffset + load.stage * 8};
}

// Which columns of a matrix: chunks of kBlockK, or columns of a map that is not in chunks.
struct BlockColumns {
    u32 column;
    u32 chunk;
};

// The tokens of K block `k`, if the tile has any. CTAs that share them load every other block for both.
__device__ __forceinline__ void load_tokens(
    const TensorMap& map, const CtaTile& tile, const TokenRows& rows, const BlockColumns& at, u32 k, u32 rank,
    const StageBoxes& to) {
    if (tile.shares_tokens) {
        if (k % 2 == rank) {
            tma_load_3d_multicast(to.tokens, map, at.column, rows.loaded, at.chunk, to.full, 3);
        }
    } else if (rows.any()) {
        tma_load_3d(to.tokens, map, at.column, rows.loaded, at.chunk, to.full);
    }
}

// A tile's rows of a weight matrix; the second half of them begins `half_rows` behind the first.
struct WeightRows {
    const TensorMap* map;
    u32 first;
    u32 half_rows;
};

// One K block of them: both halves, or this rank's for both CTAs.
__device__ __forceinline__ void load_weights(
    const WeightRows& rows, const CtaTile& tile, const BlockColumns& at, u32 rank, const StageBoxes& to) {
    if (tile.shares_tokens) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 row = rows.first + half * rows.half_rows;
            tma_load_3d(to.weights + half * Cfg::kHalfBBytes, *rows.map, at.column, row, at.chunk, to.full);
        }
    } else {
        const u32 row = rows.first + rank * rows.half_rows;
        tma_load_3d_multicast(to.weights + rank * Cfg::kHalfBBytes, *rows.map, at.column, row, at.chunk, to.full, 3);
    }
}

// Barriers of the ring, and the pair in step: no CTA may write to its partner before the partner has them.
__device__ __forceinline__ void set_up_ring(u32 smem) {
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < Cfg::kNumStages; ++stage) {
            mbarrier_init(smem + Cfg::kStageFullOffset + stage * 8, 1);
            mbarrier_init(smem + Cfg::kStageEmptyOffset + stage * 8, Cfg::kEmptyArrivals);
        }
//% if alternating
        mbarrier_init(smem + Cfg::kTurnOffset, Cfg::kMmaWarps / 2);
        mbarrier_init(smem + Cfg::kTurnOffset + 8, Cfg::kMmaWarps / 2);
//% endif
        fence_mbarrier_init();
    }
    __syncthreads();
    cluster_arrive();
    cluster_wait();
}

// The partner may still multicast to this CTA's shared memory or arrive at its barriers until it has finished too.
__device__ __forceinline__ void leave_together() {
    cluster_arrive();
    cluster_wait();
}
