//% set split = spec.value("kTokenParts") > 1
//% if split
// Pipeline of one CTA (the two of a tile split the tokens; each runs this alone):
//
//   producer warp --TMA--> weights + tokens ring --wgmma--> MMA warpgroup --staging--> logits | latent | shared_act
//        ^                                                        |
//        +------------------- stage_empty -----------------------+
//
//% else
// Pipeline of one CTA (a pair splits K; both ranks run this):
//
//   producer warp --TMA--> weights + tokens ring --wgmma--> MMA warpgroup --staging--> logits | latent | shared_act
//        ^                                                        |
//        +------------------- stage_empty -----------------------+        rank --st.async--> partner (partner_sum)
//
//% endif
// Barriers, each with its arrivals per phase:
//   stage_full[s]   1: the producer's arrive.expect_tx of the stage's copies; completes when they have landed.
//   stage_empty[s]  4: one lane of each MMA warp, once its wgmmas that read the stage are complete.
//   partner_sum     1: pre-armed at set-up, where sums land, with the kLandingBytes that the partner stores.
//   ring_drained    4: one lane of each MMA warp of the CTA where sums land, on its partner, before they may.
/*% include "kernels/cfg.cuh" %*/

/*% include "kernels/pair.cuh" %*/

/*% include "kernels/sm90/token_ring.cuh" %*/

/*% include "kernels/front_tiles.cuh" %*/

//% if spec.value("kBlockM") < 128
// The rows in which the MMAs of a tile overlap are the first one's. Those of a shared tile, gate and up, have
// kBlockM / 2 rows each, and read on into their neighbours'.
__device__ __forceinline__ Fragment fragment_of(const Tile& tile, u32 warp) {
    const bool in_half = 16 * warp < Cfg::kBlockM / 2;
    const bool shared = tile.kind == TileClass::kShared;
    return {
        threadIdx.x, warp, lane_id(), {!shared || in_half, shared ? in_half : kSecondRow + 16 * warp >= 64},
        shared ? Cfg::kBlockM : 2 * kSecondRow};
}

//% endif
//% if split
// The MMA warpgroup: adds the next `units` units. A stage is free once the wgmmas of the next one are issued and at
// most that one group is unfinished.
//% else
// The MMA warpgroup: sums over this CTA's units. A stage is free once the wgmmas of the next one are issued and at
// most that one group is unfinished.
//% endif
__device__ __forceinline__ void accumulate(
//% if split
    Accumulators& acc, Ring& ring, u32 units, const Tile& tile, const Fragment& at, u32 smem, const Watch& watch) {
//% else
    Accumulators& acc, const Tile& tile, const Fragment& at, u32 rank, u32 smem, const Watch& watch) {
//% endif
    const bool shared = tile.kind == TileClass::kShared;
    // A box of a shared tile holds half of the rows of all chunks of a stage, gate or up; one of another tile all rows.
    const u32 a_half = shared ? Cfg::kChunksPerStage * Cfg::kChunkABytes / 2 : kSecondRow * Cfg::kBlockK * 2;
    const u32 a_chunk = shared ? Cfg::kChunkABytes / 2 : Cfg::kChunkABytes;
//% if not split
    const u32 units = unit_count(rank);
    Ring ring;
//% endif
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
//% if split
    if (units > 0 && at.lane == 0) {
        mbarrier_arrive(previous_empty);
    }
//% endif
}

/*% include "kernels/front_stores.cuh" %*/

__device__ __forceinline__ void multiply_and_store(
    const Tile& tile, u32 rank, u32 smem, const Outputs& out, const Watch& watch) {
//% if spec.value("kBlockM") < 128
    const Fragment at = fragment_of(tile, warp_index());
//% else
    const Fragment at{threadIdx.x, warp_index(), lane_id()};
//% endif
    // The tokens come from an earlier launch, which may still read the outputs too. From here on waits are bounded.
    griddepcontrol_wait();
    Accumulators acc = {};
//% if split
    Ring ring;
//% if spec.value("kTwoSums")
    // As two sums, of the units that either rank of a pair has which splits K: a token gets the same bits.
    Accumulators others = {};
    accumulate(acc, ring, Cfg::kFirstUnits, tile, at, smem, watch);
    accumulate(others, ring, Cfg::kRank0Units - Cfg::kFirstUnits, tile, at, smem, watch);
    add_sums(acc, others);
//% else
    accumulate(acc, ring, Cfg::kRank0Units, tile, at, smem, watch);
//% endif
//% else
    accumulate(acc, tile, at, rank, smem, watch);
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
    const u32 staging = smem + Cfg::kStagingOffset;
    if (tile.kind == TileClass::kRouter) {
        store_router(sums, tile, at, staging, out);
    } else if (tile.kind == TileClass::kLatent) {
        store_latent(sums, tile, at, staging, out);
    } else {
        store_shared(sums, tile, at, staging, out);
    }
}

/*% include "kernels/decode_entry.cuh" %*/
    if (warp < Cfg::kProducerWarp) {
//% if split
        clear_missing_rows(loaded_tokens(static_cast<u32>(num_tokens)), smem);
        const Outputs out{
            logits, latent, shared_act, final_tokens(static_cast<u32>(num_tokens)),
//% else
        clear_missing_rows(static_cast<u32>(num_tokens), smem);
        const Outputs out{
            logits, latent, shared_act, final_tokens(rank, num_tokens),
//% endif
            static_cast<u32>(logits_pitch), static_cast<u32>(latent_pitch), static_cast<u32>(shared_act_pitch)};
        multiply_and_store(tile, rank, smem, out, watch);
    } else if (lane_id() == 0) {
        produce(
            gate_weight_map, down_weight_map, shared_gate_up_weight_map, x_map, tile, rank,
            static_cast<u32>(num_tokens), static_cast<u32>(weights_ahead), smem, watch);
    }
}
