// A persistent two-CTA GEMM: `gemm_pair.cuh`. The grid is one cluster a tile; a cluster that runs takes the places of
// others that have not started.
//
// Slot s of two holds a response. scheduled[s], each CTA's: an arrival of its load warp, and 16 bytes. taken[s], the
// leader's: everybody who has read the response, 5 warps of each CTA and the multiply warp.

constexpr u32 kScheduled = kSchedule, kTaken = kSchedule + 16, kResponse = 192;
constexpr u32 kReaders = 2 * (kEpilogueWarps + 1) + 1;

// The next tile of the cluster, -1 behind the last; every role calls it once an item.
__device__ i32 next_tile(u32 smem, u32 item, const Watch& watch) {
    const Turn turn(item, 2);
    mbarrier_wait_cluster(smem + kScheduled + 8 * turn.stage, turn.parity, watch);
    const i32 x = query_cancel(smem + kResponse + 16 * turn.stage);
    return x < 0 ? -1 : x / 2;
}

__device__ void take(u32 smem, u32 item) {
    mbarrier_arrive_cluster(mapa(smem + kTaken + 8 * (item % 2), 0));
}

__device__ void request(u32 smem, u32 item, const Watch& watch) {
    const Turn turn(item, 2);
    if (cluster_ctarank() == 0) mbarrier_wait_cluster(smem + kTaken + 8 * turn.stage, turn.parity ^ 1, watch);
    mbarrier_arrive_expect_tx(smem + kScheduled + 8 * turn.stage, 16);
    if (cluster_ctarank() == 0) {
        try_cancel_multicast(smem + kResponse + 16 * turn.stage, smem + kScheduled + 8 * turn.stage);
    }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(192) kernel_test(
    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, float* out, u32 n, u32 k, u32 tiles,
    u64* record, const u16*, const u16*) {
    const u32 smem = smem_base(), warp = threadIdx.x / 32;
    const Watch watch{record, 1};
    const Problem problem{n, k / kTileK};
    setup(smem, warp);
    if (threadIdx.x == 0) {
        for (u32 slot = 0; slot < 2; ++slot) {
            mbarrier_init(smem + kScheduled + 8 * slot, 1);
            mbarrier_init(smem + kTaken + 8 * slot, kReaders);
        }
    }
    rendezvous();
    const u32 base = tensor_base(smem + kBase);
    u32 i = 0, item = 0;
    i32 tile = blockIdx.x / 2;
    if (warp == 0) {
        while (lane_id() == 0 && tile >= 0) {
            request(smem, item, watch);
            load_tile(smem, a, b, problem, tile, i, watch);
            tile = next_tile(smem, item, watch);
            take(smem, item++);
        }
    } else if (warp == 1) {
        while (lane_id() == 0 && cluster_ctarank() == 0 && tile >= 0) {
            multiply_tile(smem, base, problem, item, i, watch);
            tile = next_tile(smem, item, watch);
            take(smem, item++);
        }
    } else {
        while (tile >= 0) {
            store_tile(smem, base, out, problem, tile, item, watch);
            tile = next_tile(smem, item, watch);
            warp_sync();
            if (lane_id() == 0) take(smem, item);
            ++item;
        }
    }
    warp_sync();
    rendezvous();
    if (warp == 1) tensor_dealloc<2>(base, kColumns);
}
