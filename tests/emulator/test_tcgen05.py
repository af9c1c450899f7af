"""tcgen05 of one CTA, from small CUDA kernels through NVRTC; expected values from the text of PTX ISA 9.7.16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.units.tensor_core import bf16_to_f32

Launch = Callable[..., Machine]
Make = Callable[..., np.ndarray]

SCHEDULES = [("early", 0), ("late", 0), ("random", 1), ("random", 2), ("random", 3)]
KERNEL = 'extern "C" __global__ void kernel_test'
WATCH = np.full(16, 1 << 60)

# Barrier 0 of shared memory is for commits; the address of tensor memory is at 8; operands from 1024 on.
SETUP = """
    const u32 smem = smem_base(), t = threadIdx.x, warp = t / 32, lane = t % 32;
    const Watch watch{record, 1};
    if (t == 0) mbarrier_init(smem, 1);
    if (warp == 0) tensor_alloc<1>(smem + 8, COLUMNS);
    tensor_fence_before();
    fence_proxy_async_shared();
    __syncthreads();
    tensor_fence_after();
    u32 base;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(base) : "r"(smem + 8) : "memory");
"""
TEARDOWN = """
    tensor_fence_before();
    __syncthreads();
    tensor_fence_after();
    if (warp == 0) {
        tensor_relinquish<1>();
        tensor_dealloc<1>(base, COLUMNS);
    }
"""
# K-major tiles with the 128-byte swizzle: 64 columns of bf16 a row, A's rows first.
STAGE = """
    for (u32 i = threadIdx.x; i < (M + N) * 8; i += 128) {
        const u32 offset = i * 16;
        const u16* from = i < M * 8 ? a + i * 8 : b + (i - M * 8) * 8;
        st_shared_v4(smem_base() + 1024 + (offset ^ ((offset >> 7 & 7) << 4)), ld_global_v4(from));
    }
"""
ISSUE = """
    if (t == 0) {
        for (u32 k = 0; k < 4; ++k) {
            const u64 a_tile = tensor_descriptor(smem + 1024 + k * 32, 0, 1024, 2);
            const u64 b_tile = tensor_descriptor(smem + 1024 + M * 128 + k * 32, 0, 1024, 2);
            tensor_mma<1>(base, a_tile, b_tile, tensor_instruction(M, N), k > 0);
        }
        tensor_commit<1>(smem);
    }
"""
WAIT = """
    mbarrier_wait(smem, 0, watch);
    tensor_fence_after();
"""
# Lane of tensor memory = row, 8 columns at a time.
READ = """
    for (u32 n = 0; n < N; n += 8) {
        u32 r[8];
        tensor_load_32x32b_x8(r, base + (warp * 32 << 16) + n);
        tensor_wait_loads();
        for (u32 i = 0; i < 8; ++i) out[t * N + n + i] = __uint_as_float(r[i]);
    }
