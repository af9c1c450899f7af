#pragma once

#include "device/base.cuh"
#include "device/mbarrier.cuh"

namespace cake {

// How many barriers of a kind lie side by side, and the arrivals that complete a phase of each.
struct BarrierKind {
    u32 count;
    u32 arrivals;
};

// One thread initialises all barriers of a program, kind by kind, from `barrier` on.
template <class Cfg, u32 kKind = 0>
__device__ __forceinline__ void init_barriers(u32 barrier) {
    if constexpr (kKind < sizeof(Cfg::kBarriers) / sizeof(BarrierKind)) {
        constexpr BarrierKind kind = Cfg::kBarriers[kKind];
        for (u32 i = 0; i < kind.count; ++i) {
            mbarrier_init(barrier + i * 8, kind.arrivals);
        }
        init_barriers<Cfg, kKind + 1>(barrier + kind.count * 8);
    }
}

}  // namespace cake
