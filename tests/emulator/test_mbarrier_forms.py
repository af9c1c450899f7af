"""mbarriers by their states, and what completes on them between CTAs (PTX ISA 9.7.13.15, 9.7.9.12, 9.7.9.25)."""

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
SCHEDULES = [("early", 0), ("late", 0), ("random", 0), ("random", 1)]
KERNEL = """
#define ASM(...) asm volatile(__VA_ARGS__)
typedef unsigned long long u64_t;
static __device__ __forceinline__ void put(u32 at, u32 value) {
    ASM("st.shared.u32 [%0], %1;" :: "r"(at), "r"(value) : "memory");
}
static __device__ __forceinline__ u32 word_at(u32 at) {
    u32 found;
    ASM("ld.shared.u32 %0, [%1];" : "=r"(found) : "r"(at) : "memory");
    return found;
}
static __device__ __forceinline__ u32 state_done(u32 bar, u64_t state) {
    u32 done;
    ASM("{ .reg .pred p; mbarrier.try_wait.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(bar), "l"(state) : "memory");
    return done;
}
static __device__ __forceinline__ u64_t arrive(u32 bar) {
    u64_t state;
    ASM("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(bar) : "memory");
    return state;
}
extern "C" __global__ void kernel_test(u32* out) {
    const u32 t = threadIdx.x, bar = smem_base(), rank = blockIdx.x;
    if (t == 0) { mbarrier_init(bar, COUNT); fence_mbarrier_init(); }
    __syncthreads();
    BODY
}"""


@pytest.fixture(params=SCHEDULES, ids=lambda value: f"{value[0]}{value[1]}")
def adversary(request: pytest.FixtureRequest) -> Adversary:
    return Adversary(*request.param)


def text(body: str, count: int) -> str:
    return KERNEL.replace("BODY", body).replace("COUNT", str(count))


def test_state_of_an_arrival_is_waited_for(launch: Launch, array: Make, adversary: Adversary) -> None:
    body = """for (u32 round = 0; round < 3; ++round) {
            put(bar + 64 + 4 * t, t + round);
            const u64_t state = arrive(bar);
            while (!state_done(bar, state)) {}
            out[64 * round + t] = word_at(bar + 64 + 4 * (t ^ 32));
            __syncthreads();
        }"""
    out = array(np.zeros(192), np.uint32)
    launch(text(body, 64), out, block=64, smem=1024, adversary=adversary)
    assert out.tolist() == [(t ^ 32) + round for round in range(3) for t in range(64)]


def test_pending_count_is_what_the_state_says(launch: Launch, array: Make) -> None:
    body = """if (t == 0) for (u32 i = 0; i < 5; ++i) {
            const u64_t state = arrive(bar);
            u32 count;
            ASM("mbarrier.pending_count.b64 %0, %1;" : "=r"(count) : "l"(state));
            out[i] = count;
        }"""
    out = array(np.zeros(8), np.uint32)
    launch(text(body, 3), out, smem=64)
    assert out.tolist() == [3, 2, 1, 3, 2, 0, 0, 0]


def test_participant_that_drops_out_is_not_waited_for(launch: Launch, array: Make, adversary: Adversary) -> None:
    body = """if (t >= 32) { ASM("mbarrier.arrive_drop.shared.b64 _, [%0];" :: "r"(bar) : "memory"); }
        else for (u32 round = 0; round < 3; ++round) {
            const u64_t state = arrive(bar);
            while (!state_done(bar, state)) {}
            out[t] = round + 1;
        }"""
    out = array(np.zeros(32), np.uint32)
    launch(text(body, 64), out, block=64, smem=64, adversary=adversary)
    assert out.tolist() == [3] * 32


def test_generic_address_names_a_barrier(launch: Launch, array: Make) -> None:
    body = """u64_t state;
        ASM("{ .reg .b64 a; cvta.shared.u64 a, %1; mbarrier.arrive.b64 %0, [a]; }" : "=l"(state) : "l"((u64_t)bar));
        while (!state_done(bar, state)) {}
        out[t] = 1;"""
    out = array(np.zeros(32), np.uint32)
    launch(text(body, 32), out, smem=64)
    assert out.tolist() == [1] * 32


@pytest.mark.parametrize(
    ("body", "count", "report"),
    [
        (
            "const u64_t s = arrive(bar); arrive(bar); arrive(bar); state_done(bar, s);",
            1,
            "barrier: .*state of phase 0",
        ),
        ('ASM("mbarrier.arrive.noComplete.shared.b64 _, [%0], 1;" :: "r"(bar));', 1, "barrier: .*noComplete"),
        ('ASM("mbarrier.arrive_drop.shared.b64 _, [%0], 3;" :: "r"(bar));', 2, "barrier: .*drop out of 2"),
        ("const u64_t s = arrive(bar); while (!state_done(bar, s)) {}", 2, "deadlock"),
    ],
)
def test_planted_fault_is_reported(launch: Launch, array: Make, body: str, count: int, report: str) -> None:
    with pytest.raises(Fault, match=rf"^{report}"):
        launch(text(f"if (t == 0) {{ {body} }}", count), array(np.zeros(4), np.uint32), smem=64)


