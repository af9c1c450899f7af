"""Loads and stores with their hints, scopes and state spaces; special registers (PTX ISA 9.7.9, 10)."""

from __future__ import annotations

import numpy as np
import pytest
from support.emulator.unit_kernels import check_units, run_text, unit

from cakegen.arch import ARCHITECTURES
from cakegen.emulator.faults import Fault
from cakegen.errors import EmulationError

pytestmark = pytest.mark.emulator

HEAD = """.version 9.0
.target {target}
.address_size 64
.visible .entry unit(.param .u64 results, .param .u64 values)
{{
.reg .b64 %rd<20>;
.reg .b32 %r<20>;
.reg .b16 %rs<8>;
.reg .b128 %rq<4>;
.reg .pred %p<8>;
.shared .align 16 .b8 tile[1024];
ld.param.u64 %rd1, [results];
ld.param.u64 %rd2, [values];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd3, %r1, 32;
add.u64 %rd1, %rd1, %rd3;
add.u64 %rd2, %rd2, %rd3;
"""


def run(body: str, *, threads: int = 32, target: str = "sm_100a") -> tuple[np.ndarray, np.ndarray]:
    """Results and values, 32 bytes a thread; `%rd1` and `%rd2` are a thread's own, `%r1` is its number."""
    values = np.random.default_rng(1).integers(0, 1 << 32, (threads, 8)).astype(np.uint32)
    results = np.zeros((threads, 8), np.uint32)
    run_text(HEAD.format(target=target) + body + "\nret;\n}\n", results, values, threads)
    return results, values


LOADS = [
    "ld.global.v4.b32",
    "ld.global.nc.v4.b32",
    "ld.global.nc.L1::no_allocate.L2::256B.v4.b32",
    "ld.global.L1::evict_first.L2::128B.v4.u32",
    "ld.global.ca.v4.s32",
    "ld.volatile.global.v4.b32",
    "ld.weak.global.L2::64B.v4.b32",
    "ld.v4.b32",
    "ld.relaxed.gpu.global.v4.b32",
    "ld.acquire.sys.v4.b32",
    "ld.relaxed.cta.global.L1::no_allocate.v4.b32",
]


@pytest.mark.parametrize("opcode", LOADS)
def test_loads_with_hints_and_scopes_read_the_same(opcode: str) -> None:
    results, values = run(
        f"{opcode} {{%r4, %r5, %r6, %r7}}, [%rd2+16]; st.global.v4.b32 [%rd1+16], {{%r7, %r6, %r5, %r4}};"
    )
    assert (results[:, 4:] == values[:, 7:3:-1]).all()


STORES = [
    "st.global.v4.b32",
    "st.global.cs.v4.b32",
    "st.global.L1::evict_last.v4.b32",
    "st.v4.u32",
    "st.volatile.global.v4.b32",
    "st.relaxed.gpu.global.v4.b32",
    "st.release.gpu.v4.b32",
]


@pytest.mark.parametrize("opcode", STORES)
def test_stores_with_hints_and_scopes_write_the_same(opcode: str) -> None:
    results, values = run(f"ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd2]; {opcode} [%rd1], {{%r7, %r6, %r5, %r4}};")
    assert (results[:, :4] == values[:, 3::-1]).all()


def test_policies_are_made_and_taken_everywhere() -> None:
    results, values = run(
        """
        createpolicy.fractional.L2::evict_last.L2::evict_unchanged.b64 %rd4, 0.25;
        createpolicy.fractional.L2::evict_normal.b64 %rd5;
        createpolicy.range.global.L2::evict_last.L2::evict_first.b64 %rd6, [%rd2], 0x100, 0x200;
        ld.global.L1::evict_first.L2::cache_hint.b64 %rd7, [%rd2], %rd4;
        ld.global.nc.L1::no_allocate.L2::cache_hint.v2.b64 {%rd8, %rd9}, [%rd2+16], %rd6;
        st.global.L2::cache_hint.v2.b64 [%rd1], {%rd7, %rd8}, %rd5;
        prefetch.global.L2::evict_last [%rd2];
        prefetch.global.L1 [%rd2];
        prefetchu.L1 [%rd2];
        applypriority.global.L2::evict_normal [%rd2], 128;
        """
    )
    assert (results[:, :4] == values[:, [0, 1, 4, 5]]).all()


