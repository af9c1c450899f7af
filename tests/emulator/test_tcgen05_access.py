"""tcgen05.ld and st in every shape of 32-bit data, and what orders them (PTX ISA 9.7.16.2.3, 9.7.16.8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.machine import Machine
from cakegen.errors import EmulationError

Launch = Callable[..., Machine]
Make = Callable[..., np.ndarray]

SHAPES = [
    ("32x32b", 1),
    ("32x32b", 32),
    ("16x64b", 1),
    ("16x64b", 16),
    ("16x128b", 1),
    ("16x128b", 8),
    ("16x256b", 1),
    ("16x256b", 4),
    ("16x32bx2", 1),
    ("16x32bx2", 8),
]
# (shape, repetitions, first lane in the quadrant); 32x32b takes the whole quadrant
CASES = [(shape, count, half) for shape, count in SHAPES for half in (0, 16) if shape != "32x32b" or not half]
# Second half of 16x32bx2, in columns from the first.
SPLIT = 16


def places(shape: str, count: int) -> Iterator[tuple[int, int, int, int]]:
    """(lane of the warp, register, lane of tensor memory, column) as the figures of the ISA show them, row by row."""
    if shape == "32x32b":
        yield from ((t, i, t, i) for t in range(32) for i in range(count))
        return
    for row in range(16):
        if shape == "16x32bx2":
            yield from ((row, i, row, i) for i in range(count))
            yield from ((row + 16, i, row, i + SPLIT) for i in range(count))
        elif shape == "16x64b":
            # two lanes hold one row: lanes 0, 2 row 0; 1, 3 row 8; 4, 6 row 1; ...
            first = row % 8 * 4 + row // 8
            for i in range(count):
                yield first, i, row, 2 * i
                yield first + 2, i, row, 2 * i + 1
        elif shape == "16x128b":
            # four lanes hold four columns of a row; the second register is 8 rows below
            for i in range(count):
                for part in range(4):
                    yield row % 8 * 4 + part, 2 * i + row // 8, row, 4 * i + part
        else:
            # four lanes hold eight columns of a row, two neighbours each
            for i in range(count):
                for column in range(8):
                    yield row % 8 * 4 + column // 2, 4 * i + row // 8 * 2 + column % 2, row, 8 * i + column


def registers_of(shape: str, count: int) -> int:
    return count * {"16x128b": 2, "16x256b": 4}.get(shape, 1)


def access(what: str, shape: str, count: int, packed: str = "") -> str:
    """A function `access(u32 (&r)[n], u32 address)` around one instruction."""
    n = registers_of(shape, count)
    vector = ", ".join(f"%{i}" for i in range(n))
    split = f", {SPLIT}" if shape == "16x32bx2" else ""
    opcode = f"tcgen05.{what}.sync.aligned.{shape}.x{count}{packed}.b32"
    body = f"{{{vector}}}, [%{n}]{split}" if what == "ld" else f"[%{n}]{split}, {{{vector}}}"
    names = ", ".join(f'"{"=r" if what == "ld" else "r"}"(r[{i}])' for i in range(n))
    operands = f': {names} : "r"(address)' if what == "ld" else f':: {names}, "r"(address)'
    return (
        f"__device__ void access(u32 (&r)[{n}], u32 address) {{"
        f' asm volatile("{opcode} {body};" {operands} : "memory"); }}\n'
    )


def kernel(what: str, shape: str, count: int, half: int, *, packed: str = "", wait: str = "") -> str:
    """A store by the shape and a dump by 32x32b, or the other way round; cells and values say where they are."""
    n = registers_of(shape, count)
    wait = wait or ("tensor_wait_loads();" if what == "ld" else "tensor_wait_stores();")
    do_store = (
        f"for (u32 i = 0; i < {n}; ++i) r[i] = t * 1000 + i + 1; access(r, at); {wait} tensor_dump(out, base, 64);"
    )
    do_load = f"access(r, at); {wait} for (u32 i = 0; i < {n}; ++i) out[t * {n} + i] = r[i];"
    return f"""{access(what, shape, count, packed)}
    extern "C" __global__ void kernel_test(u32* out) {{
        const u32 t = threadIdx.x, base = tensor_begin(64), quadrant = t / 32 * 32 << 16;
        const u32 at = base + quadrant + ({half} << 16);
        for (u32 c = 0; c < 64; ++c) tensor_store_word(base + quadrant + c, t << 16 | c);
        tensor_wait_stores();
        u32 r[{n}];
        {do_load if what == "ld" else do_store}
        tensor_end(base, 64);
    }}"""


@pytest.mark.parametrize(("shape", "count", "half"), CASES)
def test_load_brings_each_cell_to_its_register(launch: Launch, array: Make, shape: str, count: int, half: int) -> None:
    out = array(np.zeros((128, registers_of(shape, count))), np.uint32)
    launch(kernel("ld", shape, count, half), out, block=128, smem=1024, arch="sm_100a")
    expected = np.zeros_like(out)
    for warp in range(4):
        for t, i, lane, column in places(shape, count):
            expected[32 * warp + t, i] = (32 * warp + half + lane) << 16 | column
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("shape", "count", "half"), CASES)
def test_store_brings_each_register_to_its_cell(launch: Launch, array: Make, shape: str, count: int, half: int) -> None:
    out = array(np.zeros((128, 64)), np.uint32)
    launch(kernel("st", shape, count, half), out, block=128, smem=1024, arch="sm_100a")
    expected = np.arange(128, dtype=np.uint32)[:, None] << np.uint32(16) | np.arange(64, dtype=np.uint32)
    for warp in range(4):
        for t, i, lane, column in places(shape, count):
            expected[32 * warp + half + lane, column] = (32 * warp + t) * 1000 + i + 1
    np.testing.assert_array_equal(out, expected)


def test_packed_load_joins_the_low_halves_of_two_columns(launch: Launch, array: Make) -> None:
    out = array(np.zeros((128, 4)), np.uint32)
    launch(kernel("ld", "32x32b", 4, 0, packed=".pack::16b"), out, block=128, smem=1024, arch="sm_100a")
    # the low half of a cell is its column
    np.testing.assert_array_equal(out, [[2 * i | (2 * i + 1) << 16 for i in range(4)]] * 128)


def test_unpacked_store_spreads_a_register_over_two_columns(launch: Launch, array: Make) -> None:
    out = array(np.zeros((128, 64)), np.uint32)
    launch(kernel("st", "32x32b", 2, 0, packed=".unpack::16b"), out, block=128, smem=1024, arch="sm_100a")
    values = np.arange(128, dtype=np.uint32)[:, None] * np.uint32(1000) + np.arange(1, 3, dtype=np.uint32)
    np.testing.assert_array_equal(out[:, :4] & 0xFFFF, values.view(np.uint16))


def test_store_is_in_flight_until_its_wait(launch: Launch, array: Make) -> None:
    out = array(np.zeros((128, 64)), np.uint32)
    with pytest.raises(Fault, match="wait::st has not been executed") as found:
        launch(kernel("st", "16x256b", 1, 0, wait=";"), out, block=128, smem=1024, arch="sm_100a")
    assert found.value.kind == "pending-write"


ANTI = """extern "C" __global__ void kernel_test(u32* out) {
    const u32 base = tensor_begin(32), at = base + (threadIdx.x / 32 * 32 << 16);
    tensor_store_word(at, 1);
    tensor_wait_stores();
    u32 r;
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];" : "=r"(r) : "r"(at) : "memory");
    WAIT
    tensor_store_word(at, 2);
    tensor_wait_stores();
    out[threadIdx.x] = r;
    tensor_end(base, 32);
}"""


def test_store_over_a_load_that_is_not_waited_for_is_reported(launch: Launch, array: Make) -> None:
    out = array(np.zeros(128), np.uint32)
    with pytest.raises(Fault, match="may still read") as found:
        launch(ANTI.replace("WAIT", ""), out, block=128, smem=1024, arch="sm_100a")
    assert found.value.kind == "pending-read"
    launch(ANTI.replace("WAIT", "tensor_wait_loads();"), out, block=128, smem=1024, arch="sm_100a")
    assert (out == 1).all()


@pytest.mark.parametrize("strict", [True, False])
def test_register_before_the_wait_depends_on_the_mode(launch: Launch, array: Make, strict: bool) -> None:
    """PTX ISA 9.7.16.6.4.5 respects a register dependency, so practice mode does; the strict mode wants the wait."""
    source = ANTI.replace("WAIT", "out[threadIdx.x] = r + 5; tensor_wait_loads();").replace("out[threadIdx.x] = r;", "")
    out = array(np.zeros(128), np.uint32)
    options = {"block": 128, "smem": 1024, "arch": "sm_100a", "strict_tensor_order": strict}
    if strict:
        with pytest.raises(Fault, match=r"tcgen05.ld's register is used"):
            launch(source, out, **options)
    else:
        launch(source, out, **options)
        assert (out == 6).all()


@pytest.mark.parametrize(("what", "shape", "half"), [("ld", "32x32b", 0), ("st", "16x64b", 16)])
@pytest.mark.parametrize("lane", ["0", "(t / 32 + 4) * 32"])
def test_lane_of_another_quadrant_depends_on_the_mode(
    launch: Launch, array: Make, what: str, shape: str, half: int, lane: str
) -> None:
    """Strict: a warp names its own lanes (PTX ISA 9.7.16.2.3.1). Practice: the warp decides the quadrant."""
    usual = kernel(what, shape, 1, half)
    source = usual.replace(f"base + quadrant + ({half} << 16)", f"base + ({lane} + {half} << 16)")
    assert source != usual
    out, expected = (array(np.zeros((128, 64 if what == "st" else 1)), np.uint32) for _ in range(2))
    options = {"block": 128, "smem": 1024, "arch": "sm_100a"}
    with pytest.raises(Fault, match="which may touch lanes") as found:
        launch(source, out, **options)
    assert found.value.kind == "tensor-memory"
    launch(source, out, **options, strict_tensor_order=False)
    launch(usual, expected, **options)
    np.testing.assert_array_equal(out, expected)


def test_cells_that_nothing_wrote_are_reported(launch: Launch, array: Make) -> None:
    source = """extern "C" __global__ void kernel_test(u32* out) {
        const u32 base = tensor_begin(32);
        tensor_dump(out, base, 32);
        tensor_end(base, 32);
    }"""
    with pytest.raises(Fault, match="nothing wrote column") as found:
        launch(source, array(np.zeros((128, 32)), np.uint32), block=128, smem=1024, arch="sm_100a")
    assert found.value.kind == "unwritten-read"


def test_lanes_that_disagree_on_the_address_are_reported(launch: Launch, array: Make) -> None:
    source = ANTI.replace("tensor_store_word(at, 1)", "tensor_store_word(at + threadIdx.x % 2, 1)").replace("WAIT", "")
    with pytest.raises(Fault, match="disagree on a tensor memory address"):
        launch(source, array(np.zeros(128), np.uint32), block=128, smem=1024, arch="sm_100a")


def test_a_hand_over_needs_both_fences(launch: Launch, array: Make) -> None:
    """Warp w and warp w + 4 share a quadrant: one stores, the other loads behind a barrier."""
    source = """extern "C" __global__ void kernel_test(u32* out) {
        const u32 base = tensor_begin(32), at = base + (threadIdx.x / 32 % 4 * 32 << 16);
        if (threadIdx.x < 128) {
            tensor_store_word(at, threadIdx.x);
            tensor_wait_stores();
            BEFORE
        }
        __syncthreads();
        if (threadIdx.x >= 128) {
            AFTER
            out[threadIdx.x - 128] = tensor_load_word(at);
        }
        tensor_end(base, 32);
    }"""
    before, after = "tensor_fence_before();", "tensor_fence_after();"
    for one, other, words in ((before, "", "after_thread_sync stands behind"), ("", after, "before_thread_sync since")):
        text = source.replace("BEFORE", one).replace("AFTER", other)
        with pytest.raises(Fault, match=words) as found:
            launch(text, array(np.zeros(128), np.uint32), block=256, smem=1024, arch="sm_100a")
        assert found.value.kind == "fence"
    out = array(np.zeros(128), np.uint32)
    launch(source.replace("BEFORE", before).replace("AFTER", after), out, block=256, smem=1024, arch="sm_100a")
    assert out.tolist() == list(range(128))


@pytest.mark.parametrize(("strict", "stored"), [(True, False), (False, False), (False, True)])
def test_a_load_that_was_waited_for_needs_no_fence_in_practice(
    launch: Launch, array: Make, strict: bool, stored: bool
) -> None:
    """Warp w loads, warp w + 4 overwrites behind a barrier: what w itself stored before keeps its fence."""
    source = f"""extern "C" __global__ void kernel_test(u32* out) {{
        const u32 base = tensor_begin(32), at = base + (threadIdx.x / 32 % 4 * 32 << 16);
        if (threadIdx.x < 128) {{
            tensor_store_word(at, threadIdx.x);
            tensor_wait_stores();
            {"" if stored else "tensor_fence_before();"}
            out[threadIdx.x] = tensor_load_word(at);
        }}
        __syncthreads();
        if (threadIdx.x >= 128) {{
            tensor_fence_after();
            tensor_store_word(at, 0);
            tensor_wait_stores();
        }}
        tensor_end(base, 32);
    }}"""
    out = array(np.zeros(128), np.uint32)
    options = {"block": 256, "smem": 1024, "arch": "sm_100a", "strict_tensor_order": strict}
    if strict or stored:
        with pytest.raises(Fault, match="before_thread_sync since") as found:
            launch(source, out, **options)
        assert found.value.kind == "fence"
    else:
        launch(source, out, **options)
        assert out.tolist() == list(range(128))


FREED = """extern "C" __global__ void kernel_test(u32* out) {
    const u32 base = tensor_begin(32), at = base + (threadIdx.x / 32 % 4 * 32 << 16);
    tensor_store_word(at, threadIdx.x);
    tensor_wait_stores();
    LOAD
    asm volatile("barrier.cluster.arrive.ORDER.aligned;\\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (threadIdx.x < 32) {
        tensor_dealloc<1>(base, 32);
    }
}"""


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("order", ["relaxed", "release"])
@pytest.mark.parametrize("load", ["out[threadIdx.x] = tensor_load_word(at);", ""], ids=["loaded", "stored"])
def test_dealloc_behind_a_barrier_that_publishes_nothing(
    launch: Launch, array: Make, load: str, order: str, strict: bool
) -> None:
    """PTX ISA 9.7.13.3: `.relaxed` orders no memory. In practice a load is over with its `wait::ld`; a store is not."""
    source = FREED.replace("LOAD", load).replace("ORDER", order)
    options = {"block": 128, "smem": 1024, "arch": "sm_100a", "strict_tensor_order": strict}
    out = array(np.zeros(128), np.uint32)
    if order == "relaxed" and (strict or not load):
        with pytest.raises(Fault, match=r"dealloc frees columns 0 to 31, .* and nothing orders the two") as found:
            launch(source, out, **options)
        assert found.value.kind == "race"
    else:
        launch(source, out, **options)
        assert out.tolist() == (list(range(128)) if load else [0] * 128)


ALLOCATIONS = """extern "C" __global__ void kernel_test(u32* out) {
    const u32 smem = smem_base();
    // 256, 128, then 128 twice with a release between: the last one has to wait for it
    if (threadIdx.x < 32) {
        tensor_alloc<1>(smem, 256);
        tensor_alloc<1>(smem + 4, 128);
        tensor_alloc<1>(smem + 8, 128);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        tensor_alloc<1>(smem + 12, 64);
        warp_sync();
        tensor_dealloc<1>(tensor_base(smem), 256);
        tensor_dealloc<1>(tensor_base(smem + 8), 128);
        tensor_dealloc<1>(tensor_base(smem + 12), 64);
    } else {
        for (u32 i = 0; i < 3; ++i) out[i] = tensor_base(smem + 4 * i);
        tensor_dealloc<1>(tensor_base(smem + 4), 128);
    }
}"""


@pytest.mark.parametrize("schedule", [("early", 0), ("late", 0), ("random", 1), ("random", 2)])
def test_allocation_waits_for_room_and_takes_any_that_is_free(
    launch: Launch, array: Make, schedule: tuple[str, int]
) -> None:
    out = array(np.zeros(3), np.uint32)
    launch(ALLOCATIONS, out, block=64, smem=1024, arch="sm_100a", adversary=Adversary(*schedule))
    first, second, third = (int(value) for value in out)
    assert (first % 256, second % 128, third % 128) == (0, 0, 0)
    covered = {*range(first, first + 256), *range(second, second + 128), *range(third, third + 128)}
    assert covered == set(range(512))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("smem + 4, 128", "smem + 4, 512"), "must not grow"),
        (("smem + 12, 64", "smem + 12, 16"), "needs 32, 64"),
        (("tensor_base(smem), 256", "tensor_base(smem) + 32, 256"), "allocated: "),
    ],
)
def test_allocation_fault_is_reported(launch: Launch, array: Make, change: tuple[str, str], words: str) -> None:
    with pytest.raises(Fault, match=words) as found:
        launch(ALLOCATIONS.replace(*change), array(np.zeros(3), np.uint32), block=64, smem=1024, arch="sm_100a")
    assert found.value.kind == "tensor-memory"


def test_allocation_that_can_never_succeed_is_a_deadlock(launch: Launch, array: Make) -> None:
    source = ALLOCATIONS.replace("tensor_dealloc<1>(tensor_base(smem + 4), 128);", "")
    with pytest.raises(Fault, match="waits for 64 free columns of tensor memory"):
        launch(source, array(np.zeros(3), np.uint32), block=64, smem=1024, arch="sm_100a")


def test_form_that_is_not_modelled_is_refused(launch: Launch, array: Make) -> None:
    source = """extern "C" __global__ void kernel_test(u32* out) {
        const u32 base = tensor_begin(32);
        if (threadIdx.x == 0) asm volatile("tcgen05.shift.cta_group::1.down [%0];" :: "r"(base) : "memory");
        tensor_end(base, 32);
    }"""
    with pytest.raises(EmulationError, match=r"tcgen05\.shift.* is not modelled"):
        launch(source, array(np.zeros(3), np.uint32), block=64, smem=1024, arch="sm_100a")


def test_fence_behind_the_ordering_wait_holds_over_later_waits(launch: Launch, array: Make) -> None:
    """Other barriers between the fence and the load do not undo it."""
    source = """extern "C" __global__ void kernel_test(u32* out) {
        const u32 base = tensor_begin(32), at = base + (threadIdx.x / 32 % 4 * 32 << 16);
        if (threadIdx.x < 128) {
            tensor_store_word(at, threadIdx.x);
            tensor_wait_stores();
            tensor_fence_before();
        }
        __syncthreads();
        tensor_fence_after();
        if (threadIdx.x >= 128) {
            named_barrier_sync(1, 128);
            out[threadIdx.x - 128] = tensor_load_word(at);
        }
        tensor_end(base, 32);
    }"""
    out = array(np.zeros(128), np.uint32)
    launch(source, out, block=256, smem=1024, arch="sm_100a")
    assert out.tolist() == list(range(128))
