"""TMA stores and reductions: which bytes go where, and what orders them (PTX ISA 9.7.9.25, 9.7.9.27)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.trace.recorder import COPY, WAIT, Trace
from cakegen.runtime.tensor_map import SWIZZLE_BYTES, TensorMap

pytestmark = pytest.mark.emulator

Launch = Callable[..., Machine]
Make = Callable[..., np.ndarray]

SCHEDULES = [("early", 0), ("late", 0), ("random", 0), ("random", 1)]
WRAPPERS = """
#define ASM(...) asm volatile(__VA_ARGS__)
#define COMMIT ASM("cp.async.bulk.commit_group;" ::: "memory")
#define WAIT(n) ASM("cp.async.bulk.wait_group " #n ";" ::: "memory")
#define WAIT_READ(n) ASM("cp.async.bulk.wait_group.read " #n ";" ::: "memory")
#define STORE(to, from, size) ASM("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" \\
                                  :: "l"(to), "r"(from), "r"(size) : "memory")
"""
HEAD = 'extern "C" __global__ void kernel_test'


@pytest.fixture(params=SCHEDULES, ids=lambda value: f"{value[0]}{value[1]}")
def adversary(request: pytest.FixtureRequest) -> Adversary:
    return Adversary(*request.param)


def box_kernel(rank: int, corner: tuple[int, ...], start: int, elements: int, operation: str = "") -> str:
    """Fill `elements` of 16 bits at a shared offset with 1, 2, …, and store them as a box."""
    coordinates = ", ".join(f"%{2 + axis}" for axis in range(rank))
    values = ", ".join(f'"r"({each})' for each in corner)
    opcode = f"cp{'.reduce' if operation else ''}.async.bulk.tensor.{rank}d.global.shared::cta{operation}.tile"
    return f"""{WRAPPERS}{HEAD}(u16* out, const __grid_constant__ TensorMap map) {{
        const u32 at = smem_base() + {start};
        for (u32 i = threadIdx.x; i < {elements}; i += 32)
            ASM("st.shared.u16 [%0], %1;" :: "r"(at + 2 * i), "h"((u16)(i + 1)) : "memory");
        fence_proxy_async_shared();
        __syncthreads();
        if (threadIdx.x == 5) {{
            ASM("{opcode}.bulk_group [%0, {{{coordinates}}}], [%1];" :: "l"(&map), "r"(at), {values} : "memory");
            COMMIT;
            WAIT_READ(0);
        }}
    }}"""


@pytest.mark.parametrize("swizzle", SWIZZLE_BYTES)
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_box_goes_where_the_isa_says(launch: Launch, array: Make, rank: int, swizzle: str) -> None:
    """Clipped in its first and last dimension; bits 4 to 6 of shared addresses are xored with bits 7 to 9 (5.5.7)."""
    width = SWIZZLE_BYTES[swizzle]
    box = (width // 2 or 24, 5, 3, 2, 2)[:rank]
    dims = (64 + 8, 7, 5, 4, 3)[:rank]
    corner = (64, 1, 2, 1, 2)[:rank]
    start, elements = 3 * 128, int(np.prod(box))
    pitches = np.cumprod([160, *dims[1:]])[: rank - 1]
    out = array(np.zeros(80 * int(np.prod(dims[1:]))), np.uint16)
    record = TensorMap("map", out.ctypes.data, dims, tuple(map(int, pitches)), box, swizzle)
    machine = launch(box_kernel(rank, corner, start, elements), out, record, smem=16384)
    expected = np.zeros_like(out)
    base = machine.dynamic_start + start
    bits = max(width // 16 - 1, 0)
    for number, place in enumerate(product(*(range(extent) for extent in reversed(box)))):
        at = [first + step for first, step in zip(corner, reversed(place), strict=True)]
        if any(index >= extent for index, extent in zip(at, dims, strict=True)):
            continue
        address = base + 2 * number
        address ^= (address >> 7 & bits) << 4
        offset = at[0] + sum(index * int(pitch) // 2 for index, pitch in zip(at[1:], pitches, strict=True))
        expected[offset] = (address - base) // 2 + 1
    assert np.count_nonzero(expected)
    assert out.tolist() == expected.tolist()


def test_box_outside_of_the_tensor_writes_and_needs_nothing(launch: Launch, array: Make, adversary: Adversary) -> None:
    out = array(np.zeros(64), np.uint16)
    record = TensorMap("map", out.ctypes.data, (64,), (), (32,), "none")
    launch(box_kernel(1, (64,), 0, 0), out, record, smem=4096, adversary=adversary)
    assert not out.any()


def test_part_of_a_box_that_is_clipped_need_not_be_written(launch: Launch, array: Make) -> None:
    out = array(np.zeros(20), np.uint16)
    record = TensorMap("map", out.ctypes.data, (20,), (), (32,), "none")
    launch(box_kernel(1, (0,), 0, 20), out, record, smem=4096)
    assert out.tolist() == list(range(1, 21))
    with pytest.raises(Fault, match="reads 2 bytes that nothing has written"):
        launch(box_kernel(1, (0,), 0, 19), out, record, smem=4096)


def test_reduction_of_a_box_takes_its_type_from_the_map(launch: Launch, array: Make, adversary: Adversary) -> None:
    out = array(np.arange(32) + 100, np.uint16)
    record = TensorMap("map", out.ctypes.data, (32,), (), (32,), "none", element="bf16")
    launch(box_kernel(1, (0,), 0, 32, ".add"), out, record, smem=4096, adversary=adversary)
    # subnormals of bf16 add up exactly
    assert out.tolist() == [100 + 2 * i + 1 for i in range(32)]


@pytest.mark.parametrize(
    ("operation", "dtype", "old", "new", "expected"),
    [
        ("add.u32", "u4", [2**32 - 1, 7], [2, 3], [1, 10]),
        ("add.s32", "i4", [-5, 7], [3, -9], [-2, -2]),
        ("add.u64", "u8", [2**40, 1], [5, 6], [2**40 + 5, 7]),
        ("min.s32", "i4", [-5, 7], [3, -9], [-5, -9]),
        ("max.u32", "u4", [5, 2**31], [6, 3], [6, 2**31]),
        ("inc.u32", "u4", [3, 5], [5, 5], [4, 0]),
        ("dec.u32", "u4", [3, 0], [5, 5], [2, 5]),
        ("xor.b32", "u4", [0b1100, 1], [0b1010, 1], [0b0110, 0]),
        ("and.b64", "u8", [0b1100, 1], [0b1010, 1], [0b1000, 1]),
        ("add.f32", "f4", [1.5, 1e-40], [0.25, 0.0], [1.75, 0.0]),
        ("add.noftz.bf16", "u2", [0x3F80, 0x4000], [0x3F80, 0x3F80], [0x4000, 0x4040]),
        ("add.noftz.f16", "f2", [1.0, 2048.0], [0.5, 1.0], [1.5, 2048.0]),
    ],
)
def test_reduction_combines_elements(
    launch: Launch, array: Make, operation: str, dtype: str, old: list[float], new: list[float], expected: list[float]
) -> None:
    count = 16 // np.dtype(dtype).itemsize
    out, source = (array(np.tile(np.array(each, dtype), 8)[:count]) for each in (old, new))
    text = f"""{WRAPPERS}{HEAD}(u64* out, const u64* source) {{
        ASM("st.shared.u64 [%0], %1;" :: "r"(smem_base() + 8 * threadIdx.x), "l"(source[threadIdx.x]) : "memory");
        fence_proxy_async_shared();
        warp_sync();
        if (threadIdx.x) return;
        ASM("cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation} [%0], [%1], %2;"
            :: "l"(out), "r"(smem_base()), "r"(16) : "memory");
        COMMIT;
        WAIT_READ(0);
    }}"""
    launch(text, out, source, block=2, smem=1024)
    assert out.tolist() == np.tile(np.array(expected, dtype), 8)[:count].tolist()


def ordered(body: str) -> str:
    """A kernel of two warps around a body: thread t has written 16 bytes, t + 1 four times, at `at + 16 * t`."""
    return f"""{WRAPPERS}{HEAD}(u32* out, u32* seen) {{
        const u32 at = smem_base(), t = threadIdx.x;
        st_shared_v4(at + 16 * t, Vec4{{t + 1, t + 1, t + 1, t + 1}});
        fence_proxy_async_shared();
        __syncthreads();
        {body}
    }}"""


# (what, body, what `seen` then holds)
CLEAN = [
    (
        "the issuing thread reads behind its wait",
        "if (t == 0) { STORE(out, at, 1024); COMMIT; WAIT(0); seen[0] = out[252]; }",
        64,
    ),
    (
        "another thread reads behind the wait and a barrier",
        "if (t == 0) { STORE(out, at, 1024); COMMIT; WAIT(0); } __syncthreads(); if (t == 40) seen[0] = out[4];",
        2,
    ),
    (
        "the source is written again behind wait_group.read and a barrier",
        "if (t == 0) { STORE(out, at, 512); COMMIT; WAIT_READ(0); } __syncthreads();"
        "st_shared_v4(at + 16 * t, Vec4{0, 0, 0, 0}); if (t == 0) { WAIT(0); seen[0] = out[4]; }",
        2,
    ),
    (
        "a wait for all groups but one",
        "if (t == 0) { STORE(out, at, 512); COMMIT; STORE(out + 128, at + 512, 512); COMMIT; WAIT(1); seen[0] = out[4];"
        "WAIT_READ(0); }",
        2,
    ),
    (
        "an empty group is a group",
        "if (t == 0) { STORE(out, at, 512); COMMIT; COMMIT; WAIT(1); seen[0] = out[4]; WAIT(0); }",
        2,
    ),
    (
        "a store over a store, behind its wait",
        "if (t == 0) { STORE(out, at, 16); COMMIT; WAIT(0); STORE(out, at + 16, 16); COMMIT; WAIT(0);"
        " seen[0] = out[0]; }",
        2,
    ),
    (
        "two reductions of one place need no order",
        'if (t == 0 || t == 32) { ASM("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], %2;"'
        ':: "l"(out), "r"(at + 16 * t), "r"(16) : "memory"); COMMIT; WAIT(0); }'
        "__syncthreads(); if (t == 9) seen[0] = out[0];",
        34,
    ),
]


@pytest.mark.parametrize(("body", "expected"), [each[1:] for each in CLEAN], ids=[each[0] for each in CLEAN])
def test_store_that_is_waited_for_is_clean(
    launch: Launch, array: Make, adversary: Adversary, body: str, expected: int
) -> None:
    out, seen = array(np.zeros(256), np.uint32), array(np.zeros(4), np.uint32)
    launch(ordered(body), out, seen, block=64, smem=1024, adversary=adversary)
    assert seen[0] == expected


BROKEN = [
    (
        "the source is written before the wait",
        "if (t == 0) { STORE(out, at, 512); COMMIT; st_shared_v4(at, Vec4{0, 0, 0, 0}); WAIT(0); }",
        "pending-read",
        "an asynchronous operation may still read it",
    ),
    (
        "another warp writes the source, and only the barrier is between",
        "if (t == 0) { STORE(out, at, 512); COMMIT; } __syncthreads();"
        "if (t == 32) st_shared_v4(at, Vec4{0, 0, 0, 0}); if (t == 0) WAIT(0);",
        "pending-read race",
        "",
    ),
    (
        "wait_group.read makes nothing visible",
        "if (t == 0) { STORE(out, at, 512); COMMIT; WAIT_READ(0); seen[0] = out[0]; }",
        "race",
        "store of 512 bytes",
    ),
    (
        "the group of the store is not covered",
        "if (t == 0) { STORE(out, at, 512); COMMIT; WAIT(1); seen[0] = out[0]; WAIT(0); }",
        "race",
        "store of 512 bytes",
    ),
    (
        "read behind a barrier, without the wait",
        "if (t == 0) { STORE(out, at, 512); COMMIT; } __syncthreads(); if (t == 32) seen[0] = out[0];"
        " if (t == 0) WAIT(0);",
        "race",
        "store of 512 bytes",
    ),
    ("no commit", "if (t == 0) { STORE(out, at, 512); WAIT(0); }", "exit", "has not waited for the bulk store"),
    ("no wait", "if (t == 0) { STORE(out, at, 512); COMMIT; }", "exit", "has not waited for the bulk store"),
    (
        "another lane waits",
        "if (t == 0) { STORE(out, at, 512); COMMIT; } if (t == 1) WAIT(0);",
        "exit",
        "lane 0 has not waited",
    ),
    (
        "two stores to one place",
        "if (t == 0) { STORE(out, at, 16); COMMIT; STORE(out, at + 16, 16); COMMIT; WAIT(0); }",
        "race",
        "nothing orders the two",
    ),
    (
        "a generic write to the target lacks its proxy fence",
        "if (t == 0) { out[0] = 1; STORE(out, at, 16); COMMIT; WAIT(0); }",
        "proxy",
        "no fence.proxy.async.global",
    ),
    (
        "a generic write to the source lacks its proxy fence",
        "if (t == 0) { st_shared_v4(at, Vec4{0, 0, 0, 0}); STORE(out, at, 16); COMMIT; WAIT(0); }",
        "proxy",
        "no fence.proxy.async.shared::cta",
    ),
    ("more than the allocation", "if (t == 0) { STORE(out + 252, at, 32); COMMIT; WAIT(0); }", "out-of-bounds", ""),
    ("no multiple of 16", "if (t == 0) { STORE(out, at, 24); COMMIT; WAIT(0); }", "out-of-bounds", "multiples of 16"),
    ("unwritten source", "if (t == 0) { STORE(out, at + 1024, 16); COMMIT; WAIT(0); }", "unwritten-read", "16 bytes"),
]


@pytest.mark.parametrize(("body", "kinds", "words"), [each[1:] for each in BROKEN], ids=[each[0] for each in BROKEN])
def test_store_that_is_not_ordered_is_reported(
    launch: Launch, array: Make, adversary: Adversary, body: str, kinds: str, words: str
) -> None:
    out, seen = array(np.zeros(256), np.uint32), array(np.zeros(4), np.uint32)
    with pytest.raises(Fault) as caught:
        launch(ordered(body), out, seen, block=64, smem=2048, adversary=adversary)
    assert caught.value.kind in kinds.split(), caught.value
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("corner", "start", "kind", "words"),
    [((-8,), 0, "out-of-bounds", "can't be negative"), ((0,), 64, "out-of-bounds", "multiple of 128")],
)
def test_box_that_no_device_stores_is_reported(
    launch: Launch, array: Make, corner: tuple[int, ...], start: int, kind: str, words: str
) -> None:
    out = array(np.zeros(64), np.uint16)
    record = TensorMap("map", out.ctypes.data, (64,), (), (32,), "none")
    with pytest.raises(Fault, match=words) as caught:
        launch(box_kernel(1, corner, start, 32), out, record, smem=4096)
    assert caught.value.kind == kind


@pytest.mark.parametrize(("kind", "expected"), [("early", 1), ("late", 0)])
def test_adversary_delays_the_write_behind_wait_group_read(
    launch: Launch, array: Make, kind: str, expected: int
) -> None:
    out, seen = array(np.zeros(256), np.uint32), array(np.zeros(4), np.uint32)
    body = "if (t == 0) { STORE(out, at, 512); COMMIT; WAIT_READ(0); seen[0] = out[0]; }"
    launch(ordered(body), out, seen, block=64, smem=1024, adversary=Adversary(kind), checks=False)
    assert seen[0] == expected
    assert out[:128].tolist() == [number // 4 + 1 for number in range(128)]


def test_store_not_waited_for_lands_where_practice_allows_it(launch: Launch, array: Make, adversary: Adversary) -> None:
    out, seen = array(np.zeros(256), np.uint32), array(np.zeros(4), np.uint32)
    body = "if (t == 0) { STORE(out, at, 512); COMMIT; }"
    launch(ordered(body), out, seen, block=64, smem=1024, adversary=adversary, strict_tensor_order=False)
    assert out[:128].tolist() == [number // 4 + 1 for number in range(128)]


def test_trace_shows_stores_and_waits_for_them(
    launch: Launch, array: Make, monkeypatch: pytest.MonkeyPatch, adversary: Adversary
) -> None:
    trace = Trace()
    monkeypatch.setitem(launch.__globals__, "Machine", trace.machine)
    out, seen = array(np.zeros(256), np.uint32), array(np.zeros(4), np.uint32)
    body = "if (t == 0) { STORE(out, at, 512); COMMIT; WAIT(0); seen[0] = 1; }"
    launch(ordered(body), out, seen, block=64, smem=1024, adversary=adversary)
    spans = trace.launches[0].spans
    (copy,) = (span for span in spans if span.kind == COPY)
    assert copy.name == "bulk store of 512 bytes to argument 0"
    (wait,) = (span for span in spans if span.kind == WAIT and span.name == "waits for its stores")
    assert wait.cause is not None
    assert wait.end == copy.end