CLUSTER = """
    const u32 land = bar + 128, peer = mapa(land, rank ^ 1), peer_bar = mapa(bar, rank ^ 1);
    for (u32 i = t; i < 256; i += 32) put(bar + 2048 + 4 * i, 1000 * rank + i);
    if (t == 0) mbarrier_arrive_expect_tx(bar, EXPECTED);
    __syncwarp();
    ASM("fence.proxy.async.shared::cta;" ::: "memory");
    ASM("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
    SEND
    while (!mbarrier_try_wait_cluster(bar, 0)) {}
    for (u32 i = t; i < WORDS; i += 32) out[256 * rank + i] = word_at(land + 4 * i);
    ASM("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");"""


def between(send: str, words: int, expected: int | None = None) -> str:
    body = CLUSTER.replace("SEND", send).replace("WORDS", str(words))
    return text(body.replace("EXPECTED", str(4 * words if expected is None else expected)), 1)


STORES = [
    ("b32", 1, '"r"(v)', "%1"),
    ("u64", 2, '"l"((u64_t)v << 32 | v)', "%1"),
    ("v2.b32", 2, '"r"(v), "r"(v + 1)', "{%1, %2}"),
    ("v2.s64", 4, '"l"((u64_t)v), "l"((u64_t)v)', "{%1, %2}"),
    ("v4.u32", 4, '"r"(v), "r"(v + 1), "r"(v + 2), "r"(v + 3)', "{%1, %2, %3, %4}"),
]


@pytest.mark.parametrize(("form", "words", "values", "names"), STORES, ids=[form for form, *_ in STORES])
def test_asynchronous_store_of_each_width(
    launch: Launch, array: Make, adversary: Adversary, form: str, words: int, values: str, names: str
) -> None:
    last = values.count('"') // 2 + 1
    send = f"""const u32 v = 100 * rank + t;
        ASM("st.async.shared::cluster.mbarrier::complete_tx::bytes.{form} [%0], {names}, [%{last}];"
            :: "r"(peer + {4 * words} * t), {values}, "r"(peer_bar) : "memory");"""
    out = array(np.zeros(512), np.uint32)
    launch(between(send, 32 * words), out, grid=2, cluster=2, smem=4096, adversary=adversary)
    for rank in range(2):
        v = 100 * (rank ^ 1) + np.arange(32)
        zero = np.zeros_like(v)
        columns = {"b32": [v], "u64": [v, v], "v2.b32": [v, v + 1], "v2.s64": [v, zero, v, zero]}
        expected = np.stack(columns.get(form, [v, v + 1, v + 2, v + 3]), 1).ravel()
        assert out[256 * rank : 256 * rank + 32 * words].tolist() == expected.tolist()


BULK = """if (t == 0) ASM("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    " [%0], [%1], SIZE, [%2];" :: "r"(peer), "r"(bar + FROM), "r"(peer_bar) : "memory");"""


def test_bulk_copy_reaches_the_other_cta(launch: Launch, array: Make, adversary: Adversary) -> None:
    out = array(np.zeros(512), np.uint32)
    send = BULK.replace("SIZE", "512").replace("FROM", "2048")
    launch(between(send, 128), out, grid=2, cluster=2, smem=4096, adversary=adversary)
    assert out[:128].tolist() == list(range(1000, 1128))
    assert out[256:384].tolist() == list(range(128))


@pytest.mark.parametrize(
    ("source", "report"),
    [
        (between(BULK.replace("SIZE", "500").replace("FROM", "2048"), 128), "out-of-bounds: .*multiples of 16"),
        (between(BULK.replace("SIZE", "512").replace("FROM", "3072"), 128), "unwritten-read"),
        (between(BULK.replace("SIZE", "512").replace("FROM", "2048").replace("peer)", "land)"), 128), "barrier"),
        (between(BULK.replace("SIZE", "512").replace("FROM", "2048"), 128, 1024), "deadlock"),
        (
            between(BULK.replace("SIZE", "512").replace("FROM", "2048") + " put(bar + 2048 + 4 * t, 1);", 128),
            "pending-read|race",
        ),
        (between(BULK.replace("SIZE", "512").replace("FROM", "2048"), 128).replace("fence.proxy.async", "//"), "proxy"),
        (between("put(peer, 1);", 1), "out-of-bounds"),
    ],
)
def test_planted_fault_between_ctas_is_reported(
    launch: Launch, array: Make, adversary: Adversary, source: str, report: str
) -> None:
    source = source.replace("//.shared::cta;", "")
    with pytest.raises(Fault, match=rf"^({report})"):
        launch(source, array(np.zeros(512), np.uint32), grid=2, cluster=2, smem=4096, adversary=adversary)
