"""tcgen05.mma and cp: where operands lie, and what an instruction does with them (PTX ISA 9.7.16.4, 9.7.16.10)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.units.tcgen05.descriptors import decode_instruction, decode_shared
from cakegen.emulator.units.tcgen05.mma import accumulator_region
from cakegen.emulator.units.tensor_core import bf16_to_f32
from cakegen.errors import EmulationError

Launch = Callable[..., Machine]
Make = Callable[..., np.ndarray]

# Swizzle -> (code in the descriptor, elements of a row of its atom)
SWIZZLES = {"none": (0, 8), "32B": (6, 16), "64B": (4, 32), "128B": (2, 64)}


def image(matrix: np.ndarray, swizzle: str, across: bool) -> tuple[np.ndarray, int, int]:
    """(bytes, leading, stride) of a `[rows, 16]` operand as the canonical layouts place it, atom after atom.

    Atoms are 8 rows of `width` elements, of K for K-major and of M or N across; 16-byte chunk c of row r of an atom
    lies at chunk c ^ (r * width / 64 % chunks), which is what a copy with that swizzle does.
    """
    _, width = SWIZZLES[swizzle]
    rows = matrix.shape[0]
    lines = matrix.T if across else matrix
    padded = np.zeros((lines.shape[0], -(-lines.shape[1] // width) * width), np.uint16)
    padded[:, : lines.shape[1]] = lines
    chunks = width // 8
    out = np.zeros_like(padded).reshape(-1, 8)
    atoms_down, atoms_over = padded.shape[0] // 8, padded.shape[1] // width
    for down in range(atoms_down):
        for over in range(atoms_over):
            # atoms that follow each other along the lines' numbers lie side by side
            base = (over * atoms_down + down) * 8 * chunks
            for r in range(8):
                for c in range(chunks):
                    source = padded[down * 8 + r, over * width + 8 * c : over * width + 8 * c + 8]
                    out[base + r * chunks + (c ^ (r * chunks // 8 % chunks))] = source
    atom = 16 * width
    between_over, between_down = atoms_down * atom, atom
    if swizzle == "none" and across:
        return out.view(np.uint8).reshape(-1), between_down, between_over
    assert across or swizzle == "none" or rows >= 8
    return out.view(np.uint8).reshape(-1), between_over, between_down


KERNEL = """extern "C" __global__ void kernel_test(
    float* out, const u16* image_a, const u16* image_b, u64* record, u64 a_high, u64 b_high, u32 shape) {
    const u32 t = threadIdx.x, smem = smem_base();
    const Watch watch{record, 1};
    for (u32 i = t; i < A_BYTES / 16; i += 128) st_shared_v4(smem + 1024 + 16 * i, ld_global_v4(image_a + 8 * i));
    for (u32 i = t; i < B_BYTES / 16; i += 128) {
        st_shared_v4(smem + 1024 + A_SPACE + 16 * i, ld_global_v4(image_b + 8 * i));
    }
    const u32 base = tensor_begin(32);
    if (t == 0) {
        const u64 a = a_high | (smem + 1024) >> 4, b = b_high | (smem + 1024 + A_SPACE) >> 4;
        ISSUE
        tensor_commit<1>(smem);
    }
    mbarrier_wait(smem, 0, watch);
    tensor_fence_after();
    tensor_dump(reinterpret_cast<u32*>(out), base, 16);
    tensor_end(base, 32);
}"""
ONCE = "tensor_mma<1>(base, a, b, shape, 0);"


def values(rows: int, seed: int) -> np.ndarray:
    floats = np.random.default_rng(seed).integers(-8, 9, (rows, 16)).astype(np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16)


def run(
    launch: Launch,
    array: Make,
    *,
    a_layout: tuple[str, bool] = ("128B", False),
    b_layout: tuple[str, bool] = ("128B", False),
    issue: str = ONCE,
    flags: int = 0,
    strict: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """(what `[128, 16]` cells hold, `a b^T`) for operands in some layouts."""
    a, b = values(128, 1), values(16, 2)
    images, highs = [], []
    for matrix, (swizzle, across) in ((a, a_layout), (b, b_layout)):
        data, leading, stride = image(matrix, swizzle, across)
        images.append(array(data))
        code = SWIZZLES[swizzle][0]
        highs.append((leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | code << 61)
    space = -(-images[0].size // 1024) * 1024
    text = KERNEL.replace("A_BYTES", str(images[0].size)).replace("B_BYTES", str(images[1].size))
    text = text.replace("A_SPACE", str(space)).replace("ISSUE", issue)
    shape = 0x490 | a_layout[1] << 15 | b_layout[1] << 16 | 2 << 17 | 8 << 24 | flags
    out = array(np.full((128, 16), np.nan), np.float32)
    record = array(np.full(16, 1 << 60), np.uint64)
    smem = 1024 + space + images[1].size
    options = {"block": 128, "smem": smem, "arch": "sm_100a", "strict_tensor_order": strict}
    launch(text, out, *images, record, *highs, shape, **options)
    return out, bf16_to_f32(a) @ bf16_to_f32(b).T


LAYOUTS = [(swizzle, across) for swizzle in SWIZZLES for across in (False, True)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda value: f"{value[0]}-{'across' if value[1] else 'along'}")
@pytest.mark.parametrize("which", ["a", "b"])
def test_operand_in_every_canonical_layout(launch: Launch, array: Make, which: str, layout: tuple[str, bool]) -> None:
    out, expected = run(launch, array, **{f"{which}_layout": layout})
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("flags", "sign"), [(1 << 13, -1), (1 << 14, -1), (3 << 13, 1)])
def test_operands_may_be_negated(launch: Launch, array: Make, flags: int, sign: int) -> None:
    out, expected = run(launch, array, flags=flags)
    np.testing.assert_array_equal(out, sign * expected)


def test_accumulator_is_added_to_and_scaled(launch: Launch, array: Make) -> None:
    """`D = A B + D 2^-3` behind `D = A B`, `D = A B + D`."""
    scaled = """asm volatile("{ .reg .pred p; setp.ne.u32 p, 1, 0;"
        " tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p, 3; }" :: "r"(base), "l"(a), "l"(b), "r"(shape));"""
    out, expected = run(launch, array, issue=ONCE + ONCE.replace("0);", "1);") + scaled)
    np.testing.assert_array_equal(out, expected * 1.25)


def test_masked_lanes_keep_what_they_had(launch: Launch, array: Make) -> None:
    """Bit i of word j keeps lane 32 j + i."""
    masked = """asm volatile("{ .reg .pred p; setp.ne.u32 p, 1, 0;"
        " tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, {%4, %5, %6, %7}, p; }"
        :: "r"(base), "l"(a), "l"(b), "r"(shape), "r"(1u), "r"(0u), "r"(0x80000000u), "r"(6u));"""
    out, expected = run(launch, array, issue=ONCE + masked)
    factor = np.full((128, 1), 2)
    factor[[0, 95, 97, 98]] = 1
    np.testing.assert_array_equal(out, factor * expected)


def test_collector_holds_what_the_mma_before_kept(launch: Launch, array: Make) -> None:
    """A may come from the buffer only where it was filled with that A, and kept (PTX ISA 9.7.16.10.9.1)."""

    def product(use: str, a: str = "a", adds: int = 1) -> str:
        return f"""asm volatile("{{ .reg .pred p; setp.ne.u32 p, {adds}, 0;"
            " tcgen05.mma.cta_group::1.kind::f16.collector::a::{use} [%0], %1, %2, %3, p; }}"
            :: "r"(base), "l"({a}), "l"(b), "r"(shape));"""

    fill = product("fill", adds=0)
    out, expected = run(launch, array, issue=fill + product("use") + product("lastuse"))
    np.testing.assert_array_equal(out, 3 * expected)
    for wrong in (product("use"), fill + product("use", "a + 2"), fill + product("lastuse") + product("use")):
        with pytest.raises(Fault, match="did not keep this A") as found:
            run(launch, array, issue=wrong)
        assert found.value.kind == "descriptor"


# A into tensor memory by tcgen05.cp (row = lane, 8 columns), then as operand, without a wait: the ISA orders the two.
BY_COPY = """
    asm volatile("tcgen05.cp.cta_group::1.128x256b [%0], %1;" :: "r"(base + 16), "l"(a) : "memory");
    asm volatile("{ .reg .pred p; setp.ne.u32 p, 0, 0;"
        " tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, p; }" :: "r"(base), "r"(base + 16), "l"(b),
        "r"(shape));
