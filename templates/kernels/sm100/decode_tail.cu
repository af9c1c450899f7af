// Pipeline of one CTA (a pair splits K; both ranks run this). K runs over the shared-down chunks first, then over
// the up chunks, into one accumulator:
//
//   producer warp --TMA--> shared_down | up weights, shared_act | y ring --tcgen05--> tensor memory --> epilogue
//        ^                                       |    (MMA warp)     (sums_full)    warps --staging--> out
//        +------------- stage_empty -------------+                  rank --st.async--> partner (partner_sum)
//
//% if spec.value("kFusedNorm")
//% if spec.value("kResidentB")
//   epilogue warps, before: all rows -> y of the own up chunks, in shared memory (y_resident) --tcgen05--> MMA warp
//% else
//   epilogue warps, before: rows cta, cta + grid, ... -> y in global memory --grid counter (rows_arrived)--> producer
//% endif
//
//% endif
// Barriers, each with its arrivals per phase:
//   stage_full[s]   1: the producer's arrive.expect_tx; completes when the copies have landed.
//   stage_empty[s]  1: the MMA warp's commit, once the products that read the stage are complete.
//   partner_sum     1: pre-armed at set-up, where sums land, with the kLandingBytes that the partner stores.
//   ring_drained    4: one lane of each epilogue warp of the CTA where sums land, on its partner, before they may.
//   sums_full       1: the MMA warp's commit after its last product.
//% if spec.value("kFusedNorm")
//   rows_issued     kNormWarps: one lane of each norm warp, once its first row's loads are on their way.
//   rows_arrived    1: one norm lane, once this CTA has arrived at the grid counter.
//   y_resident      1: one norm lane, once all norm warps have written and fenced the resident operand.
//   rows_staged     1: the producer's arrive.expect_tx of the norm weight and num_tokens rows.
//% endif
/*% include "kernels/cfg.cuh" %*/

#include "${shared["decode"] | file_name}"
//% if spec.value("kFusedNorm")
#include "${shared["norm_row"] | file_name}"
//% endif

/*% include "kernels/tail_operands.cuh" %*/

// ---- MMA warp ----

// One thread issues all products of the CTA, since a commit tracks its own thread only. The tensor core reads a stage
// while the next is issued; its commit frees the stage.
__device__ __forceinline__ void multiply(u32 rank, u32 smem, const Watch& watch) {
    // The tokens come from an earlier launch: no bounded wait for them begins before it has ended.
    griddepcontrol_wait();
    const Share share = share_of(rank);
    const u32 units = share.down + share.up;
    const u32 d = tensor_memory_address(smem + Cfg::kTensorBaseOffset);
    Ring ring;
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
        tcgen05_fence_after_thread_sync();
        multiply_chunk<kTileShape>(d, a, b, unit > 0);
        tcgen05_commit(smem + Cfg::kStageEmptyOffset + ring.stage * 8);
        ring.advance();
    }
    tcgen05_commit(smem + Cfg::kSumsFullOffset);
}
//% if spec.value("kFusedNorm")

// ---- epilogue warps: the norm first, then the sums ----

/*% include "kernels/tail_rows.cuh" %*/
//% endif

__device__ __forceinline__ void finish(
    const Operands& operands, u32 tile_row, u32 rank, u32 smem, const Watch& watch) {
    const Fragment at{threadIdx.x, warp_index(), lane_id()};
    // An earlier launch may still read `y` and `out`. From here on waits are bounded.
    griddepcontrol_wait();
//% if spec.value("kFusedNorm")
    normalise(operands, at.warp, at.lane, rank, smem, watch);
//% endif
    Accumulators acc;
    take_accumulators(acc, at, 16u << 16, smem, watch);
//% if spec.value("kClusterCtas") == 2
    if constexpr (Cfg::kDeferredClusterWait) {
        cluster_wait();
    }
    Sums sums;
    if (!combine_pair(acc, sums, at, rank, smem, watch)) {
        return;
    }
//% else
    Sums& sums = acc;
//% endif
    constexpr u32 kPitch = staging_pitch(Cfg::kBlockM * 2);
    const u32 staging = smem + Cfg::kStagingOffset;
    stage_bf16(sums[0], at, staging, kPitch, 16 * at.warp);
    stage_bf16(sums[1], at, staging, kPitch, 16 * at.warp + 16);
    named_barrier_sync(Cfg::kMmaBarrier, 128);
    store_staged<Cfg::kBlockM, 2>(
        staging, at.thread, operands.out, operands.out_pitch, tile_row, Cfg::kOutCols,
        final_tokens(rank, operands.num_tokens));
}

/*% include "kernels/decode_entry.cuh" %*/
    if (warp < Cfg::kProducerWarp) {
        finish(operands, tile_row, rank, smem, watch);
    } else if (warp == Cfg::kProducerWarp) {
        if (lane_id() == 0) {
            produce(operands, tile_row, rank, smem, watch);
        }
    } else if (elect_one()) {
        multiply(rank, smem, watch);
    }
}
