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
        mbarrier_init(smem + Cfg::kSumsFullOffset, 1);
//% if spec.value("kFusedNorm")
        mbarrier_init(smem + Cfg::kRowsIssuedOffset, Cfg::kNormWarps);
        mbarrier_init(smem + Cfg::kRowsArrivedOffset, 1);
        mbarrier_init(smem + Cfg::kYResidentOffset, 1);
        mbarrier_init(smem + Cfg::kRowsStagedOffset, 1);
//% endif
        publish_barriers(rank, smem);
    }
    claim_tensor_memory(smem);
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
    i32 up_col0,
    i32 weights_ahead) {
    const Operands operands{
        shared_down_weight_map, up_weight_map, shared_act_map, y_workspace_map,
        routed, norm_weight, y_workspace, counters,
        static_cast<u32>(num_partials), static_cast<u32>(routed_pitch),
        static_cast<u32>(routed_partial_stride), static_cast<u32>(y_pitch),
        out, static_cast<u32>(num_tokens), static_cast<u32>(out_pitch), static_cast<u32>(up_col0),
        static_cast<u32>(weights_ahead)};
//% else
    u16* out,
    u64* wait_record,
    i32 num_tokens,
    i32 out_pitch,
    i32 up_col0,
    i32 weights_ahead) {
    const Operands operands{
        shared_down_weight_map, up_weight_map, shared_act_map, y_workspace_map,
        out, static_cast<u32>(num_tokens), static_cast<u32>(out_pitch), static_cast<u32>(up_col0),
        static_cast<u32>(weights_ahead)};
//% endif
    const Watch watch{wait_record, Cfg::kProgramId};
    const u32 smem = smem_base();
    const u32 rank = Cfg::kClusterCtas == 2 ? cluster_ctarank() : 0;
    const u32 tile_row = blockIdx.x / Cfg::kClusterCtas * Cfg::kBlockM;
    chaos_begin(wait_record);
    set_up(operands, rank, smem);
    // A dependent launch starts once all CTAs run, so it takes nothing from this one but idle multiprocessors.
    griddepcontrol_launch_dependents();
    const u32 warp = warp_index();
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
