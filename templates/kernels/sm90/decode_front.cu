// Pipeline of one CTA (a pair splits K; both ranks run this):
//
//   producer warp --TMA--> weights + tokens ring --wgmma--> MMA warpgroup --staging--> logits | latent | shared_act
//        ^                                                        |
//        +------------------- stage_empty -----------------------+        rank --st.async--> partner (partner_sum)
//
// Barriers, each with its arrivals per phase:
//   stage_full[s]   1: the producer's arrive.expect_tx of kStageBytes; completes when the copies have landed.
//   stage_empty[s]  4: one lane of each MMA warp, once its wgmmas that read the stage are complete.
//   partner_sum     1: pre-armed at set-up, where sums land, with the kLandingBytes that the partner stores.
//   ring_drained    4: one lane of each MMA warp of the CTA where sums land, on its partner, before they may.
/*% include "kernels/cfg.cuh" %*/

/*% include "kernels/pair.cuh" %*/

/*% include "kernels/front_tiles.cuh" %*/

// The MMA warpgroup: sums over this CTA's units. A stage is free once the wgmmas of the next one are issued and at
// most that one group is unfinished.
__device__ __forceinline__ void accumulate(
    Accumulators& acc, const Tile& tile, const Fragment& at, u32 rank, u32 smem, const Watch& watch) {
    const bool shared = tile.kind == TileClass::kShared;
    // A box of a shared tile holds 64 rows of all chunks of a stage; one of another tile 128 rows.
    const u32 a_half = shared ? Cfg::kStageABytes / 2 : Cfg::kChunkABytes / 2;
    const u32 a_chunk = shared ? Cfg::kChunkABytes / 2 : Cfg::kChunkABytes;
    const u32 units = unit_count(rank);
    Ring ring;
    u32 previous_empty = 0;
    wgmma_pin(acc[0]);
    wgmma_pin(acc[1]);
#pragma unroll 1
    for (u32 unit = 0; unit < units; ++unit) {
        const u32 a = smem + Cfg::kARingOffset + ring.stage * Cfg::kStageABytes;
        const u32 b = smem + Cfg::kBRingOffset + ring.stage * Cfg::kStageBBytes;
        mbarrier_wait(smem + Cfg::kStageFullOffset + ring.stage * 8, ring.phase, watch);
        wgmma_fence();
#pragma unroll
        for (u32 chunk = 0; chunk < Cfg::kChunksPerStage; ++chunk) {
            multiply_chunk(acc, a + chunk * a_chunk, a_half, b + chunk * Cfg::kChunkBBytes);
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
}

/*% include "kernels/front_stores.cuh" %*/

__device__ __forceinline__ void multiply_and_store(
    const Tile& tile, u32 rank, u32 smem, const Outputs& out, const Watch& watch) {
    const Fragment at{threadIdx.x, warp_index(), lane_id()};
    // The tokens come from an earlier launch, which may still read the outputs too. From here on waits are bounded.
    griddepcontrol_wait();
    Accumulators acc = {};
    accumulate(acc, tile, at, rank, smem, watch);
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
    const u32 staging = smem + Cfg::kStagingOffset;
    if (tile.kind == TileClass::kRouter) {
        store_router(sums, tile, at, staging, out);
    } else if (tile.kind == TileClass::kLatent) {
        store_latent(sums, tile, at, staging, out);
    } else {
        store_shared(sums, tile, at, staging, out);
    }
}

__device__ __forceinline__ void set_up(
    const TensorMap& router_map, const TensorMap& latent_map, const TensorMap& shared_map, const TensorMap& x_map,
    u32 rank, u32 smem) {
    if (threadIdx.x == Cfg::kProducerWarp * 32) {
        prefetch_tensormap(router_map);
        prefetch_tensormap(latent_map);
        prefetch_tensormap(shared_map);
        prefetch_tensormap(x_map);
        init_ring_and_pair(smem);
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
    const __grid_constant__ TensorMap gate_weight_map,
    const __grid_constant__ TensorMap down_weight_map,
    const __grid_constant__ TensorMap shared_gate_up_weight_map,
    const __grid_constant__ TensorMap x_map,
    float* logits,
    u16* latent,
    u16* shared_act,
    u64* wait_record,
    i32 num_tokens,
    i32 logits_pitch,
    i32 latent_pitch,
    i32 shared_act_pitch,
    i32 weights_ahead) {
    const Watch watch{wait_record, Cfg::kProgramId};
    const u32 smem = smem_base();
    const u32 rank = Cfg::kClusterCtas == 2 ? cluster_ctarank() : 0;
    const Tile tile = tile_of(blockIdx.x / Cfg::kClusterCtas);
    chaos_begin(wait_record);
    set_up(gate_weight_map, down_weight_map, shared_gate_up_weight_map, x_map, rank, smem);
    // A dependent launch starts once all CTAs run, so it takes nothing from this one but idle multiprocessors.
    griddepcontrol_launch_dependents();
    const u32 warp = warp_index();
    if (warp < Cfg::kProducerWarp) {
        const Outputs out{
            logits, latent, shared_act, final_tokens(rank, num_tokens),
            static_cast<u32>(logits_pitch), static_cast<u32>(latent_pitch), static_cast<u32>(shared_act_pitch)};
        multiply_and_store(tile, rank, smem, out, watch);
    } else if (lane_id() == 0) {
        produce(
            gate_weight_map, down_weight_map, shared_gate_up_weight_map, x_map, tile, rank,
            static_cast<u32>(weights_ahead), smem, watch);
    }
}
