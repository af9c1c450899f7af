// Pipeline of one CTA (a pair splits K; both ranks run this). K runs over the shared-down chunks first, then over
// the up chunks, into one accumulator:
//
//   producer warp --TMA--> shared_down | up weights, shared_act | y ring --wgmma--> MMA warpgroup --staging--> out
//        ^                                                            |
//        +------------------------- stage_empty ---------------------+   rank --st.async--> partner (partner_sum)
//
//% if spec.value("kFusedNorm")
//% if spec.value("kResidentB")
//   norm warps: all rows -> y of the own up chunks, resident in shared memory (y_resident) --wgmma--> MMA warpgroup
//% else
//   norm warps: rows cta, cta + grid, ... -> y in global memory --grid counter (rows_arrived)--> producer warp
//% endif
//
//% endif
// Barriers, each with its arrivals per phase:
//   stage_full[s]   1: the producer's arrive.expect_tx; completes when the copies have landed.
//   stage_empty[s]  4: one lane of each MMA warp, once its wgmmas that read the stage are complete.
//   partner_sum     1: pre-armed at set-up, where sums land, with the kLandingBytes that the partner stores.
//   ring_drained    4: one lane of each MMA warp of the CTA where sums land, on its partner, before they may.
//% if spec.value("kFusedNorm")
//   rows_issued     kNormWarps: one lane of each norm warp, once its first row's loads are on their way.
//   rows_arrived    1: one norm lane, once this CTA has arrived at the grid counter.
//   y_resident      1: one norm lane, once all norm warps have written and fenced the resident operand.
//   rows_staged     1: the producer's arrive.expect_tx of the norm weight and num_tokens rows.
//% endif
/*% include "kernels/cfg.cuh" %*/

/*% include "kernels/sm90/pair.cuh" %*/
//% if spec.value("kFusedNorm")

/*% include "kernels/sm90/norm_row.cuh" %*/
//% endif

// A rank's share of K, in chunks: `down` from `first_down` on, then `up` from `first_up` on.
struct Share {
    u32 first_down;
    u32 down;
    u32 first_up;
    u32 up;
};

__device__ __forceinline__ Share share_of(u32 rank) {
    if (rank == 0) {
        return {0, Cfg::kRank0DownChunks, 0, Cfg::kRank0UpChunks};
    }
    return {Cfg::kRank0DownChunks, Cfg::kRank1DownChunks, Cfg::kRank0UpChunks, Cfg::kRank1UpChunks};
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
    u32 up_col0;  // first latent column of this rank's slice
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
                smem + Cfg::kARingOffset + weights_ring.stage * Cfg::kChunkABytes,
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
    loads.load_weights_to(min(units, static_cast<u32>(Cfg::kIssueAhead)), operands, share, tile_row, smem, watch);
    griddepcontrol_wait();
//% if spec.value("kStagedRows")
    load_staged_rows(operands, smem);
//% endif
//% if spec.value("kIssueAhead")
    mbarrier_wait(smem + Cfg::kRowsIssuedOffset, 0, watch);
//% endif
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
        const u32 b = smem + Cfg::kBRingOffset + ring.stage * Cfg::kChunkBBytes;
        if (is_down(share, unit)) {
            tma_load_3d(b, operands.shared_act_map, 0, 0, share.first_down + unit, full);
        } else if constexpr (!Cfg::kResidentB) {
//% if spec.value("kFusedNorm") and not spec.value("kResidentB")
            if (unit == share.down) {
                // A ring of weights first, but for one stage: the MMA warps free the last down unit's only once they
                // have issued the next, which needs y. The stages before it are drained without.
                const u32 end = min(units, unit + Cfg::kNumStages - 1);
                loads.load_weights_to(end, operands, share, tile_row, smem, watch);
                wait_for_y(operands, smem, watch);
            }
//% endif
            load_up_chunk(b, operands.y_map, 0, operands.up_col0, share.first_up + unit - share.down, full);
        }
        ring.advance();
    }
}

// ---- MMA warpgroup ----

