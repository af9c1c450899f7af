"""cta_group::2, multicast commits and cluster launch control, from small kernels (PTX ISA 9.7.16.5, 9.7.13.17)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.units.tensor_core import bf16_to_f32
from cakegen.runtime.tensor_map import TensorMap

Launch = Callable[..., Machine]
Make = Callable[..., np.ndarray]

SCHEDULES = [("early", 0), ("late", 0), ("random", 1), ("random", 2), ("random", 3)]
PAIR = 'extern "C" __global__ void __cluster_dims__(2, 1, 1) kernel_test'


@pytest.fixture(params=SCHEDULES, ids=lambda value: f"{value[0]}{value[1]}")
def adversary(request: pytest.FixtureRequest) -> Adversary:
    return Adversary(*request.param)


# Each CTA stages its half of A's rows and of B's, K-major with the 128-byte swizzle; the even one issues for both.
MULTIPLY = (
    PAIR
    + """(u32* out, const u16* a, const u16* b, u64* record) {
    const u32 t = threadIdx.x, smem = smem_base(), rank = cluster_ctarank();
    const Watch watch{record, 1};
    for (u32 i = t; i < (M + N) / 2 * 8; i += 128) {
        const u32 row = i / 8, offset = i * 16;
        const u16* from = row < M / 2 ? a + (rank * M / 2 + row) * 64 : b + (rank * N / 2 + row - M / 2) * 64;
        st_shared_v4(smem + 1024 + (offset ^ ((offset >> 7 & 7) << 4)), ld_global_v4(from + i % 8 * 8));
    }
    const u32 base = tensor_begin<2>(64);
    if (rank == 0 && t == 0) {
        for (u32 k = 0; k < 4; ++k) {
            const u64 a_tile = tensor_descriptor(smem + 1024 + k * 32, 0, 1024, 2);
            const u64 b_tile = tensor_descriptor(smem + 1024 + M / 2 * 128 + k * 32, 0, 1024, 2);
            tensor_mma<2>(base, a_tile, b_tile, tensor_instruction(M, N), k > 0);
        }
        tensor_commit_multicast<2>(smem, 3);
    }
    mbarrier_wait_cluster(smem, 0, watch);
    tensor_fence_after();
    tensor_dump(out + blockIdx.x * 128 * COLUMNS, base, COLUMNS);
    tensor_end<2>(base, 64);
}"""
)


def multiply(launch: Launch, array: Make, m: int, text: str = MULTIPLY, **options: object) -> tuple[np.ndarray, ...]:
    """(cells of the two CTAs as fp32 `[2, 128, columns]`, `a b^T [m, 32]`)."""
    make = np.random.default_rng(m)
    a, b = (
        (make.integers(-8, 9, (rows, 64)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        for rows in (m, 32)
    )
    columns = 32 if m == 256 else 16
    text = f"constexpr u32 M = {m}, N = 32, COLUMNS = {columns};\n{text}"
    out, record = array(np.full((2, 128, columns), np.nan), np.float32), array(np.full(16, 1 << 60), np.uint64)
    shape = {"grid": 2, "block": 128, "cluster": 2, "smem": 1024 + (m + 32) * 64, "arch": "sm_100a"}
    launch(text, out, array(a), array(b), record, **shape, **options)
    return out, bf16_to_f32(a) @ bf16_to_f32(b).T


def test_pair_of_256_rows_holds_128_in_each_cta(launch: Launch, array: Make, adversary: Adversary) -> None:
    out, expected = multiply(launch, array, 256, adversary=adversary)
    np.testing.assert_array_equal(out.reshape(256, 32), expected)


def test_pair_of_128_rows_holds_the_columns_halves_below_each_other(
    launch: Launch, array: Make, adversary: Adversary
) -> None:
    """Element (m, n) of D: CTA m / 64, lane m % 64 + 64 (n / (N / 2)), column n % (N / 2)."""
    out, expected = multiply(launch, array, 128, adversary=adversary)
    for m in range(128):
        for n in range(32):
            assert out[m // 64, m % 64 + 64 * (n // 16), n % 16] == expected[m, n]


@pytest.mark.parametrize(
    ("old", "new", "kind", "words"),
    [
        ("tensor_commit_multicast<2>(smem, 3)", "tensor_commit<2>(smem)", "deadlock", "waits for parity 0"),
        ("tensor_commit_multicast<2>(smem, 3)", "tensor_commit_multicast<2>(smem, 7)", "out-of-bounds", "rank 2"),
        ("tensor_mma<2>", "tensor_mma<1>", "descriptor", "mixes"),
        (
            "if (rank == 0 && t == 0)",
            "if (t == 0)",
            "pending-write|deadlock|race",
            "still writes|parity 0|nothing orders",
        ),
        ("row < M / 2 ?", "row < M / 2 && rank ? a : row < M / 2 ?", "", ""),
    ],
)
def test_fault_of_a_pair_is_reported(
    launch: Launch, array: Make, adversary: Adversary, old: str, new: str, kind: str, words: str
) -> None:
    assert old in MULTIPLY
    if not kind:
        # wrong data in one CTA is no fault: only the numbers show it
        out, expected = multiply(launch, array, 256, MULTIPLY.replace(old, new), adversary=adversary)
        assert not np.array_equal(out.reshape(256, 32), expected)
        return
    with pytest.raises(Fault, match=words) as found:
        multiply(launch, array, 256, MULTIPLY.replace(old, new), adversary=adversary)
    assert found.value.kind in kind.split("|")


def test_allocation_of_a_pair_needs_both_and_the_same_size(launch: Launch, array: Make, adversary: Adversary) -> None:
    text = f"""{PAIR}(u32* out) {{
        const u32 smem = smem_base();
        if (ALLOCATES) tensor_alloc<2>(smem, COUNT);
        cluster_arrive();
        cluster_wait();
    }}"""
    for allocates, count, kind in (("cluster_ctarank() == 0", "32", "deadlock"), ("1", "32 << cluster_ctarank()", "")):
        source = text.replace("ALLOCATES", allocates).replace("COUNT", count)
        options = {"grid": 2, "cluster": 2, "smem": 1024, "arch": "sm_100a", "adversary": adversary}
        with pytest.raises(Fault, match=r"other CTA of the pair to execute|disagree") as found:
            launch(source, array(np.zeros(1), np.uint32), **options)
        assert found.value.kind == (kind or "tensor-memory")


def test_cta_without_a_pair_is_reported(launch: Launch, array: Make) -> None:
    text = """extern "C" __global__ void kernel_test(u32* out) { tensor_begin<2>(32); }"""
    with pytest.raises(Fault, match="has no pair"):
        launch(text, array(np.zeros(1), np.uint32), smem=1024, arch="sm_100a")


BOX = """extern "C" __global__ void __cluster_dims__(2, 1, 1) kernel_test(
    const __grid_constant__ TensorMap map, u32* out, u64* record, const u16*) {
    const u32 smem = smem_base(), rank = cluster_ctarank();
    const Watch watch{record, 1};
    if (threadIdx.x == 0) mbarrier_init(smem, 1);
    fence_mbarrier_init();
    cluster_arrive();
    cluster_wait();
    if (threadIdx.x == 0) {
        if (rank == 0) mbarrier_arrive_expect_tx(smem, 2 * 1024);
        LOAD(smem + 1024, map, 0, 8 * rank, 0, BARRIER);
    }
    if (rank == 0) mbarrier_wait_cluster(smem, 0, watch);
    cluster_arrive();
    cluster_wait();
    for (u32 i = 0; i < 8; ++i) {
        out[blockIdx.x * 256 + i * 32 + threadIdx.x] = tensor_base(smem + 1024 + i * 128 + threadIdx.x * 4);
    }
}"""


def test_copies_of_a_pair_count_on_the_leaders_barrier(launch: Launch, array: Make, adversary: Adversary) -> None:
    """Bit 24 of a shared address is the parity of the CTA's rank; without it, the barrier is the even CTA's."""
    tensor = array(np.arange(16 * 64), np.uint16)
    record, out = array(np.full(16, 1 << 60), np.uint64), array(np.zeros((2, 8, 32)), np.uint32)
    box = TensorMap("map", tensor.ctypes.data, (64, 16, 1), (128, 2048), (64, 8, 1))
    options = {"grid": 2, "cluster": 2, "smem": 4096, "arch": "sm_100a", "adversary": adversary}
    text = BOX.replace("BARRIER", "smem & 0xFEFFFFFF")
    launch(text.replace("LOAD", "tma_load_3d_pair"), box, out, record, tensor, **options)
    chunks = tensor.reshape(2, 8, 8, 8)
    for cta in range(2):
        got = out[cta].view(np.uint16).reshape(8, 8, 8)
        for row in range(8):
            np.testing.assert_array_equal(got[row, np.arange(8) ^ row], chunks[cta, row])
    with pytest.raises(Fault, match="lie in different CTAs"):
        launch(text.replace("LOAD", "tma_load_3d"), box, out, record, tensor, **options)


def test_multicast_of_a_pair_counts_on_the_leaders_barrier_for_both(
    launch: Launch, array: Make, adversary: Adversary
) -> None:
    """Each CTA sends its box to both: every byte of every destination counts where the barrier's parity says."""
    tensor = array(np.arange(16 * 64), np.uint16)
    record, out = array(np.full(16, 1 << 60), np.uint64), array(np.zeros((2, 8, 32)), np.uint32)
    box = TensorMap("map", tensor.ctypes.data, (64, 16, 1), (128, 2048), (64, 8, 1))
    load = """asm volatile("cp.async.bulk.tensor.3d.cta_group::2.shared::cluster.global.tile"
        ".mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;"
        :: "r"(smem + 1024 + 1024 * rank), "l"(&map), "r"(0), "r"(8 * rank), "r"(0), "r"(smem & 0xFEFFFFFF),
        "h"(static_cast<u16>(3)) : "memory");"""
    text = BOX.replace("LOAD(smem + 1024, map, 0, 8 * rank, 0, BARRIER);", load).replace("2 * 1024", "4 * 1024")
    # each CTA reads what the other one sent
    text = text.replace("tensor_base(smem + 1024 +", "tensor_base(smem + 2048 - 1024 * rank +")
    options = {"grid": 2, "cluster": 2, "smem": 4096, "arch": "sm_100a", "adversary": adversary}
    launch(text, box, out, record, tensor, **options)
    chunks = tensor.reshape(2, 8, 8, 8)
    for cta in range(2):
        got = out[cta].view(np.uint16).reshape(8, 8, 8)
        for row in range(8):
            np.testing.assert_array_equal(got[row, np.arange(8) ^ row], chunks[1 - cta, row])