"""


def kernel(*body: str, m: int = 128, n: int = 32, columns: int = 32) -> str:
    return (
        f"constexpr u32 M = {m}, N = {n}, COLUMNS = {columns};\n"
        f"{KERNEL}(float* out, const u16* a, const u16* b, u64* record) {{{''.join(body)}}}"
    )


def bf16(make: np.random.Generator, rows: int, columns: int = 64) -> np.ndarray:
    """Small integers, so that every sum is exact."""
    values = make.integers(-8, 9, (rows, columns)).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


@pytest.fixture(params=SCHEDULES, ids=lambda value: f"{value[0]}{value[1]}")
def adversary(request: pytest.FixtureRequest) -> Adversary:
    return Adversary(*request.param)


def run(launch: Launch, array: Make, source: str, m: int, n: int, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """(`out [128, n]`, `a b^T [m, n]`) of a kernel on random operands."""
    make = np.random.default_rng(m + n)
    a, b = bf16(make, m), bf16(make, n)
    out = array(np.full((128, n), np.nan), np.float32)
    smem = 1024 + (m + n) * 128
    launch(source, out, array(a), array(b), array(WATCH, np.uint64), block=128, smem=smem, arch="sm_100a", **options)
    return out, bf16_to_f32(a) @ bf16_to_f32(b).T


@pytest.mark.parametrize("n", [8, 32, 256])
def test_mma_of_128_rows_fills_every_lane(launch: Launch, array: Make, adversary: Adversary, n: int) -> None:
    source = kernel(STAGE, SETUP, ISSUE, WAIT, READ, TEARDOWN, n=n, columns=max(32, n))
    out, expected = run(launch, array, source, 128, n, adversary=adversary)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("a_half", "b_half"), [(True, True), (True, False), (False, True)])
def test_mma_of_f16_operands(launch: Launch, array: Make, a_half: bool, b_half: bool) -> None:
    """Types of A and B are bits 7 to 9 and 10 to 12 of the instruction descriptor: 0 is f16, 1 bf16 (9.7.16.4.2)."""
    cleared = (a_half << 7) + (b_half << 10)
    issue = ISSUE.replace("tensor_instruction(M, N)", f"(tensor_instruction(M, N) & ~{cleared}u)")
    source = kernel(STAGE, SETUP, issue, WAIT, READ, TEARDOWN, n=32)
    make = np.random.default_rng(1)
    values = [make.integers(-8, 9, (rows, 64)).astype(np.float32) for rows in (128, 32)]
    a, b = (
        array(each.astype(np.float16).view(np.uint16) if half else (each.view(np.uint32) >> 16).astype(np.uint16))
        for each, half in zip(values, (a_half, b_half), strict=True)
    )
    out = array(np.full((128, 32), np.nan), np.float32)
    launch(source, out, a, b, array(WATCH, np.uint64), block=128, smem=1024 + 160 * 128, arch="sm_100a")
    np.testing.assert_array_equal(out, values[0] @ values[1].T)


@pytest.mark.parametrize("half", [0, 16])
def test_mma_of_64_rows_fills_half_of_each_quadrant(
    launch: Launch, array: Make, adversary: Adversary, half: int
) -> None:
    """Row m lies in lane m % 16 + 32 (m / 16), or 16 lanes further; 16x256b reads it as a matrix fragment."""
    issue = ISSUE.replace("tensor_mma<1>(base,", f"tensor_mma<1>(base + ({half} << 16),")
    read = f"""
        for (u32 n = 0; n < N; n += 8) {{
            u32 r[4];
            tensor_load_16x256b_x1(r, base + (warp * 32 + {half} << 16) + n);
            tensor_wait_loads();
            for (u32 i = 0; i < 4; ++i) {{
                const u32 row = warp * 16 + lane / 4 + 8 * (i >> 1), column = n + 2 * (lane % 4) + (i & 1);
                out[row * N + column] = __uint_as_float(r[i]);
            }}
        }}"""
    source = kernel(STAGE, SETUP, issue, WAIT, read, TEARDOWN, m=64, n=16)
    out, expected = run(launch, array, source, 64, 16, adversary=adversary)
    np.testing.assert_array_equal(out[:64], expected)
    assert np.isnan(out[64:]).all()


def test_whole_quadrant_load_of_64_rows_gets_poison_for_the_other_half(launch: Launch, array: Make) -> None:
    out, expected = run(launch, array, kernel(STAGE, SETUP, ISSUE, WAIT, READ, TEARDOWN, m=64, n=16), 64, 16)
    rows = out.reshape(4, 32, 16)
    np.testing.assert_array_equal(rows[:, :16].reshape(64, 16), expected)
    assert np.isnan(rows[:, 16:]).all()


GENERIC = """
    if (t == 0) {
        for (u32 k = 0; k < 4; ++k) {
            const u64 a_tile = tensor_descriptor(smem + 1024 + k * 32, 0, 1024, 2);
            const u64 b_tile = tensor_descriptor(smem + 1024 + M * 128 + k * 32, 0, 1024, 2);
            asm volatile("{ .reg .pred p; setp.eq.u32 p, %4, 0;"
                " tcgen05.mma.cta_group::1.kind::f16.collector::a::discard [%0+0], %1, %2, %3, !p; }"
                :: "r"(base), "l"(a_tile), "l"(b_tile), "r"(tensor_instruction(M, N)), "r"(k) : "memory");
        }
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%0];" :: "l"(dynamic_smem) : "memory");
    }
