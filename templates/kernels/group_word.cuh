#pragma once

#include "device/base.cuh"
#include "device/memory.cuh"

namespace cake {

// One word from thread 0 of a group of four warps to all of them. The second barrier keeps the next word from
// overtaking a slow reader.
template <class Cfg>
__device__ __forceinline__ u32 broadcast_word(u32 word, u32 group, u32 thread, u32 smem) {
    const u32 slot = smem + Cfg::kArrivalsOffset + group * 16;
    if (thread == 0) {
        st_shared_v4(slot, Vec4{word, 0, 0, 0});
    }
    named_barrier_sync(Cfg::kGroupBarrier + group, 128);
    const u32 received = ld_shared_v4(slot).x;
    named_barrier_sync(Cfg::kGroupBarrier + group, 128);
    return received;
}

}  // namespace cake
