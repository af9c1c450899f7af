// ---- shared by the prefill GEMMs: work list, launch control, ring, products, sums of segments, rows ----

/*% include "kernels/gemm_work.cuh" %*/

// ---- the cluster's work: its own item, then those of clusters that have not started ----

// Arrives at CTA 0's barrier. Only CTA 1 needs the cluster's scope, and the memory barrier that comes with it: the one
// thread that multiplies, whom it would hold up, is in CTA 0.
__device__ __forceinline__ void arrive_at_leader(u32 barrier, u32 rank) {
    if (rank == 0) {
        mbarrier_arrive(barrier);
    } else {
        mbarrier_arrive_cluster(mapa(barrier, 0));
    }
}

// Who walks the cluster's work: the loaders of both CTAs and the thread that multiplies, one thread each, and the
// epilogue warps of both.
enum class Role { kLoader, kMultiplier, kEpilogue };

// The grid has a cluster an item. At the start of an item CTA 0's loader asks for the next one; the answer to request n
// comes to both CTAs, to slot n % 2. Each of kItemReaders readers takes it there, and tells CTA 0 that it has. Where
// the whole grid is resident, nobody asks: kOneItem.
template <Role kRole>
class ClusterWork {
  public:
    __device__ __forceinline__ ClusterWork(const Split& split, u32 rank, u32 smem, const Watch& watch)
        : split_(split), list_(split, blockIdx.x / 2, split.num_items), rank_(rank), smem_(smem) {
        request(watch);
    }

    __device__ __forceinline__ bool next(Work& work, const Watch& watch) {
        while (!list_.next(work)) {
            const u32 item = next_item(watch);
            if (item == kNoCluster) {
                return false;
            }
            list_ = WorkList(split_, item, split_.num_items);
            is_known_ = false;
            request(watch);
        }
        return true;
    }

    // Whether nothing comes after the work that `next` gave last.
    __device__ __forceinline__ bool is_last(const Watch& watch) {
        return list_.ends() && next_item(watch) == kNoCluster;
    }

  private:
    __device__ __forceinline__ void request(const Watch& watch) {
        if constexpr (kRole == Role::kLoader && !Cfg::kOneItem) {
            const u32 slot = count_ % 2;
            const u32 full = smem_ + Cfg::kItemFullOffset + slot * 8;
            if (rank_ == 0) {
                mbarrier_wait_cluster(smem_ + Cfg::kItemEmptyOffset + slot * 8, (count_ / 2 & 1) ^ 1, watch);
            }
            mbarrier_arrive_expect_tx(full, Cfg::kAnswerBytes);
            if (rank_ == 0) {
                try_cancel_cluster(smem_ + Cfg::kAnswersOffset + slot * Cfg::kAnswerBytes, full);
            }
        }
    }

    // The item after this one, or kNoCluster.
    __device__ __forceinline__ u32 next_item(const Watch& watch) {
        if (Cfg::kOneItem) {
            return kNoCluster;
        }
        if (!is_known_) {
            next_item_ = take_answer(watch);
            is_known_ = true;
        }
        return next_item_;
    }

    __device__ __forceinline__ u32 take_answer(const Watch& watch) {
        const u32 slot = count_ % 2;
        mbarrier_wait_cluster(smem_ + Cfg::kItemFullOffset + slot * 8, count_ / 2 & 1, watch);
        const u32 first = query_cancelled_cluster(smem_ + Cfg::kAnswersOffset + slot * Cfg::kAnswerBytes);
        // The next answer to this slot is written by the asynchronous proxy.
        fence_proxy_async_shared();
        if constexpr (kRole == Role::kEpilogue) {
            warp_sync();
        }
        if (kRole != Role::kEpilogue || lane_id() == 0) {
            arrive_at_leader(smem_ + Cfg::kItemEmptyOffset + slot * 8, rank_);
        }
        ++count_;
        return first == kNoCluster ? kNoCluster : first / 2;
    }

    Split split_;
    WorkList list_;
    u32 rank_;
    u32 smem_;
    u32 count_ = 0;  // answers taken
    u32 next_item_ = kNoCluster;
    bool is_known_ = false;  // the answer about it is taken
};

/*% include "kernels/ring.cuh" %*/

// ---- loaders, one thread a CTA ----

// The first of the CTA's token rows in a tile. In the last pair row of an uneven number of row tiles they all lie past
// the end for rank 1, which then stores nothing.
__device__ __forceinline__ u32 first_token(const TilePlace& place, u32 rank) {
    return (place.pair_row * 2 + rank) * Cfg::kBlockM;
}

// Where the CTA's token rows are loaded from. Rows past the end are the partner's once more: they are valid operands
// and in L2, while a box outside of the matrix is filled with zeros more slowly.
__device__ __forceinline__ u32 loaded_token(u32 token, u32 num_tokens) {
    return token < num_tokens ? token : token - Cfg::kBlockM;
}