// Sums over this CTA's units. A stage is free once the wgmmas of the next one are issued and at most that one group
// is unfinished.
__device__ __forceinline__ void accumulate(
    Accumulators& acc, const Fragment& at, u32 rank, u32 smem, const Watch& watch) {
    const Share share = share_of(rank);
    const u32 units = share.down + share.up;
    Ring ring;
    u32 previous_empty = 0;
    wgmma_pin(acc[0]);
    wgmma_pin(acc[1]);
#pragma unroll 1
    for (u32 unit = 0; unit < units; ++unit) {
        const u32 a = smem + Cfg::kARingOffset + ring.stage * Cfg::kChunkABytes;
        u32 b = smem + Cfg::kBRingOffset + ring.stage * Cfg::kChunkBBytes;
//% if spec.value("kResidentB")
        if (unit == share.down) {
            mbarrier_wait(smem + Cfg::kYResidentOffset, 0, watch);
        }
        if (!is_down(share, unit)) {
            b = smem + Cfg::kResidentBOffset + (unit - share.down) * Cfg::kChunkBBytes;
        }
//% endif
        mbarrier_wait(smem + Cfg::kStageFullOffset + ring.stage * 8, ring.phase, watch);
        wgmma_fence();
        multiply_chunk(acc, a, Cfg::kChunkABytes / 2, b);
        wgmma_commit_group();
        wgmma_wait_group<1>();
        if (unit > 0 && at.lane == 0) {
            mbarrier_arrive(previous_empty);
        }
        previous_empty = smem + Cfg::kStageEmptyOffset + ring.stage * 8;
        ring.advance();
    }
    wgmma_wait_group<0>();
    wgmma_pin(acc[0]);
    wgmma_pin(acc[1]);
}

__device__ __forceinline__ void multiply_and_store(
    const Operands& operands, u32 tile_row, u32 rank, u32 smem, const Watch& watch) {
    const Fragment at{threadIdx.x, warp_index(), lane_id()};
    Accumulators acc = {};
    accumulate(acc, at, rank, smem, watch);
    griddepcontrol_launch_dependents();
//% if spec.value("kClusterCtas") == 2
    // Only here does it matter that the partner has started.
    cluster_wait();
    Sums sums;
    if (!combine_pair(acc, sums, at, rank, smem, watch)) {
        return;
    }
//% else
    Sums& sums = acc;
//% endif
    // All MMA warps have drained the ring and read the landing zone: both may be written over. An earlier launch may
    // still read `out` until it has completed.
    named_barrier_sync(Cfg::kMmaBarrier, 128);
    griddepcontrol_wait();
    constexpr u32 kPitch = staging_pitch(Cfg::kBlockM * 2);
    const u32 staging = smem + Cfg::kStagingOffset;
    stage_bf16(sums[0], at, staging, kPitch, 0);
    stage_bf16(sums[1], at, staging, kPitch, 64);
    named_barrier_sync(Cfg::kMmaBarrier, 128);
    store_staged<Cfg::kBlockM, 2>(
        staging, at.thread, operands.out, operands.out_pitch, tile_row, Cfg::kOutCols,
        final_tokens(rank, operands.num_tokens));
}
//% if spec.value("kFusedNorm")

// ---- norm warps ----

//% if spec.value("kStagedRows")
// One row, or the norm weight, from its staged copy: a single partial, already bf16.
__device__ __forceinline__ RowVectors load_staged(u32 row_offset, u32 lane, u32 smem) {
    RowVectors loaded;
#pragma unroll
    for (u32 v = 0; v < Cfg::kVectorsPerLane; ++v) {
        const u32 source = smem + row_offset + (lane + 32 * v) * 16;
        const Vec4 words = owns_vector(lane, v) ? ld_shared_v4(source) : Vec4{0, 0, 0, 0};
        loaded.pairs[v][0] = words.x;
        loaded.pairs[v][1] = words.y;
        loaded.pairs[v][2] = words.z;
        loaded.pairs[v][3] = words.w;
    }
    return loaded;
}

__device__ __forceinline__ RowVectors load_row(const Operands& operands, u32 row, u32 lane, u32 smem) {
    return load_staged(Cfg::kStagedRowsOffset + row * Cfg::kLatentCols * 2, lane, smem);
}

__device__ __forceinline__ RowVectors load_weights(const Operands& operands, u32 lane, u32 smem) {
    return load_staged(Cfg::kNormWeightOffset, lane, smem);
}
//% else
__device__ __forceinline__ RowVectors load_row(const Operands& operands, u32 row, u32 lane, u32 smem) {
    const u16* source = operands.routed + static_cast<u64>(row) * operands.routed_pitch;
    return sum_partials(source, lane, operands.num_partials, operands.routed_partial_stride);
}

// All vectors at once, on their way while the row's statistics are taken: one at a time, each would wait for the
// last.
__device__ __forceinline__ RowVectors load_weights(const Operands& operands, u32 lane, u32 smem) {
    return load_vectors(operands.norm_weight, lane);
}
//% endif

