//# How every prefill GEMM begins, up to what it needs of its own.
/*% include "kernels/signature.cuh" %*/
    const Watch watch{wait_record, Cfg::kProgramId};
    const u32 smem = smem_base();
    const u32 rank = cluster_ctarank();
//% if spec.arch_family == "sm100"
    const u32 pair_rows = static_cast<u32>(m_tiles) / 2;
//% else
    const u32 row_tiles = static_cast<u32>(m_tiles);
//% endif
//% if spec.role == "front_gemm"
    const u32 rows = num_tokens;
//% elif spec.arch_family == "sm100"
    const u32 tokens = num_tokens;
//% endif
    const Split split{
        static_cast<u32>(num_items), static_cast<u32>(full_items), static_cast<u32>(sk_ipc),
        static_cast<u32>(sk_max_seg), static_cast<u32>(sk_total)};