"""


def test_a_may_come_from_tensor_memory(launch: Launch, array: Make) -> None:
    out, expected = run(launch, array, issue=BY_COPY)
    np.testing.assert_array_equal(out, expected)


def test_a_in_tensor_memory_that_nothing_wrote_is_reported(launch: Launch, array: Make) -> None:
    with pytest.raises(Fault, match="A") as found:
        run(launch, array, issue=BY_COPY.replace('base + 16), "l"(a)', 'base + 24), "l"(a)'))
    assert found.value.kind == "unwritten-read"


COPY = """extern "C" __global__ void kernel_test(u32* out, const u16* in, u64* record, u64 high) {
    const u32 t = threadIdx.x, smem = smem_base();
    const Watch watch{record, 1};
    for (u32 i = t; i < BYTES / 16; i += 128) st_shared_v4(smem + 1024 + 16 * i, ld_global_v4(in + 8 * i));
    const u32 base = tensor_begin(32);
    if (t == 0) {
        asm volatile("tcgen05.cp.cta_group::1.SHAPE [%0], %1;" :: "r"(base), "l"(high | (smem + 1024) >> 4) : "memory");
        tensor_commit<1>(smem);
    }
    mbarrier_wait(smem, 0, watch);
    tensor_fence_after();
    tensor_dump(out, base, COLUMNS);
    tensor_end(base, 32);
}"""


@pytest.mark.parametrize(
    ("shape", "rows", "quadrants"),
    [
        ("128x256b", 128, (0, 1, 2, 3)),
        ("128x128b", 128, (0, 1, 2, 3)),
        ("64x128b.warpx2::02_13", 64, (0, 1, 0, 1)),
        ("64x128b.warpx2::01_23", 64, (0, 0, 1, 1)),
        ("32x128b.warpx4", 32, (0, 0, 0, 0)),
    ],
)
def test_copy_spreads_rows_over_the_quadrants(
    launch: Launch, array: Make, shape: str, rows: int, quadrants: tuple[int, ...]
) -> None:
    columns = 8 if "256b" in shape else 4
    matrix = np.arange(rows * columns, dtype=np.uint32).reshape(rows, columns)
    data, leading, stride = image(matrix.view(np.uint16), "none", False)
    text = COPY.replace("BYTES", str(data.size)).replace("SHAPE", shape).replace("COLUMNS", str(columns))
    out, record = array(np.zeros((128, columns)), np.uint32), array(np.full(16, 1 << 60), np.uint64)
    high = (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46
    launch(text, out, array(data), record, high, block=128, smem=1024 + data.size, arch="sm_100a")
    np.testing.assert_array_equal(out.reshape(4, 32, columns), matrix.reshape(-1, 32, columns)[list(quadrants)])


TWO = """
    tensor_mma<1>(base, a, b, shape, 0);
    tensor_mma<1>(base, a, b, (shape & ~(63u << 17)) | 1 << 17, 1);
