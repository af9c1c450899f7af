// Pipeline of one CTA (a pair splits K; both ranks run this):
//
//   producer warp --TMA--> weights + tokens ring --tcgen05--> tensor memory --> epilogue warps --staging--> logits |
//        ^                        |     (MMA warp)     (sums_full)      |                     latent | shared_act
//        +----- stage_empty ------+                 rank --st.async--> partner (partner_sum)
//
// Barriers, each with its arrivals per phase:
//   stage_full[s]   1: the producer's arrive.expect_tx of kStageBytes; completes when the copies have landed.
//   stage_empty[s]  1: the MMA warp's commit, once the products that read the stage are complete.
//   partner_sum     1: pre-armed at set-up, where sums land, with the kLandingBytes that the partner stores.
//   ring_drained    4: one lane of each epilogue warp of the CTA where sums land, on its partner, before they may.
//   sums_full       1: the MMA warp's commit after its last product.
/*% include "kernels/cfg.cuh" %*/

#include "${shared["decode"] | file_name}"

/*% include "kernels/front_tiles.cuh" %*/

// One stage. A shared tile's boxes hold 64 rows of all chunks of the stage, another tile's 128 rows; its gate rows and
// its up rows have an accumulator each.
__device__ __forceinline__ void multiply_stage(const Tile& tile, u32 d, u32 a, u32 b, bool accumulate) {
    constexpr u32 kHalfShape = tcgen05_shape(Cfg::kBlockM / 2, Cfg::kNPad);
    constexpr u32 kHalfChunkBytes = Cfg::kChunkABytes / 2;
#pragma unroll
    for (u32 chunk = 0; chunk < Cfg::kChunksPerStage; ++chunk) {
        const u32 tokens = b + chunk * Cfg::kChunkBBytes;
        const bool add = accumulate || chunk > 0;
        if (tile.kind == TileClass::kShared) {
            const u32 gate = a + chunk * kHalfChunkBytes;
            multiply_chunk<kHalfShape>(d, gate, tokens, add);
            multiply_chunk<kHalfShape>(d + Cfg::kUpColumn, gate + Cfg::kStageABytes / 2, tokens, add);
        } else {
            multiply_chunk<kTileShape>(d, a + chunk * Cfg::kChunkABytes, tokens, add);
        }
    }
}

// One thread issues all products of the CTA, since a commit tracks its own thread only. The tensor core reads a stage
// while the next is issued; its commit frees the stage.
__device__ __forceinline__ void multiply(const Tile& tile, u32 rank, u32 smem, const Watch& watch) {
    // The tokens come from an earlier launch: no bounded wait for them begins before it has ended.
    griddepcontrol_wait();
    const u32 units = unit_count(rank);
    const u32 d = tensor_memory_address(smem + Cfg::kTensorBaseOffset);
    Ring ring;
#pragma unroll 1
    for (u32 unit = 0; unit < units; ++unit) {
        mbarrier_wait(smem + Cfg::kStageFullOffset + ring.stage * 8, ring.phase, watch);
        tcgen05_fence_after_thread_sync();
        multiply_stage(
            tile, d, smem + Cfg::kARingOffset + ring.stage * Cfg::kStageABytes,
            smem + Cfg::kBRingOffset + ring.stage * Cfg::kStageBBytes, unit > 0);
        tcgen05_commit(smem + Cfg::kStageEmptyOffset + ring.stage * 8);
        ring.advance();
    }
    tcgen05_commit(smem + Cfg::kSumsFullOffset);
}

/*% include "kernels/front_stores.cuh" %*/

// Epilogue warps.
__device__ __forceinline__ void finish(
    const Tile& tile, u32 rank, u32 smem, const Outputs& out, const Watch& watch) {
    const Fragment at{threadIdx.x, warp_index(), lane_id()};
    // An earlier launch may still read the outputs. From here on waits are bounded.
    griddepcontrol_wait();
    // A shared tile's halves are two accumulators of M = 64, which use the lower 16 lanes of each warp's 32 (PTX ISA
    // 9.7.16.10.5); another tile's are the lower and the upper 16 lanes of one of M = 128.
    const u32 second = tile.kind == TileClass::kShared ? Cfg::kUpColumn : 16u << 16;
    Accumulators acc;
    take_accumulators(acc, at, second, smem, watch);
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
        const Outputs out{
            logits, latent, shared_act, final_tokens(rank, num_tokens),
            static_cast<u32>(logits_pitch), static_cast<u32>(latent_pitch), static_cast<u32>(shared_act_pitch)};
        finish(tile, rank, smem, out, watch);
    } else if (warp == Cfg::kProducerWarp) {
        if (lane_id() == 0) {
            produce(
                gate_weight_map, down_weight_map, shared_gate_up_weight_map, x_map, tile, rank,
                static_cast<u32>(weights_ahead), smem, watch);
        }
    } else if (elect_one()) {
        multiply(tile, rank, smem, watch);
    }
}
