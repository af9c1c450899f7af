//% set split = spec.value("kTokenParts") > 1
//% if split
// Pipeline of one CTA (the two of a tile split the tokens; each runs this alone). K runs over the shared-down chunks
// first, then over the up chunks:
//
//   producer warp --TMA--> shared_down | up weights, shared_act | y ring --wgmma--> MMA warpgroup --staging--> out
//        ^                                                            |
//        +------------------------- stage_empty ---------------------+
//
//% else
// Pipeline of one CTA (a pair splits K; both ranks run this). K runs over the shared-down chunks first, then over
// the up chunks, into one accumulator:
//
//   producer warp --TMA--> shared_down | up weights, shared_act | y ring --wgmma--> MMA warpgroup --staging--> out
//        ^                                                            |
//        +------------------------- stage_empty ---------------------+   rank --st.async--> partner (partner_sum)
//
//% endif
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

/*% include "kernels/pair.cuh" %*/
//% if spec.value("kFusedNorm")

/*% include "kernels/norm_row.cuh" %*/
//% endif

/*% include "kernels/sm90/token_ring.cuh" %*/

/*% include "kernels/tail_operands.cuh" %*/

// ---- MMA warpgroup ----

//% if split
// Adds the next `units` units. A stage is free once the wgmmas of the next one are issued and at most that one group is
// unfinished.
__device__ __forceinline__ void accumulate(
    Accumulators& acc, Ring& ring, u32 units, const Fragment& at, u32 smem, const Watch& watch) {
//% else
// Sums over this CTA's units. A stage is free once the wgmmas of the next one are issued and at most that one group
// is unfinished.
__device__ __forceinline__ void accumulate(
    Accumulators& acc, const Fragment& at, u32 rank, u32 smem, const Watch& watch) {
    const Share share = share_of(rank);
    const u32 units = share.down + share.up;
    Ring ring;
//% endif
    u32 previous_empty = 0;
    wgmma_pin(acc[0]);
    wgmma_pin(acc[1]);
#pragma unroll 1
    for (u32 unit = 0; unit < units; ++unit) {
        const u32 a = smem + Cfg::kARingOffset + ring.stage * Cfg::kStageABytes;
        ${("const u32" if split else "u32") | code} b = smem + Cfg::kBRingOffset + ring.stage * Cfg::kStageBBytes;
//% if spec.value("kResidentB")
        if (unit == share.down) {
            mbarrier_wait(smem + Cfg::kYResidentOffset, 0, watch);
        }
        if (!is_down(share, unit)) {
            b = smem + Cfg::kResidentBOffset + (unit - share.down) * Cfg::kStageBBytes;
        }
//% endif
        mbarrier_wait(smem + Cfg::kStageFullOffset + ring.stage * 8, ring.phase, watch);
        wgmma_fence();
#pragma unroll
        for (u32 chunk = 0; chunk < Cfg::kChunksPerStage; ++chunk) {
            const u32 weights = a + chunk * Cfg::kChunkABytes;
            multiply_chunk(acc, weights, Cfg::kChunkABytes / 2, b + chunk * Cfg::kChunkBBytes);
        }
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
//% if split
    if (units > 0 && at.lane == 0) {
        mbarrier_arrive(previous_empty);
    }
//% endif
}
//% if split

//% if spec.value("kTwoSums")
// All of K, as two sums: of the units that either rank of a pair has which splits K. So a token gets the same bits.
__device__ __forceinline__ void accumulate(
    Accumulators& acc, const Fragment& at, u32 smem, const Watch& watch) {
    Accumulators others = {};
    Ring ring;
    accumulate(acc, ring, Cfg::kFirstDownUnits, at, smem, watch);
    accumulate(others, ring, Cfg::kRank0DownUnits - Cfg::kFirstDownUnits, at, smem, watch);
    accumulate(acc, ring, Cfg::kFirstUpUnits, at, smem, watch);
    accumulate(others, ring, Cfg::kRank0UpUnits - Cfg::kFirstUpUnits, at, smem, watch);
    add_sums(acc, others);
}
//% else
__device__ __forceinline__ void accumulate(
    Accumulators& acc, const Fragment& at, u32 smem, const Watch& watch) {
    Ring ring;
    accumulate(acc, ring, Cfg::kRank0DownUnits, at, smem, watch);
    accumulate(acc, ring, Cfg::kRank0UpUnits, at, smem, watch);
}
//% endif
//% endif

__device__ __forceinline__ void multiply_and_store(
    const Operands& operands, u32 tile_row, u32 rank, u32 smem, const Watch& watch) {
    const Fragment at{threadIdx.x, warp_index(), lane_id()};
    // The tokens come from an earlier launch, which may still read `out` too. From here on waits are bounded.
    griddepcontrol_wait();
    Accumulators acc = {};
//% if split
    accumulate(acc, at, smem, watch);
//% else
    accumulate(acc, at, rank, smem, watch);
//% endif
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
    // All MMA warps have drained the ring and read the landing zone: both may be written over.
    named_barrier_sync(Cfg::kMmaBarrier, 128);
    constexpr u32 kPitch = staging_pitch(Cfg::kBlockM * 2);
    const u32 staging = smem + Cfg::kStagingOffset;
    stage_bf16(sums[0], at, staging, kPitch, 0);
    stage_bf16(sums[1], at, staging, kPitch, 64);
    named_barrier_sync(Cfg::kMmaBarrier, 128);
//% if split
    store_staged<Cfg::kBlockM, 2>(
        staging, at.thread, operands.out, operands.out_pitch, tile_row, Cfg::kOutCols,
        final_tokens(operands.num_tokens));
//% else
    store_staged<Cfg::kBlockM, 2>(
        staging, at.thread, operands.out, operands.out_pitch, tile_row, Cfg::kOutCols,
        final_tokens(rank, operands.num_tokens));
//% endif
}
//% if spec.value("kFusedNorm")

// ---- norm warps ----

/*% include "kernels/tail_rows.cuh" %*/
//% endif

/*% include "kernels/decode_entry.cuh" %*/
    if (warp < 4) {
        clear_missing_rows(${("loaded_tokens(operands.num_tokens)" if split else "operands.num_tokens") | code}, smem);
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