def test_words_of_128_and_256_bits() -> None:
    results, values = run("ld.global.b128 %rq1, [%rd2+16]; st.global.b128 [%rd1], %rq1;")
    assert (results[:, :4] == values[:, 4:]).all()
    names = ", ".join(f"%r{i}" for i in range(8, 16))
    results, values = run(f"ld.global.v8.b32 {{{names}}}, [%rd2]; st.global.v8.b32 [%rd1], {{{names}}};")
    assert (results == values).all()


@pytest.mark.parametrize("kind", ["u8", "s8", "u16", "s16", "u32", "s32", "b32", "f32"])
@pytest.mark.parametrize("strong", ["", ".relaxed.gpu"])
def test_narrow_loads_extend(kind: str, strong: str) -> None:
    results, values = run(f"ld{strong}.global.{kind} %r4, [%rd2+4]; st.global.b32 [%rd1], %r4;")
    letter = {"s": "i", "f": "u", "b": "u", "u": "u"}[kind[0]]
    size = int(kind[1:]) // 8
    wanted = values.view(f"{letter}{size}")[:, 4 // size].astype(f"{letter}4").view(np.uint32)
    assert (results[:, 0] == wanted).all()


@pytest.mark.parametrize("space", ["shared", "shared::cta", "shared::cluster", "generic"])
def test_strong_accesses_of_shared_memory_hand_a_word_over(space: str) -> None:
    """Thread 0 releases; a thread of the other warp that acquires its flag sees what was written before."""
    parts = "" if space == "generic" else f".{space}"
    address = "%rd4" if space == "generic" else "%r3"
    results, _ = run(
        f"""
        mov.u32 %r3, tile;
        mov.u32 %r7, 0;
        cvt.u64.u32 %rd4, %r3;
        cvta.shared.u64 %rd4, %rd4;
        setp.eq.u32 %p1, %r1, 0;
        @%p1 st.shared.b32 [%r3], 0;
        bar.sync 0;
        @!%p1 bra OTHER;
        st.shared.b32 [%r3+16], 77;
        st.release.cta{parts}.b32 [{address}], 5;
        bra DONE;
        OTHER:
        setp.ne.u32 %p2, %r1, 40;
        @%p2 bra DONE;
        WAIT:
        ld.acquire.cta{parts}.b32 %r5, [{address}];
        setp.ne.u32 %p3, %r5, 5;
        @%p3 bra WAIT;
        ld.shared.b32 %r7, [%r3+16];
        DONE:
        st.global.b32 [%rd1], %r7;
        """,
        threads=64,
    )
    assert np.flatnonzero(results[:, 0]).tolist() == [40]
    assert results[40, 0] == 77


def test_relaxed_load_of_shared_memory_orders_nothing() -> None:
    with pytest.raises(Fault) as found:
        run(
            """
            mov.u32 %r3, tile;
            setp.eq.u32 %p1, %r1, 0;
            @%p1 st.shared.b32 [%r3], 0;
            bar.sync 0;
            @!%p1 bra OTHER;
            st.shared.b32 [%r3+16], 77;
            st.relaxed.cta.shared.b32 [%r3], 5;
            bra DONE;
            OTHER:
            setp.ne.u32 %p2, %r1, 40;
            @%p2 bra DONE;
            WAIT:
            ld.relaxed.cta.shared.b32 %r5, [%r3];
            setp.ne.u32 %p3, %r5, 5;
            @%p3 bra WAIT;
            ld.shared.b32 %r7, [%r3+16];
            DONE:
            """,
            threads=64,
        )
    assert found.value.kind == "race"


@pytest.mark.parametrize(
    "line",
    [
        "ld.global.L3::evict_first.b32 %r4, [%rd2]",
        "ld.global.L2::cache_hint.b32 %r4, [%rd2]",
        "ld.relaxed.gpu.local.b32 %r4, [%rd2]",
        "createpolicy.whole.L2::evict_first.b64 %rd4",
        "mov.u32 %r4, %pm0",
    ],
)
def test_access_form_that_is_none_is_refused_with_its_line(line: str) -> None:
    with pytest.raises(EmulationError, match=r"PTX line \d+.*is not modelled|special register %pm0 is not modelled"):
        run(f"{line};")


def test_special_registers_of_lanes_and_launches() -> None:
    lane = np.tile(np.arange(32, dtype=np.uint64), 2)
    masks = {
        "lanemask_eq": np.uint64(1) << lane,
        "lanemask_lt": (np.uint64(1) << lane) - np.uint64(1),
        "lanemask_le": (np.uint64(2) << lane) - np.uint64(1),
        "lanemask_gt": np.uint64(0xFFFFFFFE) << lane & np.uint64(0xFFFFFFFF),
        "lanemask_ge": np.uint64(0xFFFFFFFF) << lane & np.uint64(0xFFFFFFFF),
        "laneid": lane,
        "warpid": np.arange(64, dtype=np.uint64) // np.uint64(32),
        "tid.x": np.arange(64, dtype=np.uint64),
        "ntid.x": np.full(64, 64, np.uint64),
        "nsmid": np.full(64, max(part.sm_count for part in ARCHITECTURES["sm_100a"].parts), np.uint64),
        "dynamic_smem_size": np.zeros(64, np.uint64),
    }
    constants = {"nclusterid.y": 1, "clusterid.x": 0, "cluster_nctarank": 1, "ctaid.z": 0, "smid": 0}
    masks |= {name: np.full(64, value, np.uint64) for name, value in constants.items()}
    check_units([unit("mov.u32", f"%{name}", gives=values.astype(np.uint32)) for name, values in masks.items()])


CLUSTERS = """.version 9.0
.target sm_90a
.address_size 64
.visible .entry unit(.param .u64 results, .param .u64 values)
.reqnctapercluster 2, 1, 1
{
.reg .b64 %rd<8>;
.reg .b32 %r<8>;
.reg .pred %p1;
ld.param.u64 %rd1, [results];
mov.u32 %r1, %ctaid.x;
mul.wide.u32 %rd2, %r1, 32;
add.u64 %rd1, %rd1, %rd2;
mov.u32 %r2, %clusterid.x;
mov.u32 %r3, %nclusterid.x;
mov.u32 %r4, %smid;
mov.u32 %r5, %cluster_ctaid.x;
st.global.v4.b32 [%rd1], {%r2, %r3, %r4, %r5};
ret;
}
"""


def test_special_registers_of_clusters() -> None:
    results = np.zeros((6, 8), np.uint32)
    run_text(CLUSTERS, results, np.zeros(1, np.uint64), 32, grid=6, cluster=2)
    assert results[:, :4].tolist() == [[cta // 2, 3, cta, cta % 2] for cta in range(6)]


def test_clocks_go_on_and_their_halves_belong_together() -> None:
    results, _ = run(
        """
        mov.u64 %rd4, %clock64;
        mov.u32 %r4, %clock;
        mov.u32 %r5, %clock_hi;
        mov.u64 %rd5, %globaltimer;
        mov.u32 %r6, %globaltimer_hi;
        st.global.v2.b64 [%rd1], {%rd4, %rd5};
        st.global.v4.b32 [%rd1+16], {%r4, %r5, %r6, %r6};
        """
    )
    first, timer = results[0, :4].copy().view(np.uint64)
    assert 0 < first < results[0, 4] < timer
    assert results[0, 5:].tolist() == [0, 0, 0]