// Waits until the stage is free in this CTA; CTA 0 then expects the bytes of both. Returns the barrier, CTA 0's.
__device__ __forceinline__ u32 begin_stage(const Ring& load, u32 rank, u32 smem, const Watch& watch) {
    const u32 full = smem + Cfg::kStageFullOffset + load.stage * 8;
    mbarrier_wait_cluster(smem + Cfg::kStageEmptyOffset + load.stage * 8, load.phase ^ 1, watch);
    if (rank == 0) {
        mbarrier_arrive_expect_tx(full, 2 * Cfg::kStageBytes);
    }
    return mapa(full, 0);
}

// Half of a tile's weight rows, each CTA its own.
__device__ __forceinline__ void load_weight_rows(
    u32 destination, const TensorMap& map, u32 column, u32 row, u32 chunk, u32 full) {
    if constexpr (Cfg::kEvictFirst) {
        tma_load_3d_pair_hint(destination, map, column, row, chunk, full, evict_first_policy());
    } else {
        tma_load_3d_pair(destination, map, column, row, chunk, full);
    }
}

// Until every stage is free again: no commit of CTA 0 may arrive here after the CTA has exited.
__device__ __forceinline__ void drain_ring(Ring load, u32 smem, const Watch& watch) {
    for (u32 stage = 0; stage < Cfg::kNumStages; ++stage) {
        mbarrier_wait_cluster(smem + Cfg::kStageEmptyOffset + load.stage * 8, load.phase ^ 1, watch);
        load.advance();
    }
}

// ---- products, one thread of CTA 0 ----

// A tile's sums in tensor memory, in both CTAs: lane = token row, column = weight row. Two tiles take turns, so that
// one is stored while the next is multiplied.
__device__ __forceinline__ u32 accumulator(u32 smem, u32 turn) {
    return tensor_memory_address(smem + Cfg::kTensorBaseOffset) + turn * Cfg::kBlockN;
}

// One K block of 64: four products of K = 16.
__device__ __forceinline__ void multiply_block(u32 d, u32 a, bool accumulate) {
    constexpr u32 kShape = tcgen05_shape(2 * Cfg::kBlockM, Cfg::kBlockN);
    const u32 b = a + Cfg::kStageABytes;
#pragma unroll
    for (u32 k_bytes = 0; k_bytes < Cfg::kBlockK * 2; k_bytes += 32) {
        tcgen05_mma_f16_pair(
            d, tcgen05_descriptor(a + k_bytes), tcgen05_descriptor(b + k_bytes), kShape, accumulate || k_bytes > 0);
    }
}

// The tensor core reads a stage while the next is issued; its commit frees the stage in both CTAs.
__device__ __forceinline__ void multiply(const Split& split, u32 smem, const Watch& watch) {
    ClusterWork<Role::kMultiplier> works(split, 0, smem, watch);
    Ring ring;
    Work work;
    for (u32 count = 0; works.next(work, watch); ++count) {
        const u32 turn = count % 2;
        mbarrier_wait_cluster(smem + Cfg::kSumsEmptyOffset + turn * 8, (count / 2 & 1) ^ 1, watch);
        const u32 d = accumulator(smem, turn);
#pragma unroll 1
        for (u32 k = work.k_begin; k < work.k_end; ++k) {
            mbarrier_wait_cluster(smem + Cfg::kStageFullOffset + ring.stage * 8, ring.phase, watch);
            tcgen05_fence_after_thread_sync();
            multiply_block(d, smem + Cfg::kStagesOffset + ring.stage * Cfg::kStageBytes, k > work.k_begin);
            tcgen05_commit_pair(smem + Cfg::kStageEmptyOffset + ring.stage * 8);
            ring.advance();
        }
        tcgen05_commit_pair(smem + Cfg::kSumsFullOffset + turn * 8);
    }
}

// ---- epilogue: two groups of four warps, one thread a token row ----

// A group has kGroupCols columns of the lower half of a tile, and those half a tile further: in a shared tile, the gate
// and the up value of one output.
constexpr u32 kHalfCols = Cfg::kBlockN / 2;
constexpr u32 kGroupCols = kHalfCols / 2;
constexpr u32 kStepCols = 16;
using Sums = float[2][kStepCols];

struct Fragment {
    u32 group;   // 0 or 1
    u32 thread;  // 0 to 127: which of the CTA's token rows
    u32 lane;
};

__device__ __forceinline__ Fragment fragment() {
    const u32 warp = warp_index();
    // Tensor memory gives a warp the lanes that its index % 4 says.
    return {(warp - Cfg::kFirstEpilogueWarp) / 4, warp % 4 * 32 + lane_id(), lane_id()};
}