"""


def test_other_spellings_mean_the_same(launch: Launch, array: Make, adversary: Adversary) -> None:
    """A negated predicate, a collector, a generic address of the barrier, a generic address of the result."""
    setup = SETUP.replace(
        "tensor_alloc<1>(smem + 8, COLUMNS);",
        'asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.b32 [%0], 32;" :: "l"(dynamic_smem + 8) : "memory");',
    )
    out, expected = run(
        launch, array, kernel(STAGE, setup, GENERIC, WAIT, READ, TEARDOWN), 128, 32, adversary=adversary
    )
    np.testing.assert_array_equal(out, expected)


# What each fault needs: the kernel's parts with one of them changed, the kind, and words of the report.
NO_AFTER = WAIT.replace("tensor_fence_after();", "")
FAULTS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "load before the commit's barrier": (
        (STAGE, SETUP, ISSUE, READ, TEARDOWN),
        "fence|pending-write|unwritten-read",
        "tcgen05.ld",
    ),
    "no commit": (
        (STAGE, SETUP, ISSUE.replace("tensor_commit<1>(smem);", "mbarrier_arrive(smem);"), WAIT, READ, TEARDOWN),
        "pending-write",
        "no tcgen05.commit of the thread that issued it",
    ),
    "commit by another thread": (
        (
            STAGE,
            SETUP,
            ISSUE.replace("tensor_commit<1>(smem);", "") + "if (t == 33) tensor_commit<1>(smem);",
            WAIT,
            READ,
            TEARDOWN,
        ),
        "pending-write|unwritten-read",
        "tcgen05.ld",
    ),
    "mma of the own warp that nothing waits for": (
        (STAGE, SETUP, ISSUE, "if (warp == 0) {", READ, "}", TEARDOWN),
        "race|pending-write",
        "tcgen05.ld touches",
    ),
    "columns freed with an mma of the own warp that nothing waits for": (
        (STAGE, SETUP, ISSUE, TEARDOWN),
        "race|pending-write",
        "tcgen05.dealloc",
    ),
    "every lane issues": (
        (STAGE, SETUP, ISSUE.replace("if (t == 0)", "if (warp == 0)"), WAIT, READ, TEARDOWN),
        "pending-write",
        "tcgen05.mma",
    ),
    "first mma accumulates": (
        (STAGE, SETUP, ISSUE.replace("k > 0", "1"), WAIT, READ, TEARDOWN),
        "unwritten-read",
        "enable-input-d",
    ),
    "no fence after the wait": ((STAGE, SETUP, ISSUE, NO_AFTER, READ, TEARDOWN), "fence", "after_thread_sync"),
    "wrong quadrant": (
        (STAGE, SETUP, ISSUE, WAIT, READ.replace("warp * 32", "(warp ^ 1) * 32"), TEARDOWN),
        "tensor-memory",
        "may touch lanes",
    ),
    "read outside of the allocation": (
        (STAGE, SETUP, ISSUE, WAIT, READ.replace("+ n)", "+ n + 8)"), TEARDOWN),
        "out-of-bounds",
        "columns",
    ),
    "not freed": (
        (STAGE, SETUP, ISSUE, WAIT, READ, TEARDOWN.replace("tensor_dealloc<1>(base, COLUMNS);", "")),
        "tensor-memory",
        "without tcgen05.dealloc",
    ),
    "freed with another size": (
        (STAGE, SETUP, ISSUE, WAIT, READ, TEARDOWN.replace("(base, COLUMNS)", "(base, 64)")),
        "tensor-memory",
        "allocated: 32 columns",
    ),
    "allocation after the permit was given back": (
        (
            STAGE,
            SETUP.replace(
                "tensor_alloc<1>(smem + 8, COLUMNS);", "{ tensor_relinquish<1>(); tensor_alloc<1>(smem + 8, COLUMNS); }"
            ),
            TEARDOWN,
        ),
        "tensor-memory",
        "permit",
    ),
    "49 columns": ((SETUP.replace("COLUMNS", "49"),), "tensor-memory", "49 columns"),
    "load that nothing waits for": (
        (STAGE, SETUP, ISSUE, WAIT, READ.replace("tensor_wait_loads();", ""), TEARDOWN),
        "pending-write",
        "tcgen05.ld's register",
    ),
    "operand refilled too soon": (
        (
            STAGE,
            SETUP,
            ISSUE.replace("tensor_commit<1>(smem);", "st_shared_v4(smem + 1024, Vec4{}); tensor_commit<1>(smem);"),
            WAIT,
            READ,
            TEARDOWN,
        ),
        "pending-read",
        "still read",
    ),
    "operand written without a proxy fence": (
        (STAGE, SETUP.replace("fence_proxy_async_shared();", ""), ISSUE, WAIT, READ, TEARDOWN),
        "proxy",
        "no fence.proxy.async",
    ),
    "operand written by others without a barrier": (
        (SETUP, STAGE, "fence_proxy_async_shared();", ISSUE, WAIT, READ, TEARDOWN),
        "race|unwritten-read",
        "shared offset",
    ),
    "operand that nothing wrote": ((SETUP, ISSUE, WAIT, READ, TEARDOWN), "unwritten-read", "tcgen05.mma"),
    "descriptor of the generation before": (
        (STAGE, SETUP, ISSUE.replace("0, 1024, 2)", "0, 1024, 2) & ~(1ull << 46)"), WAIT, READ, TEARDOWN),
        "descriptor",
        "0b001",
    ),
    "swizzle code 3": (
        (STAGE, SETUP, ISSUE.replace("0, 1024, 2)", "0, 1024, 3)"), WAIT, READ, TEARDOWN),
        "descriptor",
        "does not exist",
    ),
    "K step that leaves the row": (
        (STAGE, SETUP, ISSUE.replace("k * 32", "k * 64"), WAIT, READ, TEARDOWN),
        "descriptor",
        "starts in row 0",
    ),
    "operand outside of shared memory": (
        (STAGE, SETUP, ISSUE.replace("smem + 1024 + M * 128", "smem + 2048 + M * 128"), WAIT, READ, TEARDOWN),
        "descriptor",
        "operand b",
    ),
    "M 256 for one CTA": (
        (STAGE, SETUP, ISSUE.replace("tensor_instruction(M, N)", "tensor_instruction(256, N)"), WAIT, READ, TEARDOWN),
        "descriptor",
        "M 256",
    ),
    "reserved bit of the instruction descriptor": (
        (
            STAGE,
            SETUP,
            ISSUE.replace("tensor_instruction(M, N)", "tensor_instruction(M, N) | 64"),
            WAIT,
            READ,
            TEARDOWN,
        ),
        "descriptor",
        "no use for",
    ),
    "accumulator at lane 16": (
        (STAGE, SETUP, ISSUE.replace("(base,", "(base + (16 << 16),"), WAIT, READ, TEARDOWN),
        "descriptor",
        "lane 16",
    ),
    "accumulator outside of the allocation": (
        (STAGE, SETUP, ISSUE.replace("(base,", "(base + 8,"), WAIT, READ, TEARDOWN),
        "out-of-bounds",
        "tcgen05.mma",
    ),
    "N larger than what is allocated": (
        (STAGE, SETUP, ISSUE.replace("tensor_instruction(M, N)", "tensor_instruction(M, 64)"), WAIT, READ, TEARDOWN),
        "out-of-bounds",
        "tcgen05.mma",
    ),
    "commit to no barrier": (
        (STAGE, SETUP, ISSUE.replace("tensor_commit<1>(smem)", "tensor_commit<1>(smem + 16)"), WAIT, READ, TEARDOWN),
        "barrier",
        "no mbarrier lives",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_reported_under_every_schedule(launch: Launch, array: Make, adversary: Adversary, fault: str) -> None:
    body, kinds, words = FAULTS[fault]
    with pytest.raises(Fault, match=words) as found:
        run(launch, array, kernel(*body), 128, 32, adversary=adversary)
    assert found.value.kind in kinds.split("|")
    assert found.value.where is not None or found.value.kind in ("exit", "tensor-memory")
