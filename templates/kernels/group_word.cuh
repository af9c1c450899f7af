// One word from thread 0 to its warpgroup. The second barrier keeps the next word from overtaking a slow reader.
__device__ __forceinline__ u32 broadcast_word(u32 word, const Fragment& at, u32 smem) {
    const u32 slot = smem + Cfg::kArrivalsOffset + at.group * 16;
    if (at.thread == 0) {
        st_shared_v4(slot, Vec4{word, 0, 0, 0});
    }
    named_barrier_sync(Cfg::kGroupBarrier + at.group, 128);
    const u32 received = ld_shared_v4(slot).x;
    named_barrier_sync(Cfg::kGroupBarrier + at.group, 128);
    return received;
}