// First column of a step, in a half.
__device__ __forceinline__ u32 step_column(const Fragment& at, u32 step) {
    return at.group * kGroupCols + step * kStepCols;
}

__device__ __forceinline__ void load_sums(Sums& sums, u32 from, const Fragment& at, u32 step) {
    const u32 lanes = from + ((at.thread - at.lane) << 16) + step_column(at, step);
    tensor_memory_load_32x32b(sums[0], lanes);
    tensor_memory_load_32x32b(sums[1], lanes + kHalfCols);
    tensor_memory_wait_load(sums);
}

// fp32 sums of one group in memory: quad q of thread t at (q * 128 + t) * 16 bytes; a step has kStepQuads.
constexpr u32 kGroupElems = Cfg::kBlockM * 2 * kGroupCols;
constexpr u32 kSegmentElems = 2 * 2 * kGroupElems;
constexpr u32 kStepQuads = 2 * kStepCols / 4;

/*% include "kernels/group_word.cuh" %*/

__device__ __forceinline__ void store_partial(const Sums& sums, float* own, u32 step) {
#pragma unroll
    for (u32 q = 0; q < kStepQuads; ++q) {
        const float* quad = sums[q / (kStepQuads / 2)] + q % (kStepQuads / 2) * 4;
        const Vec4 bits{
            float_to_bits(quad[0]), float_to_bits(quad[1]), float_to_bits(quad[2]), float_to_bits(quad[3])};
        st_global_v4(own + (step * kStepQuads + q) * 512, bits);
    }
}

__device__ __forceinline__ void add_partial(Sums& sums, const float* source, u32 step) {
#pragma unroll
    for (u32 q = 0; q < kStepQuads; ++q) {
        float* quad = sums[q / (kStepQuads / 2)] + q % (kStepQuads / 2) * 4;
        const Vec4 bits = ld_global_v4(source + (step * kStepQuads + q) * 512);
        quad[0] += bits_to_float(bits.x);
        quad[1] += bits_to_float(bits.y);
        quad[2] += bits_to_float(bits.z);
        quad[3] += bits_to_float(bits.w);
    }
}

// The segments' sums of one group of one tile: `first` is segment 0's.
struct Segments {
    float* first;
    u32* counter;
};

__device__ __forceinline__ Segments segments_of(
    const Work& work, const Split& split, float* partials, u32* counters, u32 rank, const Fragment& at) {
    const u64 tile = static_cast<u64>(work.cut) * split.sk_max_seg * kSegmentElems;
    return {
        partials + tile + (rank * 2 + at.group) * kGroupElems + at.thread * 4,
        counters + (work.cut * 2 + rank) * 2 + at.group};
}

// Whether this group is the last of its tile's segments. If not, it has left its sums in memory. Nobody waits: whoever
// finds all others done keeps its own sums in tensor memory. The counter returns to 0 for the next launch.
__device__ __forceinline__ bool arrives_last(
    u32 from, const Work& work, const Segments& segments, const Fragment& at, u32 smem) {
    const u32 others = work.num_segments - 1;
    u32 arrivals = broadcast_word(at.thread == 0 ? ld_acquire_gpu(segments.counter) : 0, at, smem);
    if (arrivals != others) {
        float* own = segments.first + work.segment * kSegmentElems;
#pragma unroll 1
        for (u32 step = 0; step < kGroupCols / kStepCols; ++step) {
            Sums sums;
            load_sums(sums, from, at, step);
            store_partial(sums, own, step);
        }
        // All sums of the group happen before its one arrival (PTX ISA 8.8, causality order through the barrier).
        named_barrier_sync(Cfg::kGroupBarrier + at.group, 128);
        arrivals = broadcast_word(at.thread == 0 ? atomic_add_acq_rel_gpu(segments.counter, 1) : 0, at, smem);
    }
    if (arrivals != others) {
        return false;
    }
    if (at.thread == 0) {
        st_relaxed_gpu(segments.counter, 0);
    }
    return true;
}

// Adds all segments in their order, from 0 on, whichever of them this group holds itself.
__device__ __forceinline__ void sum_segments(
    Sums& sums, u32 from, const Work& work, const Segments& segments, const Fragment& at, u32 step) {
    Sums own;
    load_sums(own, from, at, step);
#pragma unroll
    for (u32 i = 0; i < 2 * kStepCols; ++i) {
        sums[i / kStepCols][i % kStepCols] = 0.0f;
    }
#pragma unroll 1
    for (u32 segment = 0; segment < work.num_segments; ++segment) {
        if (segment != work.segment) {
            add_partial(sums, segments.first + segment * kSegmentElems, step);
            continue;
        }
#pragma unroll
        for (u32 i = 0; i < 2 * kStepCols; ++i) {
            sums[i / kStepCols][i % kStepCols] += own[i / kStepCols][i % kStepCols];
        }
    }
}

