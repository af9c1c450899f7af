"""`wgmma` of all types, layouts and operands (PTX ISA 9.7.15): values against fp64, and planted faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.text.parse import parse_kernel
from cakegen.emulator.text.translate import Program
from cakegen.emulator.units.product_values import add_integers
from cakegen.emulator.units.tensor_core import multiply_add_hopper_fp8, multiply_add_wide
from cakegen.errors import EmulationError

pytestmark = pytest.mark.emulator

Launch = Callable[..., Machine]
Make = Callable[..., np.ndarray]

TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
WIDTH = {"f16": 2, "bf16": 2, "tf32": 4}
SUMS = {"f32": np.float32, "f16": np.float16, "s32": np.int32}
CODES = {16: 0, 32: 3, 64: 2, 128: 1}
A_AT, B_AT = 0, 16384


def encoded(kind: str, shape: tuple[int, int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(codes, their values in fp64) of small numbers."""
    draw = np.random.default_rng(seed)
    if kind in TORCH:
        numbers = torch.tensor(draw.standard_normal(shape)).to(TORCH[kind])
        codes = numbers.view(torch.uint8 if kind[0] == "e" else torch.int16).numpy()
        return codes.view(f"u{codes.itemsize}"), numbers.to(torch.float64).numpy()
    if kind == "tf32":
        values = np.float32(draw.integers(-500, 500, shape) / 64)
        return values.view("u4") | np.uint32(0x1ABC), values.astype(np.float64)
    values = draw.integers(-128, 128, shape) if kind == "s8" else draw.integers(0, 256, shape)
    return (values & 255).astype("u1"), values.astype(np.float64)


