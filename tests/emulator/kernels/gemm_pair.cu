// A two-CTA GEMM whose clusters take tiles in turn: `gemm_pair.cuh`.

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(192) kernel_test(
    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, float* out, u32 n, u32 k, u32 tiles,
    u64* record, const u16*, const u16*) {
    const u32 smem = smem_base(), warp = threadIdx.x / 32, step = gridDim.x / 2;
    const Watch watch{record, 1};
    const Problem problem{n, k / kTileK};
    setup(smem, warp);
    rendezvous();
    const u32 base = tensor_base(smem + kBase);
    u32 i = 0, item = 0;
    if (warp == 0) {
        for (u32 tile = blockIdx.x / 2; lane_id() == 0 && tile < tiles; tile += step) {
            load_tile(smem, a, b, problem, tile, i, watch);
        }
    } else if (warp == 1) {
        const bool issues = lane_id() == 0 && cluster_ctarank() == 0;
        for (u32 tile = blockIdx.x / 2; issues && tile < tiles; tile += step) {
            multiply_tile(smem, base, problem, item++, i, watch);
        }
    } else {
        for (u32 tile = blockIdx.x / 2; tile < tiles; tile += step) {
            store_tile(smem, base, out, problem, tile, item++, watch);
        }
    }
    warp_sync();
    rendezvous();
    if (warp == 1) tensor_dealloc<2>(base, kColumns);
}