//% if spec.value("kResidentB")
// Rows past num_tokens, and columns past a ragged slice, must be zeros.
__device__ __forceinline__ void clear_resident(const Share& share, u32 norm_thread, u32 smem) {
    const u32 bytes = share.up * Cfg::kChunkBBytes;
    for (u32 offset = norm_thread * 16; offset < bytes; offset += Cfg::kNormWarps * 32 * 16) {
        st_shared_v4(smem + Cfg::kResidentBOffset + offset, Vec4{0, 0, 0, 0});
    }
    named_barrier_sync(Cfg::kNormBarrier, Cfg::kNormWarps * 32);
}

// Writes the vectors of y that fall into this CTA's up chunks where the MMA reads them: K-major chunks of 64 columns,
// 128-byte rows, 128-byte swizzle (bits 4 to 6 of the offset xor bits 7 to 9, PTX ISA 5.5.7).
__device__ __forceinline__ void store_resident(
    const Operands& operands, const Share& share, u32 row, const RowVectors& rounded, const RowVectors& weights,
    float scale, u32 lane, u32 smem) {
#pragma unroll
    for (u32 v = 0; v < Cfg::kVectorsPerLane; ++v) {
        const u32 column = (lane + 32 * v) * 8 - operands.up_col0;  // in the slice; wraps below it
        const u32 local = column - share.first_up * Cfg::kBlockK;   // in the share; wraps below it
        if (owns_vector(lane, v) && column < Cfg::kUpCols && local < share.up * Cfg::kBlockK) {
            const u32 offset = row * 128 + local % Cfg::kBlockK * 2;
            const u32 swizzled = offset ^ ((offset >> 7 & 7) << 4);
            const u32 chunk = smem + Cfg::kResidentBOffset + local / Cfg::kBlockK * Cfg::kChunkBBytes;
            st_shared_v4(chunk + swizzled, scale_vector(rounded.pairs[v], weights.pairs[v], scale));
        }
    }
}

// Every CTA normalises all rows for its own up chunks; row r goes to the y workspace from CTA r modulo the grid.
__device__ __forceinline__ void normalise(
    const Operands& operands, u32 norm_warp, u32 lane, u32 rank, u32 smem, const Watch& watch) {
    const Share share = share_of(rank);
    const u32 norm_thread = norm_warp * 32 + lane;
    clear_resident(share, norm_thread, smem);
    griddepcontrol_wait();
//% if spec.value("kStagedRows")
    mbarrier_wait(smem + Cfg::kRowsStagedOffset, 0, watch);
//% endif
    bool issued = false;
    for (u32 row = norm_warp; row < operands.num_tokens; row += Cfg::kNormWarps) {
        const RowVectors rounded = load_row(operands, row, lane, smem);
        const RowVectors weights = load_weights(operands, lane, smem);
        if (!issued && lane == 0) {
            mbarrier_arrive(smem + Cfg::kRowsIssuedOffset);
        }
        issued = true;
        const float scale = reciprocal_norm(rounded);
        chaos_point(row);
        store_resident(operands, share, row, rounded, weights, scale, lane, smem);
        if (row % Cfg::kGridCtas == blockIdx.x) {
            store_row(operands.y + static_cast<u64>(row) * operands.y_pitch, rounded, weights, scale, lane);
        }
    }
    if (!issued && lane == 0) {
        mbarrier_arrive(smem + Cfg::kRowsIssuedOffset);
    }
    fence_proxy_async_shared();
    named_barrier_sync(Cfg::kNormBarrier, Cfg::kNormWarps * 32);
    if (norm_thread == 0) {
        mbarrier_arrive(smem + Cfg::kYResidentOffset);
    }
}
//% else
// CTA c normalises rows c, c + grid, ...; its arrival at the counter publishes them. Each writer fences its generic
// writes for the copies that will read them; the barrier brings them to one thread, whose release covers all (PTX
// ISA 8.8).
__device__ __forceinline__ void normalise(
    const Operands& operands, u32 norm_warp, u32 lane, u32 rank, u32 smem, const Watch& watch) {
    griddepcontrol_wait();
    bool issued = false;
    constexpr u32 kRowStep = Cfg::kNormWarps * Cfg::kGridCtas;
    for (u32 row = blockIdx.x + norm_warp * Cfg::kGridCtas; row < operands.num_tokens; row += kRowStep) {
        const RowVectors rounded = load_row(operands, row, lane, smem);
        const RowVectors weights = load_weights(operands, lane, smem);
        if (!issued && lane == 0) {
            mbarrier_arrive(smem + Cfg::kRowsIssuedOffset);
        }
        issued = true;
        u16* y = operands.y + static_cast<u64>(row) * operands.y_pitch;
        const float scale = reciprocal_norm(rounded);
        chaos_point(row);
        store_row(y, rounded, weights, scale, lane);
    }
    if (!issued && lane == 0) {
        mbarrier_arrive(smem + Cfg::kRowsIssuedOffset);
    }
    fence_proxy_async_global();
    named_barrier_sync(Cfg::kNormBarrier, Cfg::kNormWarps * 32);
    if (norm_warp == 0 && lane == 0) {
        atomic_inc_acq_rel_gpu(operands.counters, Cfg::kGridCtas - 1);
        mbarrier_arrive(smem + Cfg::kRowsArrivedOffset);
    }
}
//% endif
//% endif

