#pragma once

// types, thread position, shared-memory addresses.

namespace cake {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;

// An opaque 128-byte tensor map, passed by value as a __grid_constant__ kernel parameter.
struct alignas(64) TensorMap {
    u8 bytes[128];
};

// Four 32-bit registers: one 16-byte access.
struct alignas(16) Vec4 {
    u32 x, y, z, w;
};

// All dynamic shared memory of a program; offsets into it are the Cfg constants of the kernel. 1024-byte alignment is
// the period of the 128-byte swizzle.
extern __shared__ __align__(1024) u8 dynamic_smem[];

// PTX ISA 10, special registers.
__device__ __forceinline__ u32 lane_id() {
    u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

__device__ __forceinline__ u64 globaltimer_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// PTX ISA 9.7.9.20, cvta: the 32-bit address of dynamic shared memory in the shared window.
__device__ __forceinline__ u32 smem_base() {
    u64 address;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(dynamic_smem));
    return static_cast<u32>(address);
}

// PTX ISA 9.7.13.2, bar.warp.sync of a whole warp.
__device__ __forceinline__ void warp_sync() {
    asm volatile("bar.warp.sync 0xffffffff;" ::: "memory");
}

// PTX ISA 9.7.9.6, shfl.sync over a full warp.
__device__ __forceinline__ float shuffle_xor(float value, u32 mask) {
    float other;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, 0xffffffff;" : "=f"(other) : "f"(value), "r"(mask));
    return other;
}

__device__ __forceinline__ u32 shuffle_index(u32 value, u32 lane) {
    u32 other;
    asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;" : "=r"(other) : "r"(value), "r"(lane));
    return other;
}

// The warp's index in its CTA, known to the compiler to be uniform over the warp.
__device__ __forceinline__ u32 warp_index() {
    return shuffle_index(threadIdx.x / 32, 0);
}

// chaos: in a build with -DCAKEGEN_CHAOS, a seeded sleep before every wait, arrive, copy and store.

// Byte offset of the seed in dynamic shared memory (the flag area); `chaos_begin` fills it.
constexpr u32 kChaosSeedOffset = 1024;

__device__ __forceinline__ void chaos_begin(const u64* record) {
#ifdef CAKEGEN_CHAOS
    if (threadIdx.x == 0) {
        *reinterpret_cast<volatile u32*>(dynamic_smem + kChaosSeedOffset) = static_cast<u32>(record[1]);
    }
    __syncthreads();
#endif
}

// `site` tells points of one warp apart. Half of the points sleep, for up to 2 us; the choice depends on nothing but
// seed, CTA, warp and site, so a seed repeats.
__device__ __forceinline__ void chaos_point(u32 site) {
#ifdef CAKEGEN_CHAOS
    u32 hash = *reinterpret_cast<volatile u32*>(dynamic_smem + kChaosSeedOffset);
    hash ^= (blockIdx.x * 64 + threadIdx.x / 32) * 0x9E3779B9u + site * 0x85EBCA6Bu;
    hash = (hash ^ (hash >> 16)) * 0x7FEB352Du;
    hash = (hash ^ (hash >> 15)) * 0x846CA68Bu;
    hash ^= hash >> 16;
    if (hash & 1) {
        asm volatile("nanosleep.u32 %0;" ::"r"((hash >> 1) & 2047));  // PTX ISA 9.7.19.2
    }
#endif
}

// PTX ISA 9.7.13.1, bar.sync: threads of whole warps, `threads` a multiple of 32. Barrier 0 is __syncthreads.
__device__ __forceinline__ void named_barrier_sync(u32 barrier, u32 threads) {
    chaos_point(barrier);
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// bounded waits: a stuck wait writes what it waited for, then traps.

// Words of the host-mapped record: 0 limit in ns, 1 chaos seed, 2 claim flag, 3 program, 4 CTA, 5 warp, 6 barrier
// (8-byte units from the start of dynamic shared memory, or kGridCounter), 7 awaited parity or value, 8 observed
// value.
constexpr u32 kGridCounter = 0xFFFF;

struct Watch {
    u64* record;
    u32 program;
};

// How long the present wait lasts. The limit is read from the record only after the first millisecond. A wait inside
// the CTA gives up last, since it may hang behind one on another CTA: so the record names the cause and not what
// followed.
constexpr u32 kGridPatience = 8;  // eighths of the limit
constexpr u32 kClusterPatience = 9;
constexpr u32 kLocalPatience = 10;

template <u32 kPatience>
struct WaitClock {
    u64 start_ns = 0;

    __device__ __forceinline__ bool expired(const Watch& watch) {
        const u64 now = globaltimer_ns();
        if (start_ns == 0) {
            start_ns = now;
        }
        const u64 waited = now - start_ns;
        return waited > 1000000 && waited > *reinterpret_cast<volatile const u64*>(watch.record) / 8 * kPatience;
    }
};

// PTX ISA 9.7.13.5 atom.cas, 9.7.13.4 membar.sys, 9.7.19.4 trap. The first CTA to give up keeps the record.
__device__ __forceinline__ void report_and_trap(const Watch& watch, u32 barrier, u32 awaited, u32 observed) {
    u64 owner;
    asm volatile("atom.relaxed.sys.global.cas.b64 %0, [%1], 0, 1;" : "=l"(owner) : "l"(watch.record + 2) : "memory");
    if (owner == 0) {
        volatile u64* record = watch.record;
        record[3] = watch.program;
        record[4] = blockIdx.x;
        record[5] = threadIdx.x / 32;
        record[6] = barrier;
        record[7] = awaited;
        record[8] = observed;
        asm volatile("fence.acq_rel.sys;" ::: "memory");
    }
    // Without the exit the compiler sees a way back into the waiting loop, and then serialises wgmma around it
    // (C7517).
    asm volatile("trap;\n\texit;");
    __builtin_unreachable();
}

}  // namespace cake