// The end of a work: `store(sums, column)` gets kStepCols columns of the lower half of the tile from `column` on, and
// those half a tile further. False: a segment of a tile that another finishes, of which it gets nothing.
template <typename Store>
__device__ __forceinline__ bool finish_tile(
    u32 from, const Work& work, const Segments& segments, const Fragment& at, u32 smem, Store store) {
    const bool is_cut = work.num_segments > 1;
    if (is_cut && !arrives_last(from, work, segments, at, smem)) {
        return false;
    }
#pragma unroll 1
    for (u32 step = 0; step < kGroupCols / kStepCols; ++step) {
        Sums sums;
        if (is_cut) {
            sum_segments(sums, from, work, segments, at, step);
        } else {
            load_sums(sums, from, at, step);
        }
        store(sums, step_column(at, step));
    }
    return true;
}

__device__ __forceinline__ void await_sums(u32 count, u32 smem, const Watch& watch) {
    mbarrier_wait_cluster(smem + Cfg::kSumsFullOffset + count % 2 * 8, count / 2 & 1, watch);
    tcgen05_fence_after_thread_sync();
}

// The warp has read its sums of the tile.
__device__ __forceinline__ void release_sums(u32 count, const Fragment& at, u32 rank, u32 smem) {
    tcgen05_fence_before_thread_sync();
    warp_sync();
    if (at.lane == 0) {
        arrive_at_leader(smem + Cfg::kSumsEmptyOffset + count % 2 * 8, rank);
    }
}

// 32 bytes of a row: one store where rows begin at multiples of 32 bytes, else two.
__device__ __forceinline__ void store_words(void* address, const u32 (&words)[8]) {
    if (reinterpret_cast<u64>(address) % 32 == 0) {
        st_global_v8(address, words);
    } else {
        st_global_v4(address, Vec4{words[0], words[1], words[2], words[3]});
        st_global_v4(static_cast<u8*>(address) + 16, Vec4{words[4], words[5], words[6], words[7]});
    }
}

// kStepCols columns of a row, rounded to bf16.
__device__ __forceinline__ void store_bf16(u16* address, const float (&values)[kStepCols]) {
    u32 words[8];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        words[i] = cvt_rn_bf16x2(values[2 * i + 1], values[2 * i]);
    }
    store_words(address, words);
}

// The same from `column` on; columns past `cols` are dropped, by whole groups of 8.
__device__ __forceinline__ void store_bf16_within(
    u16* row, u32 column, u32 cols, const float (&values)[kStepCols]) {
    if (column + kStepCols <= cols) {
        store_bf16(row + column, values);
    } else if (column < cols) {
        st_global_v4(
            row + column,
            Vec4{
                cvt_rn_bf16x2(values[1], values[0]), cvt_rn_bf16x2(values[3], values[2]),
                cvt_rn_bf16x2(values[5], values[4]), cvt_rn_bf16x2(values[7], values[6])});
    }
}

// ---- set-up and end ----

// Barriers and tensor memory, and the pair in step: no CTA may reach over to its partner before that has them.
__device__ __forceinline__ void set_up(u32 smem) {
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < Cfg::kNumStages; ++stage) {
            mbarrier_init(smem + Cfg::kStageFullOffset + stage * 8, 1);
            mbarrier_init(smem + Cfg::kStageEmptyOffset + stage * 8, 1);
        }
        for (u32 turn = 0; turn < 2; ++turn) {
            mbarrier_init(smem + Cfg::kSumsFullOffset + turn * 8, 1);
            mbarrier_init(smem + Cfg::kSumsEmptyOffset + turn * 8, Cfg::kSumsReaders);
            mbarrier_init(smem + Cfg::kItemFullOffset + turn * 8, 1);
            mbarrier_init(smem + Cfg::kItemEmptyOffset + turn * 8, Cfg::kItemReaders);
        }
        fence_mbarrier_init();
    }
    if (warp_index() == Cfg::kMmaWarp) {
        tensor_memory_alloc_pair<Cfg::kTensorColumns>(smem + Cfg::kTensorBaseOffset);
        tensor_memory_relinquish_pair();
    }
    warp_sync();
    tcgen05_fence_before_thread_sync();
    cluster_arrive();
    cluster_wait();
    tcgen05_fence_after_thread_sync();
}

// The partner may still read this CTA's operands or arrive at its barriers until it has finished too.
__device__ __forceinline__ void leave_together(u32 smem) {
    warp_sync();
    tcgen05_fence_before_thread_sync();
    cluster_arrive();
    cluster_wait();
    tcgen05_fence_after_thread_sync();
    if (warp_index() == Cfg::kMmaWarp) {
        tensor_memory_dealloc_pair<Cfg::kTensorColumns>(accumulator(smem, 0));
    }
}
