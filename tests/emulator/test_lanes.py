"""Lanes of a warp: member masks, stores that meet, instructions that want all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cakegen.emulator import Fault
from cakegen.emulator.machine.machine import Machine
from cakegen.errors import EmulationError

Launch = Callable[..., Machine]
Make = Callable[..., np.ndarray]

KERNEL = 'extern "C" __global__ void kernel_test'
WRAPPERS = """
#define ASM(...) asm volatile(__VA_ARGS__)
__device__ u32 shuffle_of(u32 value, u32 source, u32 members) {
    u32 got;
    ASM("shfl.sync.idx.b32 %0, %1, %2, 31, %3;" : "=r"(got) : "r"(value), "r"(source), "r"(members));
    return got;
}
__device__ u32 ballot_of(u32 bit, u32 members) {
    u32 got;
    ASM("{ .reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, p, %2; }" : "=r"(got) : "r"(bit), "r"(members));
    return got;
}
__device__ u32 any_of(u32 bit, u32 members) {
    u32 got;
    ASM("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; vote.sync.any.pred q, p, %2; selp.u32 %0, 1, 0, q; }"
        : "=r"(got) : "r"(bit), "r"(members));
    return got;
}
__device__ u32 all_of(u32 bit, u32 members) {
    u32 got;
    ASM("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; vote.sync.all.pred q, p, %2; selp.u32 %0, 1, 0, q; }"
        : "=r"(got) : "r"(bit), "r"(members));
    return got;
}
__device__ u32 elected_of(u32 members) {
    u32 got;
    ASM("{ .reg .pred p; elect.sync %0|p, %1; }" : "=r"(got) : "r"(members));
    return got;
}
__device__ void sync_of(u32 members) { ASM("bar.warp.sync %0;" :: "r"(members) : "memory"); }
"""

# PTX ISA 9.7.9.6, 9.7.13.9, 9.7.13.15, 9.7.13.2: undefined where the executing lane is not in its mask.
COLLECTIVES = {
    "shfl": "out[t] = shuffle_of(t, 1, MEMBERS);",
    "ballot": "out[t] = ballot_of(t & 1, MEMBERS);",
    "any": "out[t] = any_of(t & 1, MEMBERS);",
    "all": "out[t] = all_of(t & 1, MEMBERS);",
    "elect": "out[t] = elected_of(MEMBERS);",
    "bar.warp": "sync_of(MEMBERS); out[t] = 1;",
}


def run(launch: Launch, array: Make, body: str, **options: Any) -> np.ndarray:
    out = array(np.zeros(64), np.uint32)
    launch(f"{WRAPPERS}{KERNEL}(u32* out) {{ const u32 t = threadIdx.x; {body} }}", out, **options)
    return out


@pytest.mark.parametrize("name", COLLECTIVES)
def test_lane_outside_of_its_member_mask_is_a_fault(launch: Launch, array: Make, name: str) -> None:
    body = COLLECTIVES[name]
    run(launch, array, body.replace("MEMBERS", "~0u"))
    with pytest.raises(Fault, match="a lane executes it that its member mask 0xffff leaves out") as caught:
        run(launch, array, body.replace("MEMBERS", "0xffffu"))
    assert caught.value.kind == "divergence"


@pytest.mark.parametrize("name", COLLECTIVES)
def test_lanes_that_branch_around_a_collective_are_missed(launch: Launch, array: Make, name: str) -> None:
    with pytest.raises(Fault) as caught:
        run(launch, array, f"if (t < 16) {{ {COLLECTIVES[name].replace('MEMBERS', '~0u')} }} sync_of(~0u);")
    assert caught.value.kind == "divergence"


def test_guarded_collective_that_some_named_lanes_skip_is_a_fault(launch: Launch, array: Make) -> None:
    body = """u32 got = 0;
        ASM("{ .reg .pred p, q; setp.lt.u32 p, %1, 16; @p vote.sync.ballot.b32 %0, p, -1; }" : "+r"(got) : "r"(t));
        out[t] = got;"""
    with pytest.raises(Fault, match="does not execute it") as caught:
        run(launch, array, body)
    assert caught.value.kind == "divergence"


def test_halves_of_a_warp_work_on_their_own(launch: Launch, array: Make) -> None:
    """Each half names itself, and all lanes are at one instruction."""
    body = """const u32 members = t < 16 ? 0xffffu : 0xffff0000u;
        out[t] = shuffle_of(t, t < 16 ? 3 : 20, members) + ballot_of(t % 4 == 0, members);
        out[32 + t] = any_of(t == 5, members) + 2 * all_of(t >= 16, members);"""
    out = run(launch, array, body)
    assert out[:32].tolist() == [3 + 0x1111] * 16 + [20 + 0x11110000] * 16
    assert out[32:].tolist() == [1] * 16 + [2] * 16


def test_shuffle_from_the_other_half_is_a_fault(launch: Launch, array: Make) -> None:
    with pytest.raises(Fault, match="reads a lane that does not execute it"):
        run(launch, array, "out[t] = shuffle_of(t, 3, t < 16 ? 0xffffu : 0xffff0000u);")


def test_lanes_that_name_each_other_with_different_masks_are_a_fault(launch: Launch, array: Make) -> None:
    with pytest.raises(Fault, match="different member masks"):
        run(launch, array, "out[t] = ballot_of(1, t < 16 ? ~0u : 0xffff0000u);")


@pytest.mark.parametrize("space", ["global", "shared"])
def test_lanes_that_store_different_values_to_one_place_are_a_race(launch: Launch, array: Make, space: str) -> None:
    """Equal values are none to worry about; of strong stores one stays."""
    at = '"l"(out + t / 2)' if space == "global" else '"r"(smem_base() + t / 2 * 4)'
    body = f'ASM("st.{space}.u32 [%0], %1;" :: {at}, "r"(VALUE) : "memory");'
    run(launch, array, body.replace("VALUE", "t / 2"), smem=1024)
    run(launch, array, body.replace("VALUE", "t").replace("st.", "st.volatile."), smem=1024)
    with pytest.raises(Fault, match="two lanes of one store write different values") as caught:
        run(launch, array, body.replace("VALUE", "t"), smem=1024)
    assert caught.value.kind == "race"


def test_warp_that_leaves_its_warpgroup_alone_is_a_fault(launch: Launch, array: Make) -> None:
    """PTX ISA 9.7.15.5: all warps of a warpgroup execute the same wgmma."""
    body = """const u32 at = smem_base() + 1024;
        for (u32 i = t; i < 1024; i += 128) st_shared_v4(at + i * 16, Vec4{0, 0, 0, 0});
        fence_proxy_async_shared();
        __syncthreads();
        if (t < LAST) {
            float d[4] = {0, 0, 0, 0};
            wgmma_pin(d);
            wgmma_fence();
            wgmma_m64_k16<8>(d, wgmma_descriptor(at), wgmma_descriptor(at + 8192));
            wgmma_commit_group();
            wgmma_wait_group<0>();
            wgmma_pin(d);
            if (t < 64) out[t] = d[0];
        }"""
    run(launch, array, body.replace("LAST", "128"), block=128, smem=18432)
    with pytest.raises(Fault, match="not all warps of warpgroup 0 issued its wgmma number 0"):
        run(launch, array, body.replace("LAST", "96"), block=128, smem=18432)


def test_wgmma_by_a_part_of_a_warp_is_a_fault(launch: Launch, array: Make) -> None:
    with pytest.raises(Fault, match=r"wgmma.fence.sync.aligned by a part of the warp"):
        run(launch, array, "if (t == 5) return; wgmma_fence(); out[t] = 1;")


def test_barrier_of_a_cluster_under_a_guard_of_some_lanes_is_a_fault(launch: Launch, array: Make) -> None:
    body = 'ASM("{ .reg .pred p; setp.lt.u32 p, %0, 16; @p barrier.cluster.arrive.release; }" :: "r"(t) : "memory");'
    with pytest.raises(Fault, match=r"divergence: barrier\.cluster\.arrive\.release by a part of the warp"):
        run(launch, array, body, grid=2, cluster=2)


def test_barrier_whose_number_differs_between_lanes_is_a_fault(launch: Launch, array: Make) -> None:
    with pytest.raises(Fault, match="disagree on the number of a barrier"):
        run(launch, array, 'ASM("bar.sync %0, 32;" :: "r"(1 + t % 2) : "memory"); out[t] = 1;')


def test_constant_load_of_what_the_launch_wrote_is_a_race(launch: Launch, array: Make) -> None:
    """`ld.global.nc` may find a stale line (PTX ISA 9.7.9.9)."""
    body = """FIRST __syncthreads();
        u32 got;
        ASM("ld.global.nc.u32 %0, [%1];" : "=r"(got) : "l"(out + t) : "memory");
        out[32 + t] = got;"""
    run(launch, array, body.replace("FIRST", ""))
    with pytest.raises(Fault, match=r"ld.global.nc of argument 0 \+ 0, which this launch has written"):
        run(launch, array, body.replace("FIRST", "out[t] = t;"))


@pytest.mark.parametrize("form", ["arrive.release.cluster.shared::cluster.b64", "arrive_drop.shared::cluster.b64"])
def test_arrival_at_another_cta_returns_no_state(launch: Launch, array: Make, form: str) -> None:
    """PTX ISA 9.7.13.15.13: such a form has the sink for its state."""
    body = f"""const u32 at = smem_base();
        if (t == 0) mbarrier_init(at, 2);
        __syncthreads();
        u64 state;
        if (t == 0) ASM("mbarrier.{form} %0, [%1];" : "=l"(state) : "r"(at) : "memory");
        out[t] = 0;"""
    with pytest.raises(EmulationError, match="not modelled"):
        run(launch, array, body, smem=1024)
