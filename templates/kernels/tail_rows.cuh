//% set hopper = spec.arch_family == "sm90"
//% set unit_bytes = "kStageBBytes" if hopper else "kChunkBBytes"
//% set unit_cols = "kUnitCols" if hopper else "kBlockK"
//% if spec.value("kStagedRows")
// One row, or the norm weight, from its staged copy: a single partial, already bf16.
__device__ __forceinline__ RowVectors load_staged(u32 row_offset, u32 lane, u32 smem) {
    RowVectors loaded;
#pragma unroll
    for (u32 v = 0; v < Cfg::kVectorsPerLane; ++v) {
        const u32 source = smem + row_offset + (lane + 32 * v) * 16;
        const Vec4 words = owns_vector(lane, v) ? ld_shared_v4(source) : Vec4{0, 0, 0, 0};
        loaded.pairs[v][0] = words.x;
        loaded.pairs[v][1] = words.y;
        loaded.pairs[v][2] = words.z;
        loaded.pairs[v][3] = words.w;
    }
    return loaded;
}

__device__ __forceinline__ RowVectors load_row(const Operands& operands, u32 row, u32 lane, u32 smem) {
    return load_staged(Cfg::kStagedRowsOffset + row * Cfg::kLatentCols * 2, lane, smem);
}

__device__ __forceinline__ RowVectors load_weights(const Operands& operands, u32 lane, u32 smem) {
    return load_staged(Cfg::kNormWeightOffset, lane, smem);
}
//% else
__device__ __forceinline__ RowVectors load_row(const Operands& operands, u32 row, u32 lane, u32 smem) {
    const u16* source = operands.routed + static_cast<u64>(row) * operands.routed_pitch;
    return sum_partials(source, lane, operands.num_partials, operands.routed_partial_stride);
}

// All vectors at once, on their way while the row's statistics are taken: one at a time, each would wait for the
// last.
__device__ __forceinline__ RowVectors load_weights(const Operands& operands, u32 lane, u32 smem) {
    return load_vectors(operands.norm_weight, lane);
}
//% endif

//% if spec.value("kResidentB")
// Rows past num_tokens, and columns past a ragged slice, must be zeros.
__device__ __forceinline__ void clear_resident(const Share& share, u32 norm_thread, u32 smem) {
    const u32 bytes = share.up * Cfg::${unit_bytes | code};
    for (u32 offset = norm_thread * 16; offset < bytes; offset += Cfg::kNormWarps * 32 * 16) {
        st_shared_v4(smem + Cfg::kResidentBOffset + offset, Vec4{0, 0, 0, 0});
    }
    named_barrier_sync(Cfg::kNormBarrier, Cfg::kNormWarps * 32);
}

// Writes the vectors of y that fall into this CTA's up chunks where the MMA reads them: K-major chunks of 64 columns,
// 128-byte rows, 128-byte swizzle (bits 4 to 6 of the offset xor bits 7 to 9, PTX ISA 5.5.7).
__device__ __forceinline__ void store_resident(
    const Operands& operands, const Share& share, u32 row, const RowVectors& rounded, const RowVectors& weights,
    float scale, u32 lane, u32 smem) {
#pragma unroll
    for (u32 v = 0; v < Cfg::kVectorsPerLane; ++v) {
        const u32 column = (lane + 32 * v) * 8 - operands.up_col0;  // in the slice; wraps below it
        const u32 local = column - share.first_up * Cfg::${unit_cols | code};   // in the share; wraps below it
        if (owns_vector(lane, v) && column < Cfg::kUpCols && local < share.up * Cfg::${unit_cols | code}) {
            const u32 offset = row * 128 + local % Cfg::kBlockK * 2;
            const u32 swizzled = offset ^ ((offset >> 7 & 7) << 4);
            const u32 chunk = smem + Cfg::kResidentBOffset + local / Cfg::kBlockK * Cfg::kChunkBBytes;
            st_shared_v4(chunk + swizzled, scale_vector(rounded.pairs[v], weights.pairs[v], scale));
        }
    }
}

// Every CTA normalises all rows for its own up chunks; row r goes to the y workspace from CTA r modulo the grid.
__device__ __forceinline__ void normalise(
    const Operands& operands, u32 norm_warp, u32 lane, u32 rank, u32 smem, const Watch& watch) {
    const Share share = share_of(rank);
    const u32 norm_thread = norm_warp * 32 + lane;
    clear_resident(share, norm_thread, smem);
    griddepcontrol_wait();
//% if spec.value("kStagedRows")
    mbarrier_wait(smem + Cfg::kRowsStagedOffset, 0, watch);
//% endif
    bool issued = false;
    for (u32 row = norm_warp; row < operands.num_tokens; row += Cfg::kNormWarps) {
        const RowVectors rounded = load_row(operands, row, lane, smem);
        const RowVectors weights = load_weights(operands, lane, smem);
        if (!issued && lane == 0) {
            mbarrier_arrive(smem + Cfg::kRowsIssuedOffset);
        }
        issued = true;
        const float scale = reciprocal_norm(rounded);
        chaos_point(row);
        store_resident(operands, share, row, rounded, weights, scale, lane, smem);
        if (row % Cfg::kGridCtas == blockIdx.x) {
            store_row(operands.y + static_cast<u64>(row) * operands.y_pitch, rounded, weights, scale, lane);
        }
    }
    if (!issued && lane == 0) {
        mbarrier_arrive(smem + Cfg::kRowsIssuedOffset);
    }
    fence_proxy_async_shared();
    named_barrier_sync(Cfg::kNormBarrier, Cfg::kNormWarps * 32);
    if (norm_thread == 0) {
        mbarrier_arrive(smem + Cfg::kYResidentOffset);
    }
}
//% else
// CTA c normalises rows c, c + grid, ...; its arrival at the counter publishes them. Each writer fences its generic
// writes for the copies that will read them; the barrier brings them to one thread, whose release covers all (PTX
// ISA 8.8).
__device__ __forceinline__ void normalise(
    const Operands& operands, u32 norm_warp, u32 lane, u32 rank, u32 smem, const Watch& watch) {
    griddepcontrol_wait();
    bool issued = false;
    constexpr u32 kRowStep = Cfg::kNormWarps * Cfg::kGridCtas;
    for (u32 row = blockIdx.x + norm_warp * Cfg::kGridCtas; row < operands.num_tokens; row += kRowStep) {
        const RowVectors rounded = load_row(operands, row, lane, smem);
        const RowVectors weights = load_weights(operands, lane, smem);
        if (!issued && lane == 0) {
            mbarrier_arrive(smem + Cfg::kRowsIssuedOffset);
        }
        issued = true;
        u16* y = operands.y + static_cast<u64>(row) * operands.y_pitch;
        const float scale = reciprocal_norm(rounded);
        chaos_point(row);
        store_row(y, rounded, weights, scale, lane);
    }
    if (!issued && lane == 0) {
        mbarrier_arrive(smem + Cfg::kRowsIssuedOffset);
    }
    fence_proxy_async_global();
    named_barrier_sync(Cfg::kNormBarrier, Cfg::kNormWarps * 32);
    if (norm_warp == 0 && lane == 0) {
        atomic_inc_acq_rel_gpu(operands.counters, Cfg::kGridCtas - 1);
        mbarrier_arrive(smem + Cfg::kRowsArrivedOffset);
    }
}
//% endif
