"""What the emulator must report: broken kernels, each by the right fault with its place, and broken programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.emit.committed_trees import device_headers

from cakegen.emulator import Fault
from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.machine import Machine
from cakegen.registry import Registry
from cakegen.runtime.tensor_map import TensorMap

Launch = Callable[..., Machine]
Make = Callable[..., np.ndarray]
KERNEL = 'extern "C" __global__ void kernel_test'
SETUP = """const u32 smem = smem_base(), t = threadIdx.x;
        const Watch watch{record, 1};
        if (t == 0) { mbarrier_init(smem, 1); fence_mbarrier_init(); }
        __syncthreads();"""
RANDOM = [("random", seed) for seed in range(3)]


def fault_of(launch: Launch, source: str, *values: Any, **options: Any) -> Fault:
    with pytest.raises(Fault) as caught:
        launch(source, *values, **options)
    return caught.value


def with_record(
    launch: Launch, array: Make, body: str, schedule: tuple[str, int] = ("early", 0), smem: int = 8192, **options: Any
) -> Fault:
    """The fault of a kernel of one CTA: `out` has 64 words, an mbarrier lives at the start of shared memory."""
    out, record = array(np.zeros(64), np.uint32), array(np.full(16, 1 << 60), np.uint64)
    source = f"{KERNEL}(u32* out, u64* record) {{ {SETUP} {body} }}"
    return fault_of(launch, source, out, record, smem=smem, adversary=Adversary(*schedule), **options)


def test_store_behind_an_allocation_names_it_the_lane_and_the_line(
    launch: Launch, array: Make, registry: Registry
) -> None:
    fault = fault_of(
        launch,
        f"{KERNEL}(u32* out) {{\n if (threadIdx.x > 3)\n  out[threadIdx.x * 2] = 1;\n}}",
        array(np.zeros(32), np.uint32),
    )
    assert fault.kind == "out-of-bounds"
    assert "write of 4 bytes at argument 0 + 248: its 128 bytes end before" in str(fault)
    assert fault.where is not None
    assert fault.where.lanes == "4-31"
    # the third line of the text, behind its includes and a line that names their namespace
    includes, _ = device_headers(registry, hopper=True)
    assert fault.where.instruction.place.source[0] == ("test_kernel.cu", len(includes) + 1 + 3)


def test_load_from_no_tensor_says_where_the_nearest_ends(launch: Launch, array: Make) -> None:
    source = f"{KERNEL}(u32* out) {{ out[0] = out[1 << 28]; }}"
    fault = fault_of(launch, source, array(np.zeros(32), np.uint32), block=1)
    assert fault.kind == "out-of-bounds"
    assert "of argument 0, which has 128" in str(fault)


def test_shared_access_behind_the_memory_of_the_cta(launch: Launch, array: Make) -> None:
    fault = with_record(launch, array, "out[t] = ld_shared_v4(smem + 8192 - 16 * 31 + 16 * t).x;")
    assert fault.kind == "out-of-bounds"
    assert "the CTA has 8192 bytes" in str(fault)


def test_read_of_shared_memory_that_nothing_wrote(launch: Launch, array: Make) -> None:
    fault = with_record(
        launch,
        array,
        "if (t) st_shared_f32(smem + 1024 + t * 4, 1); __syncthreads(); out[t] = ld_shared_v4(smem + 1024).x;",
    )
    assert fault.kind == "unwritten-read"
    assert "shared offset 1024" in str(fault)


def box(launch: Launch, array: Make, wait: str, expected_bytes: int, schedule: tuple[str, int]) -> Fault:
    tensor = array(np.arange(64 * 8), np.uint16)
    record = TensorMap("weights", tensor.ctypes.data, (64, 8), (128,), (64, 8))
    source = f"""{KERNEL}(const __grid_constant__ TensorMap map, u16* out, u64* record, const u16* tensor) {{
        {SETUP}
        if (t == 0) {{
            mbarrier_arrive_expect_tx(smem, {expected_bytes});
            asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                " [%0], [%1, {{%2, %3}}], [%4];" :: "r"(smem + 1024), "l"(&map), "r"(0), "r"(0), "r"(smem) : "memory");
        }}
        __syncthreads();
        {wait}
        out[t] = ld_shared_v4(smem + 1024 + t * 16).x;
    }}"""
    out, watch = array(np.zeros(32), np.uint16), array(np.full(16, 1 << 60), np.uint64)
    return fault_of(launch, source, record, out, watch, tensor, smem=4096, adversary=Adversary(*schedule))


def test_read_before_the_copy_that_fills_it(launch: Launch, array: Make) -> None:
    fault = box(launch, array, "", 1024, ("late", 0))
    assert fault.kind == "pending-write"
    assert "shared offset 1024 is read while a copy still writes to it" in str(fault)


@pytest.mark.parametrize("schedule", [("early", 0), ("late", 0), *RANDOM])
def test_too_many_bytes_expected_is_a_deadlock_that_shows_the_rest(
    launch: Launch, array: Make, schedule: tuple[str, int]
) -> None:
    fault = box(launch, array, "mbarrier_wait(smem, 0, watch);", 1040, schedule)
    assert fault.kind == "deadlock"
    assert "waits for parity 0 of shared offset 0 (phase 0, 0 of 1 arrivals pending, tx 16 bytes)" in str(fault)


def test_too_few_bytes_expected_leave_a_rest_at_exit(launch: Launch, array: Make) -> None:
    """Nobody waits, so that only the count is wrong."""
    fault = box(launch, array, "if (t == 0) return; nothing_waits: warp_sync(); return;", 1008, ("early", 0))
    assert fault.kind == "barrier"
    assert "exits with bytes left over" in str(fault)
    assert "tx -16 bytes" in str(fault)


def test_exit_with_a_copy_on_its_way(launch: Launch, array: Make) -> None:
    fault = box(launch, array, "return;", 1024, ("late", 0))
    assert fault.kind == "exit"
    assert "the copy of box (0, 0) of weights is on its way" in str(fault)


REMOTE_ARRIVAL = """
    const u32 smem = smem_base();
    u32 rank, peer;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(peer) : "r"(smem));
    if (threadIdx.x == 0) { mbarrier_init(smem, 1); fence_mbarrier_init(); }
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (rank == 1 && threadIdx.x == 0)
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(peer) : "memory");
    asm volatile("barrier.cluster.arrive.ORDER.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
"""


def test_arrival_that_a_relaxed_cluster_barrier_does_not_hold_back_finds_its_cta_gone(launch: Launch) -> None:
    """`.relaxed` orders no memory access (PTX ISA 9.7.13.4); the report names the arrival, not the barrier."""
    source = f"{KERNEL}() {{ {REMOTE_ARRIVAL} }}"
    options = {"smem": 1024, "grid": 2, "cluster": 2}
    found = []
    for schedule in [("late", 0), *(("random", seed) for seed in range(8))]:
        launch(source.replace("ORDER", "release"), adversary=Adversary(*schedule), **options)
        try:
            launch(source.replace("ORDER", "relaxed"), adversary=Adversary(*schedule), **options)
        except Fault as fault:
            found.append(fault)
    assert found
    for fault in found:
        assert fault.kind == "exit"
        assert "an arrival at a barrier of CTA 0, which has exited" in str(fault)
        assert fault.where is not None
        assert fault.where.instruction.opcode.startswith("mbarrier.arrive")


def test_wait_for_the_wrong_parity_hangs(launch: Launch, array: Make) -> None:
    fault = with_record(
        launch, array, "if (t == 0) mbarrier_arrive(smem); __syncwarp(); mbarrier_wait(smem, 1, watch);"
    )
    assert fault.kind == "deadlock"
    assert "parity 1 of shared offset 0 (phase 1, 1 of 1 arrivals pending" in str(fault)
    assert "CTA 0 warp 0 lanes 0-31" in str(fault)


def test_arrival_too_many(launch: Launch, array: Make) -> None:
    body = "if (t == 0) { mbarrier_arrive_expect_tx(smem, 16); mbarrier_arrive(smem); }"
    fault = with_record(launch, array, body)
    assert fault.kind == "barrier"
    assert "1 arrivals are more than are pending" in str(fault)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (t == 0) mbarrier_init(smem, 1);", "is initialised again while it lives"),
        ("if (t == 0) mbarrier_init(smem + 8, 0);", "mbarrier.init with 0 arrivals"),
        ("if (t == 0) mbarrier_arrive(smem + 16);", "no mbarrier lives at shared offset 16"),
        ("if (t == 0) mbarrier_arrive_expect_tx(smem, 1 << 20);", "transaction count left"),
        ("named_barrier_sync(3, 48);", "a multiple of 32 is needed"),
    ],
)
def test_misuse_of_a_barrier(launch: Launch, array: Make, body: str, message: str) -> None:
    fault = with_record(launch, array, body)
    assert fault.kind == "barrier"
    assert message in str(fault)


def test_barrier_that_a_warp_does_not_reach_hangs(launch: Launch, array: Make) -> None:
    fault = with_record(launch, array, "if (t < 32) named_barrier_sync(2, 64);", block=64)
    assert fault.kind == "deadlock"
    assert "CTA 0 warp 0 lanes 0-31: waits for bar 2 (32 of 64 threads arrived) in `bar.sync" in str(fault)


def test_lanes_that_wait_for_each_other_at_different_places(launch: Launch, array: Make) -> None:
    body = "if (t < 16) { named_barrier_sync(1, 32); out[t] = 1; } else { named_barrier_sync(2, 32); out[t] = 2; }"
    fault = with_record(launch, array, body)
    assert fault.kind == "divergence"
    assert "lanes 0-15" in str(fault)
    assert "lanes 16-31" in str(fault)


@pytest.mark.parametrize("is_committed", [False, True])
def test_store_over_what_a_wgmma_may_still_read(launch: Launch, array: Make, is_committed: bool) -> None:
    body = """
        for (u32 i = t; i < 1024; i += 128) st_shared_v4(smem + 1024 + i % 448 * 16, Vec4{0, 0, 0, 0});
        fence_proxy_async_shared();
        __syncthreads();
        float d[4] = {};
        wgmma_fence();
        wgmma_m64_k16<8>(d, wgmma_descriptor(smem + 1024), wgmma_descriptor(smem + 1024));
        wgmma_commit_group();
        st_shared_v4(smem + 1024 + t * 16, Vec4{0, 0, 0, 0});
        wgmma_wait_group<0>();
        out[t % 64] = d[0];"""
    if not is_committed:
        body = body.replace("wgmma_commit_group();", "").replace("wgmma_wait", "wgmma_commit_group(); wgmma_wait")
    body = body.replace("smem + 1024", "at").replace("for (u32", "const u32 at = smem + 1024; for (u32", 1)
    out, record = array(np.zeros(64), np.uint32), array(np.full(16, 1 << 60), np.uint64)
    source = f"{KERNEL}(u32* out, u64* record) {{ {SETUP} {body} }}".replace("% 448", "% 512")
    fault = fault_of(launch, source, out, record, smem=16384, block=128)
    assert fault.kind == "pending-read"
    assert "while an asynchronous operation may still read it" in str(fault)


def test_fault_of_one_wgmma_of_a_group_names_it(launch: Launch, array: Make) -> None:
    body = """
        for (u32 i = t; i < 512; i += 128) st_shared_v4(smem + 1024 + i * 16, Vec4{0, 0, 0, 0});
        fence_proxy_async_shared();
        __syncthreads();
        float d[4] = {}, e[8] = {};
        wgmma_fence();
        wgmma_m64_k16<8>(d, wgmma_descriptor(smem + 1024), wgmma_descriptor(smem + 1024));
        wgmma_m64_k16<16>(e, wgmma_descriptor(smem + 1024), wgmma_descriptor(smem + 10240));
        wgmma_commit_group();
        wgmma_wait_group<0>();
        out[t % 64] = __float_as_uint(d[0] + e[0]);"""
    fault = with_record(launch, array, body, block=128, smem=16384)
    assert fault.kind == "unwritten-read"
    assert "shared offset 10240, which nothing has written" in str(fault)
    assert fault.where is not None
    assert fault.where.instruction.opcode.startswith("wgmma.mma_async.sync.aligned.m64n16k16")


@pytest.mark.parametrize(
    "use",
    [
        "out[t % 64] = d[0] + 1;",
        "out[t % 64] = __float_as_uint(d[0]);",
        "st_shared_f32(smem + 12288 + t * 4, d[0]);",
        "st_global_v2_f32(out + t % 32 * 2, d[0], d[1]);",
        "if (t % 2) d[0] = 1;",
    ],
)
def test_accumulator_used_before_its_wait(launch: Launch, array: Make, use: str) -> None:
    body = """
        for (u32 i = t; i < 512; i += 128) st_shared_v4(smem + 1024 + i * 16, Vec4{0, 0, 0, 0});
        fence_proxy_async_shared();
        __syncthreads();
        float d[4] = {};
        wgmma_fence();
        wgmma_m64_k16<8>(d, wgmma_descriptor(smem + 1024), wgmma_descriptor(smem + 1024));
        wgmma_commit_group();
        USE
        wgmma_wait_group<0>();
        out[t % 64] = __float_as_uint(d[0] + d[1]);""".replace("USE", use)
    fault = with_record(launch, array, body, block=128, smem=16384)
    assert fault.kind == "pending-write"
    assert "an accumulator register " in str(fault)


def test_operand_that_starts_between_atom_rows(launch: Launch, array: Make) -> None:
    body = """
        float d[4] = {};
        wgmma_m64_k16<8>(d, wgmma_descriptor(smem + 1024 + 128), wgmma_descriptor(smem + 1024));
        wgmma_wait_group<0>();
        out[t % 64] = d[0];"""
    fault = with_record(launch, array, body, block=128)
    assert fault.kind == "descriptor"
    assert "lies in row 1 of its 1024-byte atom" in str(fault)


def test_two_ctas_that_write_one_output(launch: Launch, array: Make) -> None:
    source = f"{KERNEL}(u32* out) {{ out[threadIdx.x] = 1; }}"
    fault = fault_of(launch, source, array(np.zeros(32), np.uint32), grid=2, outputs=(0,))
    assert fault.kind == "output"
    assert "is written by CTA 1 and was by CTA 0" in str(fault)


def test_read_of_an_output_before_it_is_written(launch: Launch, array: Make) -> None:
    source = f"{KERNEL}(u32* out) {{ out[threadIdx.x] = out[threadIdx.x ^ 1] + 1; }}"
    fault = fault_of(launch, source, array(np.zeros(32), np.uint32), outputs=(0,))
    assert fault.kind == "unwritten-read"


def test_trap_is_a_verdict(launch: Launch, array: Make) -> None:
    fault = with_record(launch, array, "if (t == 5) report_and_trap(watch, 1, 2, 3);")
    assert fault.kind == "trap"
    assert fault.where is not None
    assert fault.where.lanes == "5"