def laid_out(codes: np.ndarray, row_bytes: int, across: bool) -> tuple[np.ndarray, int, int]:
    """(bytes of 16 KiB from a multiple of 1024, leading, stride) of an operand `[rows, k]`: atoms in a row.

    Atoms are 8 rows of `row_bytes`: of K-major operands a row holds elements along K, else along M or N. A row's
    16-byte chunks are swizzled as TMA does it: chunk c of 128-byte line y of the memory lies at c ^ y % 8, and so on.
    """
    memory = np.zeros(16384, np.uint8)
    matrix = np.ascontiguousarray(codes.T if across else codes)
    lines = matrix.view(np.uint8).reshape(matrix.shape[0], -1)
    # without a swizzle atoms of 128 bytes follow each other along the row first
    atoms_along = -(-lines.shape[1] // row_bytes)
    for at, line in enumerate(lines):
        for byte, value in enumerate(line):
            atom = at // 8 * atoms_along + byte // row_bytes
            place = atom * 8 * row_bytes + at % 8 * row_bytes + byte % row_bytes
            chunk, rest = divmod(place, 16)
            memory[(chunk ^ (place >> 7 & (row_bytes // 16 - 1))) * 16 + rest] = value
    along, groups = 8 * row_bytes, atoms_along * 8 * row_bytes
    # which field steps over what: PTX ISA 9.7.15.5.1
    return (memory, groups, along) if across and row_bytes == 16 else (memory, along, groups)


def descriptor(start: int, leading: int, stride: int, row_bytes: int) -> str:
    fixed = leading >> 4 << 16 | stride >> 4 << 32 | CODES[row_bytes] << 62
    return f"((unsigned long long)(smem + {start}) >> 4 | {fixed:#x}ull)"


def kernel(opcode: str, count: int, a: str, b: str, tail: str, letter: str, before: str = "", behind: str = "") -> str:
    """A warpgroup's product; `a` is a descriptor or registers of `in_a`."""
    regs = ", ".join(f"%{i}" for i in range(count))
    from_registers = a == "registers"
    left = f"{{{', '.join(f'%{count + i}' for i in range(4))}}}" if from_registers else f"%{count}"
    at = count + (4 if from_registers else 1)
    ins = ", ".join(f'"r"(a[{i}])' for i in range(4)) if from_registers else f'"l"({a})'
    outs = ", ".join(f'"+{letter}"(d[{i}])' for i in range(count))
    kind = "float" if letter == "f" else "u32"
    return f"""
    #define ASM(...) asm volatile(__VA_ARGS__)
    extern "C" __global__ void kernel_test(u32* out, const u32* image, const u32* in_a, const u32* in_c) {{
        const u32 t = threadIdx.x, smem = smem_base() + 1023 & ~1023u;
        for (u32 i = t; i < 8192; i += 128) ASM("st.shared.u32 [%0], %1;" :: "r"(smem + 4 * i), "r"(image[i]));
        fence_proxy_async_shared();
        __syncthreads();
        {kind} d[{count}];
        for (u32 i = 0; i < {count}; ++i) d[i] = (({kind}*)in_c)[128 * i + t];
        u32 a[4];
        for (u32 i = 0; i < 4; ++i) a[i] = in_a[128 * i + t];
        {before}
        ASM("wgmma.fence.sync.aligned;" ::: "memory");
        ASM("wgmma.mma_async.sync.aligned.{opcode} {{{regs}}}, {left}, %{at}, {tail};"
            : {outs} : {ins}, "l"({b}) : "memory");
        ASM("wgmma.commit_group.sync.aligned;" ::: "memory");
        {behind}
        ASM("wgmma.wait_group.sync.aligned 0;" : {outs} :: "memory");
        for (u32 i = 0; i < {count}; ++i) (({kind}*)out)[128 * i + t] = d[i];
    }}"""


def fragments(matrix: np.ndarray, place: Callable[[int, int], tuple[int, int]], count: int) -> np.ndarray:
    """`[registers, 128]` words of a matrix of 64 rows: element i of a lane is at `place(i, lane)` of its warp's 16."""
    per = 4 // matrix.itemsize
    words = np.zeros((count, 128, per), matrix.dtype)
    for thread in range(128):
        for i in range(count * per):
            row, column = place(i, thread % 32)
            words[i // per, thread, i % per] = matrix[16 * (thread // 32) + row, column]
    return np.ascontiguousarray(words).view("u4")[:, :, 0].copy()


def d_place(i: int, lane: int) -> tuple[int, int]:
    return lane // 4 + 8 * (i >> 1 & 1), 8 * (i >> 2) + 2 * (lane % 4) + (i & 1)


def a_place(width: int) -> Callable[[int, int], tuple[int, int]]:
    per = 4 // width
    return lambda e, lane: (
        lane // 4 + 8 * (e // per & 1),
        per * (lane % 4) + e % per + 4 * per * (e // per >> 1),
    )


def run(
    launch: Launch,
    array: Make,
    types: str,
    n: int = 16,
    layout: tuple[int, int] = (128, 128),
    across: tuple[bool, bool] = (False, False),
    scales: tuple[int, int] = (1, 1),
    from_registers: bool = False,
    accumulate: int = 1,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """(what the emulator got, fp64) of one product with random operands."""
    d_kind, a_kind, b_kind = types.removesuffix(".satfinite").split(".")
    width = WIDTH.get(a_kind, 1)
    k = 32 // width
    (a, a_values), (b, b_values) = encoded(a_kind, (64, k), 1), encoded(b_kind, (n, k), 2)
    c = (20 * np.random.default_rng(3).standard_normal((64, n))).astype(SUMS[d_kind])
    images, descriptors = [], []
    for codes, row_bytes, is_across, start in ((a, layout[0], across[0], A_AT), (b, layout[1], across[1], B_AT)):
        image, leading, stride = laid_out(codes, row_bytes, is_across)
        images.append(image)
        descriptors.append(descriptor(start, leading, stride, row_bytes))
    count = n // (4 if d_kind == "f16" else 2)
    integer = d_kind == "s32"
    tail = [str(accumulate)] + ([] if integer else [str(each) for each in scales])
    if width == 2:
        tail += [str(int(each)) for each in across[from_registers:]]
    suffix = ".satfinite" if types.endswith(".satfinite") else ""
    opcode = f"m64n{n}k{k}.{d_kind}.{a_kind}.{b_kind}{suffix}"
    a_text = "registers" if from_registers else descriptors[0]
    source = kernel(opcode, count, a_text, descriptors[1], ", ".join(tail), "f" if d_kind == "f32" else "r")
    out = array(np.zeros((count, 128)), np.uint32)
    in_a = array(fragments(a, a_place(width), 4), np.uint32)
    in_c = array(fragments(c, d_place, count), np.uint32)
    launch(source, out, array(np.concatenate(images).view("u4")), in_a, in_c, block=128, smem=40960, **options)
    found = np.zeros((64, n), SUMS[d_kind])
    elements = out[:, :, None].view(SUMS[d_kind])
    per = elements.shape[2]
    for thread in range(128):
        for i in range(count * per):
            row, column = d_place(i, thread % 32)
            found[16 * (thread // 32) + row, column] = elements[i // per, thread, i % per]
    exact = scales[0] * scales[1] * (a_values @ b_values.T) + accumulate * c.astype(np.float64)
    return found, exact


FLOATS = ["f32.f16.f16", "f32.bf16.bf16", "f32.tf32.tf32", "f16.f16.f16"]
FP8 = ["f32.e4m3.e4m3", "f32.e5m2.e4m3", "f32.e4m3.e5m2", "f16.e4m3.e4m3", "f16.e5m2.e5m2"]
INTEGERS = ["s32.s8.s8", "s32.u8.s8", "s32.s8.u8", "s32.u8.u8", "s32.s8.s8.satfinite"]


def close(found: np.ndarray, exact: np.ndarray, types: str) -> bool:
    if types.startswith("s32"):
        return bool((found == exact).all())
    tolerance = 2e-2 if ".e" in types or types.startswith("f16") else 1e-4
    return bool(np.abs(found.astype(np.float64) - exact).max() <= tolerance * max(1.0, np.abs(exact).max() / 16))


@pytest.mark.parametrize("from_registers", [False, True], ids=["descriptor", "registers"])
@pytest.mark.parametrize("types", FLOATS + FP8 + INTEGERS)
def test_product_of_each_type(launch: Launch, array: Make, types: str, from_registers: bool) -> None:
    found, exact = run(launch, array, types, from_registers=from_registers)
    assert close(found, exact, types)


@pytest.mark.parametrize("row_bytes", [16, 32, 64, 128])
@pytest.mark.parametrize("across", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("types", ["f32.bf16.bf16", "f16.f16.f16"])
def test_operand_of_each_layout(
    launch: Launch, array: Make, types: str, row_bytes: int, across: tuple[bool, bool]
) -> None:
    found, exact = run(launch, array, types, 72, (row_bytes, row_bytes), across)
    assert close(found, exact, types)


@pytest.mark.parametrize("types", ["f32.tf32.tf32", "s32.s8.s8", "f32.e4m3.e4m3"])
@pytest.mark.parametrize("row_bytes", [16, 32, 64])
def test_other_widths_in_each_swizzle(launch: Launch, array: Make, types: str, row_bytes: int) -> None:
    found, exact = run(launch, array, types, 32, (row_bytes, row_bytes))
    assert close(found, exact, types)


@pytest.mark.parametrize("scales", [(-1, 1), (1, -1), (-1, -1)])
@pytest.mark.parametrize("types", ["f32.bf16.bf16", "f32.f16.f16", "f16.f16.f16", "f32.e4m3.e5m2", "f32.tf32.tf32"])
def test_negated_operand(launch: Launch, array: Make, types: str, scales: tuple[int, int]) -> None:
    found, exact = run(launch, array, types, scales=scales)
    assert close(found, exact, types)


@pytest.mark.parametrize("types", ["f16.f16.f16", "s32.s8.s8", "f32.f16.f16"])
@pytest.mark.parametrize("schedule", [("late", 0), ("random", 1)])
def test_product_from_zero_leaves_the_accumulator(
    launch: Launch, array: Make, types: str, schedule: tuple[str, int]
) -> None:
    found, exact = run(launch, array, types, accumulate=0, adversary=Adversary(*schedule))
    assert close(found, exact, types)


def test_b_is_transposed_beside_a_in_registers(launch: Launch, array: Make) -> None:
    found, exact = run(launch, array, "f32.f16.f16", 64, (128, 128), (False, True), from_registers=True)
    assert close(found, exact, "f32.f16.f16")


def test_integer_sum_stays_in_range_with_satfinite() -> None:
    a, b, c = np.full((1, 32), 127), np.full((1, 32), 127), np.array([[2**31 - 1]], np.int32)
    assert add_integers(a, b, c, True).tolist() == [[2**31 - 1]]
    assert add_integers(a, b, c, False).tolist() == [[-(2**31) - 1 + 32 * 127 * 127]]


def test_fp8_sum_keeps_thirteen_bits() -> None:
    """1 + 2 ** -13 is kept, 2 ** -14 is cut, beside the accumulator and beside a product."""
    a, b = np.zeros((1, 32), np.float32), np.zeros((1, 32), np.float32)
    a[0, :2], b[0, :2] = (1.0, 2.0**-7), (1.0, 2.0**-6)
    zero = np.zeros((1, 1), np.float32)
    assert multiply_add_hopper_fp8(a, b, zero).tolist() == [[1 + 2.0**-13]]
    b[0, 1] = 2.0**-7
    assert multiply_add_hopper_fp8(a, b, zero).tolist() == [[1.0]]
    assert multiply_add_wide(a, b, zero).tolist() == [[1 + 2.0**-14]]
    a[0, 0] = 0
    assert multiply_add_hopper_fp8(a, b, np.float32([[1 + 2.0**-13]])).tolist() == [[1 + 2.0**-13]]
    assert multiply_add_hopper_fp8(a, b, np.float32([[-1 - 2.0**-14]])).tolist() == [[-1.0]]
    a[0, 5] = np.nan
    assert np.isnan(multiply_add_hopper_fp8(a, b, zero)).all()


PLAIN = descriptor(B_AT, 512, 1024, 128)


def plain(**parts: str) -> str:
    return kernel("m64n8k16.f32.f16.f16", 4, "registers", PLAIN, "1, 1, 1, 0", "f", **parts)


@pytest.mark.parametrize(
    ("source", "report"),
    [
        (plain(behind="for (u32 i = 0; i < 4; ++i) ((float*)out)[i] = d[i];"), "pending-write: an accumulator"),
        (plain(behind='ASM("add.u32 %0, %0, 1;" : "+r"(a[2]));'), "pending-read: a register of A"),
        (kernel("m64n8k16.f32.f16.f16", 4, descriptor(A_AT + 128, 16, 1024, 128), PLAIN, "1, 1, 1, 0, 0", "f"), "desc"),
        (kernel("m64n8k16.f32.f16.f16", 4, descriptor(A_AT, 16, 256, 64), PLAIN, "1, 1, 1, 0, 0", "f"), "descriptor"),
        (kernel("m64n8k16.f32.f16.f16", 4, descriptor(A_AT + 64, 16, 512, 32), PLAIN, "1, 1, 1, 0, 0", "f"), "desc"),
        (kernel("m64n8k16.f32.f16.f16", 4, descriptor(A_AT, 16, 32768, 16), PLAIN, "1, 1, 1, 0, 0", "f"), "desc"),
    ],
)
def test_planted_fault_is_reported(launch: Launch, array: Make, source: str, report: str) -> None:
    given = array(np.zeros(8192), np.uint32)
    zeros = array(np.zeros((64, 128)), np.uint32)
    out = array(np.zeros(1024), np.uint32)
    with pytest.raises(Fault, match=f"^{report}"):
        launch(source, out, given, zeros, array(np.zeros((64, 128)), np.uint32), block=128, smem=40960)


@pytest.mark.parametrize(
    ("opcode", "tail", "why"),
    [
        ("m64n8k8.f32.tf32.tf32", "1, 1, 1, 0, 0", "this form of wgmma"),
        ("m64n8k16.f32.f16.f16", "1, 1, 2, 0, 0", "this form of wgmma"),
        ("m64n8k16.f32.f16.f16", "1, 1, 1, 0", "this form of wgmma"),
        ("m64n12k16.f32.f16.f16", "1, 1, 1, 0, 0", "this form of wgmma"),
        ("m64n8k16.f32.f16.bf16", "1, 1, 1, 0, 0", "this form of wgmma"),
        ("m64n16k16.f32.f16.f16", "1, 1, 1, 0, 0", "needs 8 accumulator registers; got 4"),
    ],
)
def test_other_form_is_refused_with_its_place(opcode: str, tail: str, why: str) -> None:
    text = f""".version 8.7
.target sm_90a
.address_size 64
.visible .entry k() {{
 .reg .f32 %f<5>; .reg .b64 %rd<3>;
 wgmma.mma_async.sync.aligned.{opcode} {{%f1, %f2, %f3, %f4}}, %rd1, %rd2, {tail};
 ret;
}}"""
    with pytest.raises(EmulationError, match=f"PTX line 6.*{why}"):
        Program(parse_kernel(text, "k")).translate_all()