__device__ __forceinline__ void set_up(const Operands& operands, u32 rank, u32 smem) {
    if (threadIdx.x == Cfg::kProducerWarp * 32) {
        if constexpr (!Cfg::kNoPrefetch) {
            prefetch_tensormap(operands.shared_down_map);
            prefetch_tensormap(operands.up_map);
            prefetch_tensormap(operands.shared_act_map);
            if constexpr (!Cfg::kResidentB) {
                prefetch_tensormap(operands.y_map);
            }
        }
        init_ring_and_pair(smem);
//% if spec.value("kFusedNorm")
        mbarrier_init(smem + Cfg::kRowsIssuedOffset, Cfg::kNormWarps);
        mbarrier_init(smem + Cfg::kRowsArrivedOffset, 1);
        mbarrier_init(smem + Cfg::kYResidentOffset, 1);
        mbarrier_init(smem + Cfg::kRowsStagedOffset, 1);
//% endif
        publish_barriers(rank, smem);
    }
    __syncthreads();
//% if spec.value("kClusterCtas") == 2
    cluster_arrive();
//% endif
}

extern "C" __global__ void
//% if spec.value("kClusterCtas") == 2
__cluster_dims__(2, 1, 1)
//% endif
__launch_bounds__(Cfg::kNumThreads, 1)
kernel_${spec.name | ident}(
    const __grid_constant__ TensorMap shared_down_weight_map,
    const __grid_constant__ TensorMap up_weight_map,
    const __grid_constant__ TensorMap shared_act_map,
    const __grid_constant__ TensorMap y_workspace_map,
//% if spec.value("kFusedNorm")
    const u16* routed,
    const u16* norm_weight,
    u16* y_workspace,
    u16* out,
    u32* counters,
    u64* wait_record,
    i32 num_tokens,
    i32 num_partials,
    i32 routed_pitch,
    i32 routed_partial_stride,
    i32 y_pitch,
    i32 out_pitch,
    i32 up_col0) {
    const Operands operands{
        shared_down_weight_map, up_weight_map, shared_act_map, y_workspace_map,
        routed, norm_weight, y_workspace, counters,
        static_cast<u32>(num_partials), static_cast<u32>(routed_pitch),
        static_cast<u32>(routed_partial_stride), static_cast<u32>(y_pitch),
        out, static_cast<u32>(num_tokens), static_cast<u32>(out_pitch), static_cast<u32>(up_col0)};
//% else
    u16* out,
    u64* wait_record,
    i32 num_tokens,
    i32 out_pitch,
    i32 up_col0) {
    const Operands operands{
        shared_down_weight_map, up_weight_map, shared_act_map, y_workspace_map,
        out, static_cast<u32>(num_tokens), static_cast<u32>(out_pitch), static_cast<u32>(up_col0)};
//% endif
    const Watch watch{wait_record, Cfg::kProgramId};
    const u32 smem = smem_base();
    const u32 rank = Cfg::kClusterCtas == 2 ? cluster_ctarank() : 0;
    const u32 tile_row = blockIdx.x / Cfg::kClusterCtas * Cfg::kBlockM;
    chaos_begin(wait_record);
    set_up(operands, rank, smem);
    const u32 warp = warp_index();
    if (warp < 4) {
        multiply_and_store(operands, tile_row, rank, smem, watch);
    } else if (warp == Cfg::kProducerWarp) {
        if (lane_id() == 0) {
            produce(operands, tile_row, rank, smem, watch);
        }
    }
//% if spec.value("kFusedNorm")
    else {
        normalise(operands, warp - 4, lane_id(), rank, smem, watch);
    }
//% endif
}
