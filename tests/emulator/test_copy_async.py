"""`cp.async`, its groups and its arrivals at mbarriers (PTX ISA 9.7.9.25.3, 9.7.13.15.17)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.trace.recorder import Trace

pytestmark = pytest.mark.emulator

Launch = Callable[..., Machine]
Make = Callable[..., np.ndarray]

SCHEDULES = [("early", 0), ("late", 0), ("random", 0), ("random", 1)]
HEAD = """
#define ASM(...) asm volatile(__VA_ARGS__)
#define COPY(kind, to, from, size) ASM("cp.async." #kind ".shared.global [%0], [%1], " #size ";" \\
                                       :: "r"(to), "l"(from) : "memory")
#define COPY_PART(to, from, size, part) ASM("cp.async.ca.shared.global [%0], [%1], " #size ", %2;" \\
                                            :: "r"(to), "l"(from), "r"(part) : "memory")
#define COMMIT ASM("cp.async.commit_group;" ::: "memory")
#define WAIT(n) ASM("cp.async.wait_group " #n ";" ::: "memory")
#define WAIT_ALL ASM("cp.async.wait_all;" ::: "memory")
static __device__ __forceinline__ u32 word_at(u32 address) {
    u32 found;
    ASM("ld.shared.u32 %0, [%1];" : "=r"(found) : "r"(address) : "memory");
    return found;
}
static __device__ __forceinline__ void keep(u32* out, u32 at, u32 lane) {
    for (u32 i = 0; i < 4; ++i) out[4 * lane + i] = word_at(at + 4 * i);
}
extern "C" __global__ void kernel_test"""
BARRIER_HEAD = f"""{HEAD}(u32* out, const u32* in) {{
    const u32 bar = smem_base(), tile = bar + 128, t = threadIdx.x;
"""


@pytest.fixture(params=SCHEDULES, ids=lambda value: f"{value[0]}{value[1]}")
def adversary(request: pytest.FixtureRequest) -> Adversary:
    return Adversary(*request.param)


def copies(body: str) -> str:
    """A kernel whose lane t owns 16 bytes of `in` and of shared memory, at `to`."""
    return f"""{HEAD}(u32* out, const u32* in) {{
        const u32 t = threadIdx.x, to = smem_base() + 16 * t;
        const u32* from = in + 4 * t;
        {body}
    }}"""


@pytest.mark.parametrize("form", ["COPY(cg, to, from, 16)", "COPY(ca, to, from, 16)"])
@pytest.mark.parametrize("wait", ["COMMIT; WAIT(0);", "WAIT_ALL;"])
def test_lane_reads_what_it_copied_and_waited_for(
    launch: Launch, array: Make, adversary: Adversary, form: str, wait: str
) -> None:
    out, given = array(np.zeros(128), np.uint32), array(np.arange(128), np.uint32)
    launch(copies(f"{form}; {wait} keep(out, to, t);"), out, given, smem=1024, adversary=adversary)
    assert out.tolist() == given.tolist()


def test_small_copies_of_neighbours_are_told_apart(launch: Launch, array: Make, adversary: Adversary) -> None:
    """The first word of each 16 bytes has landed and is read while the others are on their way."""
    body = """COPY(ca, to, from, 4); COMMIT;
        COPY(ca, to + 8, from + 2, 8); COPY(ca, to + 4, from + 1, 4); COMMIT;
        WAIT(1); out[4 * t] = word_at(to);
        ASM("st.shared.u32 [%0], %1;" :: "r"(to), "r"(7 * t) : "memory");
        WAIT(0); out[4 * t + 1] = word_at(to + 4); out[4 * t + 2] = word_at(to); out[4 * t + 3] = word_at(to + 12);"""
    out, given = array(np.zeros(128), np.uint32), array(np.arange(128) + 1000, np.uint32)
    launch(copies(body), out, given, smem=1024, adversary=adversary)
    expected = given.reshape(32, 4).copy()
    expected[:, 2] = 7 * np.arange(32)
    assert out.reshape(32, 4).tolist() == expected.tolist()


def test_what_a_source_lacks_arrives_as_zeros(launch: Launch, array: Make, adversary: Adversary) -> None:
    """`src-size` 0 … 16; a source of nothing is not read, wherever it is."""
    body = "COPY_PART(to, t % 17 ? from : from + 4096, 16, t % 17); WAIT_ALL; keep(out, to, t);"
    out, given = array(np.zeros(128), np.uint32), array(np.arange(512) + 1, np.uint8).view(np.uint32)
    launch(copies(body), out, given, smem=1024, adversary=adversary)
    expected = given.view(np.uint8).reshape(32, 16).copy()
    for lane in range(32):
        expected[lane, lane % 17 :] = 0
    assert out.view(np.uint8).reshape(32, 16).tolist() == expected.tolist()


def test_ignored_source_arrives_as_zeros(launch: Launch, array: Make, adversary: Adversary) -> None:
    body = """ASM("{ .reg .pred p; setp.ge.u32 p, %2, 20;"
            " cp.async.cg.shared.global.L2::128B [%0], [%1], 16, p; }" :: "r"(to), "l"(from), "r"(t) : "memory");
        WAIT_ALL; keep(out, to, t);"""
    out, given = array(np.zeros(128), np.uint32), array(np.arange(128) + 1, np.uint32)
    launch(copies(body), out, given, smem=1024, adversary=adversary)
    assert out.tolist() == [each if each <= 80 else 0 for each in given.tolist()]


def test_groups_complete_in_their_order(launch: Launch, array: Make, adversary: Adversary) -> None:
    """A ring of three stages: each step waits for all groups but the newest."""
    body = """u32 sum = 0;
        for (u32 i = 0; i < 10; ++i) {
            if (i < 8) COPY(cg, to + i % 3 * 512, from + 128 * i, 16);
            COMMIT;
            if (i < 1) continue;
            WAIT(1);
            if (i < 9) sum = 3 * sum + word_at(to + (i - 1) % 3 * 512 + 4);
        }
        out[t] = sum;"""
    out, given = array(np.zeros(32), np.uint32), array(np.arange(1024), np.uint32)
    launch(copies(body), out, given, smem=4096, adversary=adversary)
    expected = np.zeros(32, np.uint32)
    for step in given.reshape(8, 32, 4):
        expected = 3 * expected + step[:, 1]
    assert out.tolist() == expected.tolist()


def test_lanes_have_groups_of_their_own(launch: Launch, array: Make, adversary: Adversary) -> None:
    """All copy together; half of the lanes commit and wait, then the others."""
    body = """COPY(cg, to, from, 16);
        if (t & 1) { COMMIT; WAIT(0); keep(out, to, t); }
        else { COMMIT; COMMIT; WAIT(1); keep(out, to, t); }"""
    out, given = array(np.zeros(128), np.uint32), array(np.arange(128), np.uint32)
    launch(copies(body), out, given, smem=1024, adversary=adversary)
    assert out.tolist() == given.tolist()


def test_other_warps_read_behind_a_barrier(launch: Launch, array: Make, adversary: Adversary) -> None:
    body = "COPY(cg, to, from, 16); WAIT_ALL; __syncthreads(); keep(out, to ^ 512, t);"
    out, given = array(np.zeros(256), np.uint32), array(np.arange(256), np.uint32)
    launch(copies(body), out, given, block=64, smem=1024, adversary=adversary)
    assert out.tolist() == [*range(128, 256), *range(128)]


@pytest.mark.parametrize(
    ("body", "report"),
    [
        ("COPY(cg, to, from, 16); COMMIT; keep(out, to, t);", "pending-write|race"),
        ("COPY(cg, to, from, 16); WAIT(0); keep(out, to, t);", "pending-write|race"),
        ("COPY(cg, to, from, 16); COMMIT; COMMIT; WAIT(2); keep(out, to, t);", "pending-write|race"),
        ("COPY(cg, to, from, 16); COMMIT; WAIT(0); keep(out, to ^ 512, t);", "race|unwritten-read|pending-write"),
        ("COPY(cg, to, from, 16); COMMIT; WAIT(0); keep(out, to ^ 16, t);", "race: .*bar.warp.sync"),
        ('COPY(cg, to, from, 16); ASM("st.shared.u32 [%0], %1;" :: "r"(to + 8), "r"(t) : "memory");', "pending|race"),
        ("COPY(cg, to, from, 16); COPY(ca, to + 4, from, 4); WAIT_ALL;", "pending-write|race"),
        ("COPY(cg, smem_base(), from, 16); WAIT_ALL;", "race: two lanes of the cp.async"),
        ("COPY(cg, to, from + 1, 16); WAIT_ALL;", "out-of-bounds: .*not aligned"),
        ("COPY(cg, to, from + 4096, 16); WAIT_ALL;", "out-of-bounds: cp.async"),
        ("COPY_PART(to, from, 8, 12); WAIT_ALL;", "out-of-bounds: cp.async of 8 bytes with a source of 12"),
    ],
)
def test_planted_fault_is_reported(launch: Launch, array: Make, adversary: Adversary, body: str, report: str) -> None:
    out, given = array(np.zeros(256), np.uint32), array(np.arange(256), np.uint32)
    with pytest.raises(Fault, match=f"^({report})"):
        launch(copies(body), out, given, block=64, smem=2048, adversary=adversary)


def test_source_is_not_written_before_the_wait(launch: Launch, array: Make, adversary: Adversary) -> None:
    body = """out[4 * t] = t; out[4 * t + 1] = t; out[4 * t + 2] = t; out[4 * t + 3] = t;
        COPY(cg, to, out + 4 * t, 16); COMMIT; {} out[4 * t] = word_at(smem_base() + 1024 + 4 * t);"""
    body = body.replace("COPY", 'ASM("st.shared.u32 [%0], %1;" :: "r"(smem_base() + 1024 + 4 * t), "r"(t)); COPY', 1)
    out, given = array(np.zeros(128), np.uint32), array(np.zeros(128), np.uint32)
    launch(copies(body.replace("{}", "WAIT(0);")), out, given, smem=2048, adversary=adversary)
    with pytest.raises(Fault, match=r"race: .*in flight"):
        launch(copies(body.replace("{}", "")), out, given, smem=2048, adversary=adversary)


def tracked(arrive: str, count: int, behind: str = "") -> str:
    return f"""{BARRIER_HEAD}
        if (t == 0) {{ mbarrier_init(bar, {count}); fence_mbarrier_init(); }}
        __syncthreads();
        if (t < 32) {{
            COPY(cg, tile + 16 * t, in + 4 * t, 16);
            {arrive}
        }} else {{
            {behind}
            while (!mbarrier_try_wait(bar, 0)) {{}}
            keep(out, tile + 16 * (t - 32), t - 32);
        }}
    }}"""


ARRIVE = 'ASM("cp.async.mbarrier.arrive{}.shared.b64 [%0];" :: "r"(bar) : "memory");'
NOINC = ARRIVE.replace("{}", ".noinc")
PLAIN = 'ASM("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(bar) : "memory");'


@pytest.mark.parametrize(("arrive", "count"), [(NOINC, 32), (ARRIVE.replace("{}", "") + PLAIN, 32)])
def test_waiter_of_the_barrier_sees_tracked_copies(
    launch: Launch, array: Make, adversary: Adversary, arrive: str, count: int
) -> None:
    out, given = array(np.zeros(128), np.uint32), array(np.arange(128), np.uint32)
    launch(tracked(arrive, count), out, given, block=64, smem=1024, adversary=adversary)
    assert out.tolist() == given.tolist()


@pytest.mark.parametrize(
    ("arrive", "count", "report"),
    [
        (PLAIN, 32, "pending-write|race"),
        (ARRIVE.replace("{}", ""), 32, "deadlock"),
        (NOINC, 33, "deadlock"),
        (f"COPY(cg, tile + 512 + 16 * t, in, 16); {NOINC} COPY(cg, tile + 16 * t, in, 16);", 32, "pending-write|race"),
    ],
)
def test_wrong_tracking_is_reported(
    launch: Launch, array: Make, adversary: Adversary, arrive: str, count: int, report: str
) -> None:
    out, given = array(np.zeros(128), np.uint32), array(np.arange(128), np.uint32)
    with pytest.raises(Fault, match=f"^({report})"):
        launch(tracked(arrive, count), out, given, block=64, smem=2048, adversary=adversary)


@pytest.mark.parametrize("fence", ["", "fence_proxy_async_shared();"])
def test_copied_bytes_are_generic_writes(launch: Launch, array: Make, adversary: Adversary, fence: str) -> None:
    """What reads them by the asynchronous proxy needs a proxy fence behind the wait."""
    body = f"""COPY(cg, to, from, 16); COMMIT; WAIT(0); {fence}
        __syncthreads();
        if (t == 0) {{
            ASM("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 512;" :: "l"(out), "r"(to) : "memory");
            ASM("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
        }}"""
    out, given = array(np.zeros(128), np.uint32), array(np.arange(128), np.uint32)
    if fence:
        launch(copies(body), out, given, smem=1024, adversary=adversary)
        assert out.tolist() == given.tolist()
        return
    with pytest.raises(Fault, match=r"proxy: .*cp.async"):
        launch(copies(body), out, given, smem=1024, adversary=adversary)


def test_trace_can_show_copies(
    launch: Launch, array: Make, monkeypatch: pytest.MonkeyPatch, adversary: Adversary
) -> None:
    trace = Trace()
    monkeypatch.setitem(launch.__globals__, "Machine", trace.machine)
    out, given = array(np.zeros(128), np.uint32), array(np.arange(128), np.uint32)
    launch(copies("COPY(cg, to, from, 16); WAIT_ALL; keep(out, to, t);"), out, given, smem=1024, adversary=adversary)
    assert [span.kind for span in trace.launches[0].spans].count("run")