"""


def test_order_of_two_shapes_on_one_accumulator_is_a_matter_of_the_mode(launch: Launch, array: Make) -> None:
    """N 16, then N 8 on the same columns: the ISA lists only mmas of one shape as ordered."""
    with pytest.raises(Fault, match="still writes") as found:
        run(launch, array, issue=TWO)
    assert found.value.kind == "pending-write"
    out, expected = run(launch, array, issue=TWO, strict=False)
    np.testing.assert_array_equal(out, expected * ([2] * 8 + [1] * 8))


BASE = 1 << 46 | 2 << 61 | 64 << 32


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (BASE | 1 << 14, Fault, "reserved bits"),
        (BASE | 1 << 31, Fault, "reserved bits"),
        (BASE | 1 << 53, Fault, "reserved bits"),
        (BASE ^ 1 << 46, Fault, "0b000"),
        (BASE | 1 << 47, Fault, "0b011"),
        (BASE ^ 3 << 61, Fault, "swizzle code 1 is for 32-bit types"),
        (BASE | 1 << 61, Fault, "swizzle code 3 does not exist"),
        (BASE | 1 << 49, EmulationError, "base offset"),
        (BASE | 1 << 52, EmulationError, "absolute"),
    ],
)
def test_shared_descriptor_is_checked_bit_by_bit(value: int, error: type[Exception], words: str) -> None:
    decode_shared(BASE, "a")
    with pytest.raises(error, match=words):
        decode_shared(value, "a")


GOOD = 0x490 | 2 << 17 | 8 << 24


@pytest.mark.parametrize(
    ("value", "group", "words"),
    [
        (GOOD | 1 << 3, 1, "no use for"),
        (GOOD | 1 << 6, 1, "no use for"),
        (GOOD | 1 << 23, 1, "no use for"),
        (GOOD | 1 << 29, 1, "no use for"),
        (GOOD | 1 << 30, 1, "no use for"),
        (GOOD | 1 << 4 | 1 << 5, 1, "types D 3"),
        (GOOD ^ 1 << 4, 1, "no combination"),
        (GOOD | 2 << 7, 1, "types D 1, A 3"),
        (GOOD ^ 2 << 17, 1, "N 0"),
        (GOOD ^ 2 << 17 | 33 << 17, 1, "N 264"),
        (GOOD ^ 8 << 24 | 16 << 24, 1, "M 256"),
        (GOOD ^ 8 << 24 | 2 << 24, 1, "M 32"),
        (GOOD ^ 8 << 24 | 4 << 24, 2, "M 64"),
        (GOOD ^ 2 << 17 | 1 << 17, 2, "N 8 with"),
    ],
)
def test_instruction_descriptor_is_checked_bit_by_bit(value: int, group: int, words: str) -> None:
    decode_instruction(GOOD, group)
    with pytest.raises(Fault, match=words):
        decode_instruction(value, group)


@pytest.mark.parametrize("value", [GOOD | 4, GOOD | 1, GOOD ^ 0x490])
def test_instruction_that_is_legal_and_not_modelled_is_refused(value: int) -> None:
    """Sparse A, and an f16 accumulator."""
    with pytest.raises(EmulationError, match="modelled"):
        decode_instruction(value, 1)


def test_accumulator_starts_where_the_isa_allows() -> None:
    assert accumulator_region(0x00100000 | 32, 64, 16, 1).groups == slice(1, 8, 2)
    assert accumulator_region(32, 128, 64, 2).columns == slice(32, 64)
    for address, m, group in ((16 << 16, 128, 1), (8 << 16, 64, 1), (32 << 16, 64, 1), (16 << 16, 256, 2)):
        with pytest.raises(Fault, match="legal"):
            accumulator_region(address, m, 32, group)
