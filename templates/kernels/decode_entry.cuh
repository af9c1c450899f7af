//# How every decode kernel begins: its set-up, then its body up to where the warps take their roles.
//% set front = spec.role == "decode_front"
//% set fused_norm = not front and spec.value("kFusedNorm")
//% set split = spec.arch_family == "sm90" and spec.value("kTokenParts") > 1
//% if front
__device__ __forceinline__ void set_up(
    const TensorMap& router_map, const TensorMap& latent_map, const TensorMap& shared_map, const TensorMap& x_map,
    u32 rank, u32 smem) {
    if (threadIdx.x == Cfg::kProducerWarp * 32) {
        prefetch_tensormap(router_map);
        prefetch_tensormap(latent_map);
        prefetch_tensormap(shared_map);
        prefetch_tensormap(x_map);
//% else
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
//% endif
        init_ring_and_pair(smem);
//% if spec.arch_family == "sm100"
        mbarrier_init(smem + Cfg::kSumsFullOffset, 1);
//% endif
//% if fused_norm
        mbarrier_init(smem + Cfg::kRowsIssuedOffset, Cfg::kNormWarps);
        mbarrier_init(smem + Cfg::kRowsArrivedOffset, 1);
        mbarrier_init(smem + Cfg::kYResidentOffset, 1);
        mbarrier_init(smem + Cfg::kRowsStagedOffset, 1);
//% endif
        publish_barriers(rank, smem);
    }
//% if spec.value("kBlockM") < 128
    clear_pads(smem);
//% endif
//% if spec.arch_family == "sm100"
    claim_tensor_memory(smem);
//% else
    __syncthreads();
//% if spec.value("kClusterCtas") == 2
    cluster_arrive();
//% endif
//% endif
}

/*% include "kernels/signature.cuh" %*/
//% if not front
    const Operands operands{
        shared_down_weight_map, up_weight_map, shared_act_map, y_workspace_map,
//% if fused_norm
        routed, norm_weight, y_workspace, counters,
        static_cast<u32>(num_partials), static_cast<u32>(routed_pitch),
        static_cast<u32>(routed_partial_stride), static_cast<u32>(y_pitch),
//% endif
        out, static_cast<u32>(num_tokens), static_cast<u32>(out_pitch), static_cast<u32>(up_col0),
        static_cast<u32>(weights_ahead)};
//% endif
    const Watch watch{wait_record, Cfg::kProgramId};
    const u32 smem = smem_base();
    const u32 rank = Cfg::kClusterCtas == 2 ? cluster_ctarank() : 0;
//% if front
//% if split
    const Tile tile = tile_of(blockIdx.x / Cfg::kTokenParts);
//% else
    const Tile tile = tile_of(blockIdx.x / Cfg::kClusterCtas);
//% endif
//% elif split
    const u32 tile_row = blockIdx.x / Cfg::kTokenParts * Cfg::kBlockM;
//% else
    const u32 tile_row = blockIdx.x / Cfg::kClusterCtas * Cfg::kBlockM;
//% endif
    chaos_begin(wait_record);
//% if front
    set_up(gate_weight_map, down_weight_map, shared_gate_up_weight_map, x_map, rank, smem);
//% else
    set_up(operands, rank, smem);
//% endif
    // A dependent launch starts once all CTAs run, so it takes nothing from this one but idle multiprocessors.
    griddepcontrol_launch_dependents();
    const u32 warp = warp_index();
