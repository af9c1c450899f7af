"""Threads, barriers, asynchronous copies and matrix instructions, from small CUDA kernels through NVRTC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.units.tensor_core import bf16_to_f32
from cakegen.errors import EmulationError
from cakegen.runtime.tensor_map import TensorMap

Launch = Callable[..., Machine]
Make = Callable[..., np.ndarray]

SCHEDULES = [("early", 0), ("late", 0), ("random", 1), ("random", 2), ("random", 3)]
KERNEL = 'extern "C" __global__ void kernel_test'


@pytest.fixture(params=SCHEDULES, ids=lambda value: f"{value[0]}{value[1]}")
def adversary(request: pytest.FixtureRequest) -> Adversary:
    return Adversary(*request.param)


def test_lanes_diverge_and_meet_again(launch: Launch, array: Make, adversary: Adversary) -> None:
    source = f"""{KERNEL}(u32* out) {{
        const u32 t = threadIdx.x;
        u32 sum = 0;
        for (u32 i = 0; i < t % 7; ++i) {{
            if ((i + t) % 3 == 0) continue;
            sum += i % 2 ? t : i * 10;
        }}
        warp_sync();
        out[t] = sum + shuffle_index(sum, 5);
        if (t > 40) return;
        out[64 + t] = sum;
    }}"""
    out = array(np.zeros(128), np.uint32)
    launch(source, out, block=64, adversary=adversary)
    sums = [sum((t if i % 2 else i * 10) for i in range(t % 7) if (i + t) % 3) for t in range(64)]
    assert out[:64].tolist() == [sums[t] + sums[t // 32 * 32 + 5] for t in range(64)]
    assert out[64:].tolist() == [sums[t] if t <= 40 else 0 for t in range(64)]


def test_lane_may_wait_for_another_lane_of_its_warp(launch: Launch, array: Make, adversary: Adversary) -> None:
    """Lanes go on independently: a waiting lane keeps no other lane from arriving."""
    source = f"""{KERNEL}(u32* out, u64* record) {{
        __shared__ __align__(8) u64 barrier;
        const u32 at = static_cast<u32>(__cvta_generic_to_shared(&barrier));
        const Watch watch{{record, 1}};
        if (threadIdx.x == 0) mbarrier_init(at, 1);
        warp_sync();
        if (threadIdx.x == 3) {{ mbarrier_wait(at, 0, watch); out[0] = 7; }}
        if (threadIdx.x == 9) mbarrier_arrive(at);
    }}"""
    out = array(np.zeros(1), np.uint32)
    launch(source, out, array(np.full(16, 1 << 60), np.uint64), adversary=adversary)
    assert out[0] == 7


def test_votes_and_election(launch: Launch, array: Make, adversary: Adversary) -> None:
    source = f"""{KERNEL}(u32* out) {{
        const u32 t = threadIdx.x;
        out[t] = __ballot_sync(~0u, t % 3 == 0) + __any_sync(~0u, t == 40) + __all_sync(~0u, t < 99);
        u32 elected;
        asm volatile("{{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }}" : "=r"(elected));
        if (elected) atomicAdd(out + 32, 1);
    }}"""
    out = array(np.zeros(33), np.uint32)
    launch(source, out, adversary=adversary)
    ballot = sum(1 << lane for lane in range(0, 32, 3))
    assert out[:32].tolist() == [ballot + 1] * 32
    assert out[32] == 1


def test_barriers_of_a_cta_exchange_shared_memory(launch: Launch, array: Make, adversary: Adversary) -> None:
    source = f"""{KERNEL}(u32* out) {{
        __shared__ u32 staged[128], turned[128];
        const u32 t = threadIdx.x;
        staged[t] = t * t;
        __syncthreads();
        turned[t] = staged[127 - t];
        named_barrier_sync(1 + t / 64, 64);
        out[t] = turned[t ^ 32];
    }}"""
    out = array(np.zeros(128), np.uint32)
    launch(source, out, block=128, adversary=adversary)
    assert out.tolist() == [(127 - (t ^ 32)) ** 2 for t in range(128)]


def test_counter_orders_ctas_of_a_cooperative_grid(launch: Launch, array: Make, adversary: Adversary) -> None:
    source = f"""{KERNEL}(u32* out, u32* counter, u32* data, u64* record) {{
        const Watch watch{{record, 1}};
        data[blockIdx.x] = blockIdx.x + 1;
        atomic_inc_acq_rel_gpu(counter, gridDim.x - 1);
        counter_wait_wrapped(counter, watch);
        u32 sum = 0;
        for (u32 i = 0; i < gridDim.x; ++i) sum += data[i];
        out[blockIdx.x] = sum;
    }}"""
    out, counter, data = array(np.zeros(6), np.uint32), array(np.zeros(1), np.uint32), array(np.zeros(6), np.uint32)
    record = array(np.full(16, 1 << 60), np.uint64)
    arguments = (out, counter, data, record)
    launch(source, *arguments, grid=6, block=1, cooperative=True, adversary=adversary, outputs=(2,))
    assert out.tolist() == [21] * 6
    assert counter[0] == 0


def test_grid_that_needs_residency_it_was_not_promised_hangs(launch: Launch, array: Make) -> None:
    source = f"""{KERNEL}(u32* counter, u64* record) {{
        const Watch watch{{record, 1}};
        atomic_inc_acq_rel_gpu(counter, gridDim.x - 1);
        counter_wait_wrapped(counter, watch);
    }}"""
    record = array(np.full(16, 1 << 60), np.uint64)
    with pytest.raises(
        EmulationError, match=r"deadlock: .*and 1 clusters are not resident(.|\n)*a change of argument 0"
    ):
        launch(source, array(np.zeros(1), np.uint32), record, grid=2, block=1)


def test_cluster_pair_exchanges_by_st_async(launch: Launch, array: Make, adversary: Adversary) -> None:
    source = """extern "C" __global__ void __cluster_dims__(2, 1, 1) kernel_test(u32* out, u64* record) {
        const u32 smem = smem_base(), t = threadIdx.x, rank = cluster_ctarank();
        const Watch watch{record, 1};
        if (t == 0) {
            mbarrier_init(smem, 1);
            fence_mbarrier_init();
            mbarrier_arrive_expect_tx(smem, 64 * 16);
        }
        __syncthreads();
        cluster_arrive();
        cluster_wait();
        const u32 v = blockIdx.x * 1000 + t;
        st_async_v4(mapa(smem + 1024 + t * 16, rank ^ 1), Vec4{v, v + 1, v + 2, v + 3}, mapa(smem, rank ^ 1));
        mbarrier_wait_cluster(smem, 0, watch);
        const Vec4 got = ld_shared_v4(smem + 1024 + t * 16);
        out[blockIdx.x * 64 + t] = got.x + got.w;
        cluster_arrive();
        cluster_wait();
    }"""
    out = array(np.zeros(256), np.uint32)
    record = array(np.full(16, 1 << 60), np.uint64)
    launch(source, out, record, grid=4, block=64, cluster=2, smem=4096, adversary=adversary)
    assert out.tolist() == [2 * ((cta ^ 1) * 1000 + t) + 3 for cta in range(4) for t in range(64)]


def test_remote_arrivals_come_before_the_cluster_barrier_that_follows(
    launch: Launch, array: Make, adversary: Adversary
) -> None:
    """An arrival releases, and so does the barrier: the partner may exit behind it."""
    source = """extern "C" __global__ void __cluster_dims__(2, 1, 1) kernel_test(u32* out) {
        const u32 smem = smem_base();
        if (threadIdx.x == 0) mbarrier_init(smem, 32);
        fence_mbarrier_init();
        cluster_arrive();
        cluster_wait();
        mbarrier_arrive_cluster_after_reads(mapa(smem, cluster_ctarank() ^ 1));
        cluster_arrive();
        cluster_wait();
        out[blockIdx.x] = mbarrier_try_wait_cluster(smem, 0);
    }"""
    out = array(np.zeros(2), np.uint32)
    launch(source, out, grid=2, cluster=2, smem=1024, adversary=adversary)
    # a try_wait may fail spuriously, but its parity is complete
    assert set(out.tolist()) <= {0, 1}


def box_kernel(wait: str = "mbarrier_wait(smem, 0, watch);") -> str:
    return f"""{KERNEL}(const __grid_constant__ TensorMap map, u16* out, u64* record, i32 x, i32 y, i32 z) {{
        const u32 smem = smem_base();
        const Watch watch{{record, 1}};
        if (threadIdx.x == 0) {{
            mbarrier_init(smem, 1);
            fence_mbarrier_init();
            mbarrier_arrive_expect_tx(smem, 2 * 8 * 128);
            tma_load_3d(smem + 1024, map, x, y, z, smem);
        }}
        __syncthreads();
        {wait}
        for (u32 i = threadIdx.x; i < 2 * 8 * 8; i += 32) {{
            const u32 offset = i * 16;
            st_global_v4(out + i * 8, ld_shared_v4(smem + 1024 + (offset ^ ((offset >> 7 & 7) << 4))));
        }}
    }}"""


@pytest.mark.parametrize(("x", "y", "z"), [(0, 0, 0), (0, 3, 1), (0, -2, 2), (32, 9, 0), (0, 100, 0)])
def test_box_lands_swizzled_and_zero_filled(
    launch: Launch, array: Make, adversary: Adversary, x: int, y: int, z: int
) -> None:
    """12 rows of 192 columns as chunks of 64: dims (64, 12, 3), boxes of 64 x 8 x 2."""
    tensor = array(np.arange(1, 12 * 192 + 1), np.uint16)
    record = TensorMap("map", tensor.ctypes.data, (64, 12, 3), (384, 128), (64, 8, 2))
    out = array(np.zeros(2 * 8 * 64), np.uint16)
    watch = array(np.full(16, 1 << 60), np.uint64)
    program = box_kernel()
    # the tensor itself is no kernel argument, so it comes in as an unused one
    source = program.replace("i32 z)", "i32 z, const u16* tensor)")
    launch(
        source, record, out, watch, *(value & 0xFFFFFFFF for value in (x, y, z)), tensor, smem=8192, adversary=adversary
    )
    chunks = tensor.reshape(12, 3, 64).transpose(1, 0, 2)
    expected = np.zeros((2, 8, 64), np.uint16)
    for c in range(2):
        for r in range(8):
            for column in range(64):
                if x + column < 64 and 0 <= y + r < 12 and z + c < 3:
                    expected[c, r, column] = chunks[z + c, y + r, x + column]
    np.testing.assert_array_equal(out.reshape(2, 8, 64), expected)


def test_bulk_copy_lands_and_counts(launch: Launch, array: Make, adversary: Adversary) -> None:
    source = f"""{KERNEL}(u32* out, const u32* in, u64* record) {{
        const u32 smem = smem_base();
        const Watch watch{{record, 1}};
        if (threadIdx.x == 0) {{
            mbarrier_init(smem, 1);
            fence_mbarrier_init();
            mbarrier_arrive_expect_tx(smem, 512);
            for (u32 i = 0; i < 2; ++i) bulk_load(smem + 1024 + i * 256, in + i * 64, 256, smem);
        }}
        __syncthreads();
        mbarrier_wait(smem, 0, watch);
        const Vec4 got = ld_shared_v4(smem + 1024 + threadIdx.x * 16);
        st_global_v4(out + threadIdx.x * 4, got);
    }}"""
    data, out = array(np.arange(128), np.uint32), array(np.zeros(128), np.uint32)
    launch(source, out, data, array(np.full(16, 1 << 60), np.uint64), smem=2048, adversary=adversary)
    assert out.tolist() == data.tolist()


@pytest.mark.parametrize("n", [8, 32])
def test_wgmma_multiplies_swizzled_tiles(launch: Launch, array: Make, adversary: Adversary, n: int) -> None:
    """Operands written by threads, each element in its own place, so that layout and fragment are both seen."""
    source = f"""{KERNEL}(float* out, const u16* a, const u16* b) {{
        const u32 smem = smem_base(), t = threadIdx.x, lane = lane_id(), warp = t / 32;
        for (u32 i = t; i < (64 + {n}) * 8; i += 128) {{
            const u32 offset = i * 16;
            const u16* from = i < 512 ? a + i * 8 : b + (i - 512) * 8;
            st_shared_v4(smem + (offset ^ ((offset >> 7 & 7) << 4)), ld_global_v4(from));
        }}
        fence_proxy_async_shared();
        __syncthreads();
        float d[{n // 2}];
        for (u32 i = 0; i < {n // 2}; ++i) d[i] = 0.5f;
        wgmma_fence();
        for (u32 k = 0; k < 4; ++k)
            wgmma_m64_k16<{n}>(d, wgmma_descriptor(smem + k * 32), wgmma_descriptor(smem + 8192 + k * 32));
        wgmma_commit_group();
        wgmma_wait_group<0>();
        for (u32 i = 0; i < {n // 2}; ++i) {{
            const u32 row = 16 * warp + lane / 4 + 8 * ((i >> 1) & 1), column = 8 * (i >> 2) + 2 * (lane % 4) + (i & 1);
            out[row * {n} + column] = d[i];
        }}
    }}"""
    make = np.random.default_rng(n)
    a, b = (
        (make.integers(-8, 9, (rows, 64)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        for rows in (64, n)
    )
    out = array(np.zeros((64, n)), np.float32)
    launch(source, out, array(a), array(b), block=128, smem=(64 + n) * 128, adversary=adversary)
    np.testing.assert_array_equal(out, bf16_to_f32(a) @ bf16_to_f32(b).T + 0.5)


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_stores_rows_or_columns(launch: Launch, array: Make, transposed: bool) -> None:
    name = "stmatrix_x4_trans" if transposed else "stmatrix_x4"
    source = f"""{KERNEL}(u16* out) {{
        const u32 smem = smem_base(), lane = threadIdx.x;
        // element (row, column) of matrix m is m * 64 + row * 8 + column
        const u32 first = lane / 4 * 8 + lane % 4 * 2;
        u32 r[4];
        for (u32 m = 0; m < 4; ++m) r[m] = (m * 64 + first) | (m * 64 + first + 1) << 16;
        {name}(smem + lane * 16, r[0], r[1], r[2], r[3]);
        warp_sync();
        st_global_v4(out + lane * 8, ld_shared_v4(smem + lane * 16));
    }}"""
    out = array(np.zeros((4, 8, 8)), np.uint16)
    launch(source, out, smem=512)
    matrices = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    np.testing.assert_array_equal(out, matrices.transpose(0, 2, 1) if transposed else matrices)


def test_generic_pointers_reach_shared_and_global_memory(launch: Launch, array: Make) -> None:
    source = f"""__device__ __noinline__ void nothing() {{}}
    {KERNEL}(u32* out, u32 pick) {{
        __shared__ u32 staged[32];
        u32* where = pick ? staged : out;
        *reinterpret_cast<volatile u32*>(where + threadIdx.x) = threadIdx.x + 5;
        warp_sync();
        if (pick) out[threadIdx.x] = staged[threadIdx.x] * 2;
    }}"""
    for pick, factor in ((0, 1), (1, 2)):
        out = array(np.zeros(32), np.uint32)
        launch(source, out, pick)
        assert out.tolist() == [(t + 5) * factor for t in range(32)]


def test_seeds_take_different_schedules_and_repeat(launch: Launch, array: Make) -> None:
    source = f"""{KERNEL}(u32* out) {{
        for (u32 i = 0; i < 4; ++i) __syncthreads();
        out[threadIdx.x] = threadIdx.x;
    }}"""

    def hash_of(*schedule: Any) -> str:
        adversary = Adversary(*schedule)
        launch(source, array(np.zeros(256), np.uint32), block=256, adversary=adversary)
        return adversary.schedule_hash

    schedules = [("random", seed) for seed in range(8)] + [("early", 0), ("late", 0)]
    hashes = [hash_of(*schedule) for schedule in schedules]
    assert len(set(hashes)) == len(hashes)
    assert hashes == [hash_of(*schedule) for schedule in schedules]


def test_poll_of_the_last_word_of_a_wide_store_wakes_up(launch: Callable[..., Machine], array: Make) -> None:
    """Without checks: the store is weak, which a device lets pass."""
    x = array(np.zeros(8), np.uint32)
    source = """extern "C" __global__ void kernel_test(unsigned* x) {
        if (threadIdx.x == 32) asm volatile("st.global.v4.u32 [%0], {%1, %1, %1, %1};" :: "l"(x), "r"(7) : "memory");
        unsigned found = 0;
        while (threadIdx.x == 0 && found == 0) {
            asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(x + 3) : "memory");
        }
        if (threadIdx.x == 0) x[4] = found;
    }"""
    launch(source, x, block=64, checks=False)
    assert x.tolist() == [7, 7, 7, 7, 7, 0, 0, 0]
