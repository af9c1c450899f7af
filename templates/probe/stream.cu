#include "device/base.cuh"
#include "device/grid.cuh"
#include "device/mbarrier.cuh"
#include "device/tma.cuh"

using namespace cake;

// How fast the weights of a row can reach shared memory: one CTA an SM copies its share of the boxes into a ring that
// nobody reads. No multiply, no output. What a program that streams these weights takes, this takes at least.
//
// The boxes of up to three matrices are numbered through: matrix by matrix, row tile by row tile, K fastest. CTA c
// of g takes boxes [c * n / g, (c + 1) * n / g). A matrix that is not there has no row tiles, and stands behind the
// rest.

struct Cfg {
    static constexpr u32 kProgramId = ${program_id | hex32};
//% for constant in constants
    static constexpr ${constant.value | cpp_type} ${constant.name | ident} = ${constant.value | literal};
    // ${constant.comment | comment}
//% endfor
};

// Boxes of one matrix: `row_tiles` tiles of kBoxRows rows, `tile_boxes` boxes of kBoxChunks K chunks each.
struct Shape {
    u32 row_tiles;
    u32 tile_boxes;
};

// Where a walk over the boxes stands. The matrices stand in a queue, not in an array: an index would put them into
// local memory.
struct Walk {
    Shape now;
    Shape second;
    Shape third;
    const TensorMap* now_map;
    const TensorMap* second_map;
    const TensorMap* third_map;
    u32 tile = 0;
    u32 box = 0;

    __device__ __forceinline__ void leave_matrix() {
        now = second;
        second = third;
        third = {0, 1};
        now_map = second_map;
        second_map = third_map;
    }

    __device__ __forceinline__ void skip(u32 count) {
        while (count >= now.row_tiles * now.tile_boxes) {
            count -= now.row_tiles * now.tile_boxes;
            leave_matrix();
        }
        tile = count / now.tile_boxes;
        box = count % now.tile_boxes;
    }

    __device__ __forceinline__ void next() {
        if (++box < now.tile_boxes) {
            return;
        }
        box = 0;
        if (++tile == now.row_tiles) {
            tile = 0;
            leave_matrix();
        }
    }
};

// One lane copies boxes [begin, end). A slot is loaded again once its last copy has landed; each slot's barrier
// completes a phase a copy, on its own expected bytes.
__device__ __forceinline__ void stream(Walk& walk, u32 count, u32 smem, const Watch& watch) {
    u32 slot = 0;
    u32 phase = 0;
    for (u32 loaded = 0; loaded < count; ++loaded) {
        const u32 barrier = smem + slot * 8;
        if (loaded >= Cfg::kNumSlots) {
            mbarrier_wait(barrier, phase ^ 1, watch);
        }
        mbarrier_arrive_expect_tx(barrier, Cfg::kBoxBytes);
        tma_load_3d(
            smem + Cfg::kRingOffset + slot * Cfg::kBoxBytes, *walk.now_map,
            0, walk.tile * Cfg::kBoxRows, walk.box * Cfg::kBoxChunks, barrier);
        walk.next();
        if (++slot == Cfg::kNumSlots) {
            slot = 0;
            phase ^= 1;
        }
    }
    // the last copy of every slot that was used
    const u32 pending = count < Cfg::kNumSlots ? count : Cfg::kNumSlots;
    for (u32 drained = 0; drained < pending; ++drained) {
        if (slot == 0) {
            slot = Cfg::kNumSlots;
            phase ^= 1;
        }
        --slot;
        mbarrier_wait(smem + slot * 8, phase, watch);
    }
}

extern "C" __global__ void
__launch_bounds__(32, 1)
kernel_${name | ident}(
    const __grid_constant__ TensorMap first,
    const __grid_constant__ TensorMap second,
    const __grid_constant__ TensorMap third,
    u64* wait_record,
    i32 first_tiles,
    i32 first_boxes,
    i32 second_tiles,
    i32 second_boxes,
    i32 third_tiles,
    i32 third_boxes) {
    if (threadIdx.x != 0) {
        return;
    }
    const Watch watch{wait_record, Cfg::kProgramId};
    const u32 smem = smem_base();
    prefetch_tensormap(first);
    prefetch_tensormap(second);
    prefetch_tensormap(third);
    for (u32 slot = 0; slot < Cfg::kNumSlots; ++slot) {
        mbarrier_init(smem + slot * 8, 1);
    }
    fence_mbarrier_init();
    Walk walk{
        {static_cast<u32>(first_tiles), static_cast<u32>(first_boxes)},
        {static_cast<u32>(second_tiles), static_cast<u32>(second_boxes)},
        {static_cast<u32>(third_tiles), static_cast<u32>(third_boxes)},
        &first, &second, &third};
    const u32 total = first_tiles * first_boxes + second_tiles * second_boxes + third_tiles * third_boxes;
    const u32 begin = blockIdx.x * total / gridDim.x;
    const u32 end = (blockIdx.x + 1) * total / gridDim.x;
    if (begin < end) {
        walk.skip(begin);
        stream(walk, end - begin, smem, watch);
    }
}
