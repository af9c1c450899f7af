#include "${device_common | file_name}"

using namespace cake;

// One warp normalises one row: kRowsPerCta rows a CTA, no shared memory. y [T, kLatentCols] bf16 in global memory is
// read by the launch that follows in the stream.
/*% include "kernels/cfg.cuh" %*/

/*% include "kernels/norm_row.cuh" %*/

/*% include "kernels/signature.cuh" %*/
    const u32 lane = lane_id();
    const u32 row = blockIdx.x * Cfg::kRowsPerCta + warp_index();
    if constexpr (Cfg::kEarlyTrigger) {
        griddepcontrol_launch_dependents();
    }
    griddepcontrol_wait();
    if (row < static_cast<u32>(num_tokens)) {
        const u16* source = routed + static_cast<u64>(row) * routed_pitch;
        u16* y = y_workspace + static_cast<u64>(row) * y_pitch;
        const RowVectors rounded = sum_partials(source, lane, num_partials, routed_partial_stride);
        const RowVectors weights = load_vectors(norm_weight, lane);
        store_row(y, rounded, weights, reciprocal_norm(rounded), lane);
    }
    if constexpr (!Cfg::kEarlyTrigger) {
        griddepcontrol_launch_dependents();
    }
}
