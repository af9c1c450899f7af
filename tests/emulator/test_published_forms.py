"""Forms and habits of published kernels that the generated programs do not have."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.machine import Machine

pytestmark = pytest.mark.emulator

Launch = Callable[..., Machine]
Make = Callable[..., np.ndarray]
KERNEL = 'extern "C" __global__ void kernel_test'


def test_stmatrix_takes_its_qualifiers_in_either_order(launch: Launch, array: Make) -> None:
    source = f"""{KERNEL}(u32* out) {{
        const u32 smem = smem_base(), lane = threadIdx.x;
        asm volatile("stmatrix.sync.aligned.x2.m8n8.shared.b16 [%0], {{%1, %2}};"
                     :: "r"(smem + lane % 16 * 16), "r"(lane), "r"(lane + 100) : "memory");
        warp_sync();
        for (u32 i = 0; i < 2; ++i) {{
            u32 found;
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(found) : "r"(smem + i * 128 + lane * 4) : "memory");
            out[i * 32 + lane] = found;
        }}
    }}"""
    out = array(np.zeros(64), np.uint32)
    launch(source, out, smem=512)
    assert out.tolist() == [*range(32), *range(100, 132)]


@pytest.mark.parametrize("accumulate", [0, 1])
def test_wgmma_reads_its_scale_from_a_predicate(launch: Launch, array: Make, accumulate: int) -> None:
    """PTX ISA 9.7.15.5: `scale-d` false is a product without the accumulator."""
    source = f"""{KERNEL}(float* out, u32 accumulate) {{
        const u32 smem = smem_base() + 1023 & ~1023u, t = threadIdx.x;
        // 64 rows of A and 8 of B: 1.0 in column 0
        for (u32 i = t; i < 576; i += 128) st_shared_v4(smem + i * 16, Vec4{{0, 0, 0, 0}});
        __syncthreads();
        for (u32 row = t; row < 72; row += 128)
            asm volatile("st.shared.u16 [%0], %1;"
                         :: "r"(smem + row * 128 + row % 8 * 16), "h"((u16)0x3f80) : "memory");
        fence_proxy_async_shared();
        __syncthreads();
        float d[4] = {{3, 3, 3, 3}};
        wgmma_pin(d);
        wgmma_fence();
        asm volatile(
            "{{ .reg .pred p; setp.ne.b32 p, %6, 0;"
            " wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%0, %1, %2, %3}}, %4, %5, p, 1, 1, 0, 0; }}"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "l"(wgmma_descriptor(smem)), "l"(wgmma_descriptor(smem + 8192)), "r"(accumulate)
            : "memory");
        wgmma_commit_group();
        wgmma_wait_group<0>();
        wgmma_pin(d);
        for (u32 i = 0; i < 4; ++i) out[t * 4 + i] = d[i];
    }}"""
    out = array(np.zeros(512), np.float32)
    launch(source, out, accumulate, block=128, smem=16384)
    assert set(out.tolist()) == {3.0 * accumulate + 1.0}


@pytest.mark.parametrize(("strict", "columns"), [(True, 480), (False, 0)])
def test_a_first_allocation_of_tensor_memory_lies_at_column_zero_in_practice(
    launch: Launch, array: Make, strict: bool, columns: int
) -> None:
    source = f"""{KERNEL}(u32* out) {{
        const u32 base = tensor_begin(32);
        if (threadIdx.x == 0) out[0] = base;
        tensor_end(base, 32);
    }}"""
    out = array(np.zeros(4), np.uint32)
    launch(source, out, smem=64, arch="sm_100a", strict_tensor_order=strict, adversary=Adversary("late"))
    assert out[0] == columns


def test_commit_by_a_shared_address_without_its_state_space(launch: Launch, array: Make) -> None:
    """A generic address is wanted (PTX ISA 9.7.16.12); ThunderKittens passes a shared one, which a device takes."""
    source = f"""{KERNEL}(u32* out, u64* record) {{
        const u32 base = tensor_begin(32), smem = smem_base();
        const Watch watch{{record, 1}};
        if (threadIdx.x == 0)
            asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%0];" :: "l"((u64)smem) : "memory");
        mbarrier_wait(smem, 0, watch);
        if (threadIdx.x == 0) out[0] = 7;
        tensor_end(base, 32);
    }}"""
    out, record = array(np.zeros(4), np.uint32), array(np.full(16, 1 << 60), np.uint64)
    options = {"smem": 64, "arch": "sm_100a"}
    with pytest.raises(Fault, match="takes a generic address"):
        launch(source, out, record, **options)
    launch(source, out, record, **options, strict_tensor_order=False)
    assert out[0] == 7