CANCEL = (
    PAIR
    + """(u32* out, u64* record) {
    const u32 smem = smem_base();
    const Watch watch{record, 1};
    if (threadIdx.x == 0) mbarrier_init(smem, 1);
    fence_mbarrier_init();
    cluster_arrive();
    cluster_wait();
    i32 first = blockIdx.x - cluster_ctarank();
    for (u32 i = 0; first >= 0; ++i) {
        if (threadIdx.x == 0) {
            atomicAdd(out + first + cluster_ctarank(), 1);
            mbarrier_arrive_expect_tx(smem, BYTES);
            if (cluster_ctarank() == 0) try_cancel_multicast(smem + 16, smem);
        }
        mbarrier_wait_cluster(smem, i & 1, watch);
        first = query_cancel(smem + 16);
        // everybody has read the response before the next one lands
        cluster_arrive();
        cluster_wait();
        MORE
    }
}"""
)


def cancel(launch: Launch, array: Make, adversary: Adversary, size: str = "16", more: str = "") -> np.ndarray:
    out, record = array(np.zeros(16), np.uint32), array(np.full(16, 1 << 60), np.uint64)
    text = CANCEL.replace("BYTES", size).replace("MORE", more)
    launch(text, out, record, grid=16, cluster=2, smem=1024, arch="sm_100a", adversary=adversary)
    return out


def test_every_cluster_runs_once_or_is_replaced(launch: Launch, array: Make, adversary: Adversary) -> None:
    assert cancel(launch, array, adversary).tolist() == [1] * 16


def test_requests_are_granted_and_refused(launch: Launch, array: Make) -> None:
    """Alone on the device, a cluster takes all; with all resident, nobody gets anything."""
    counts = []
    for kind in ("early", "late"):
        retired: list[int] = []
        out, record = array(np.zeros(16), np.uint32), array(np.full(16, 1 << 60), np.uint64)
        text = CANCEL.replace("BYTES", "16").replace("MORE", "")
        options = {"grid": 16, "cluster": 2, "smem": 1024, "arch": "sm_100a", "adversary": Adversary(kind)}
        launch(text, out, record, **options, on_retire=lambda done, total, retired=retired: retired.append(done))
        counts.append(len(retired))
    assert counts == [1, 8]


@pytest.mark.parametrize(
    ("size", "more", "kind", "words"),
    [
        ("8", "", "deadlock", "tx -8 bytes"),
        ("16", "if (first < 0) first = 0;", "launch-control", "after it has seen a request fail"),
    ],
)
def test_fault_of_launch_control_is_reported(
    launch: Launch, array: Make, adversary: Adversary, size: str, more: str, kind: str, words: str
) -> None:
    with pytest.raises(Fault, match=words) as found:
        cancel(launch, array, adversary, size, more)
    assert found.value.kind == kind


def test_place_in_a_response_that_granted_none_is_reported(launch: Launch, array: Make) -> None:
    text = (
        CANCEL.replace("BYTES", "16")
        .replace("MORE", "")
        .replace(
            "first = query_cancel(smem + 16);",
            """asm volatile("{ .reg .b128 r; ld.shared.b128 r, [%1];"
            " clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %0, r; }"
            : "=r"(first) : "r"(smem + 16) : "memory");""",
        )
    )
    out, record = array(np.zeros(16), np.uint32), array(np.full(16, 1 << 60), np.uint64)
    with pytest.raises(Fault, match="cancelled nothing") as found:
        launch(text, out, record, grid=16, cluster=2, smem=1024, arch="sm_100a", adversary=Adversary("late"))
    assert found.value.kind == "launch-control"
