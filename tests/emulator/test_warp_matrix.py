"""`ldmatrix`, `stmatrix`, `movmatrix` and `mma.sync` (PTX ISA 9.7.14.5)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.text.parse import parse_kernel
from cakegen.emulator.text.translate import Program
from cakegen.errors import EmulationError

pytestmark = pytest.mark.emulator

Launch = Callable[..., Machine]
Make = Callable[..., np.ndarray]
KERNEL = """
#define ASM(...) asm volatile(__VA_ARGS__)
extern "C" __global__ void kernel_test"""

# Row or column of element i of a lane's fragment, with the lane's group g and its place t in it, as the ISA gives them.
Place = Callable[[int, int, int], tuple[int, int]]
PLACES: dict[str, Place] = {
    "A_F16": lambda i, g, t: (g + 8 * (i in (2, 3, 6, 7)), 2 * t + (i & 1) + (8 if i >= 4 else 0)),
    "B_F16": lambda i, g, t: (2 * t + (i & 1) + (8 if i >= 2 else 0), g),
    "A_BYTE": lambda i, g, t: (g + 8 * (i // 4 in (1, 3)), 4 * t + (i & 3) + (16 if i >= 8 else 0)),
    "B_BYTE": lambda i, g, t: (4 * t + (i & 3) + (16 if i >= 4 else 0), g),
    "A_NIBBLE": lambda i, g, t: (g + 8 * (i // 8 in (1, 3)), 8 * t + (i & 7) + (32 if i >= 16 else 0)),
    "B_NIBBLE": lambda i, g, t: (8 * t + (i & 7) + (32 if i >= 8 else 0), g),
    "A_WORD": lambda i, g, t: (g + 8 * (i & 1), t + 4 * (i >> 1)),
    "B_WORD": lambda i, g, t: (t + 4 * i, g),
    "A_EIGHT": lambda i, g, t: (g, 4 * t + i),
    "A_EIGHT_NIBBLE": lambda i, g, t: (g, 8 * t + i),
    "A_EIGHT_WORD": lambda i, g, t: (g, t),
    "C_ANY": lambda i, g, t: (g + 8 * (i >> 1), 2 * t + (i & 1)),
}

TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def encoded(kind: str, shape: tuple[int, int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(codes, their values in fp64) of small numbers."""
    draw = np.random.default_rng(seed)
    if kind in TORCH:
        numbers = torch.tensor(draw.standard_normal(shape)).to(TORCH[kind])
        codes = numbers.view(torch.uint8 if kind[0] == "e" else torch.int16).numpy()
        return codes.view("u1" if kind[0] == "e" else "u2"), numbers.to(torch.float64).numpy()
    if kind == "f64":
        values = draw.standard_normal(shape)
        return values.view("u8"), values
    if kind == "tf32":
        # what lies below the 10 bits of the mantissa is not read
        values = np.float32(draw.integers(-500, 500, shape) / 64)
        return values.view("u4") | np.uint32(0x1ABC), values.astype(np.float64)
    bits = int(kind[1:])
    values = (
        draw.integers(-(1 << bits - 1), 1 << bits - 1, shape) if kind[0] == "s" else draw.integers(0, 1 << bits, shape)
    )
    return (values & ((1 << bits) - 1)).astype("u1"), values.astype(np.float64)


def fragment(matrix: np.ndarray, count: int, place: Place, bits: int) -> np.ndarray:
    """`[registers, 32]` words (of f64: of 64 bits) of a matrix of codes."""
    lanes = []
    for lane in range(32):
        elements = [int(matrix[place(i, lane >> 2, lane & 3)]) for i in range(count)]
        per = max(1, (64 if bits == 64 else 32) // bits)
        lanes.append([sum(e << bits * j for j, e in enumerate(elements[r : r + per])) for r in range(0, count, per)])
    return np.array(lanes, "u8" if bits == 64 else "u4").T.copy()


def multiply_kernel(opcode: str, counts: tuple[int, int, int, int], wide: bool) -> str:
    letter, kind = ("d", "double") if wide else ("r", "u32")
    d, a, b, c = counts
    names, at = [], 0
    for count in counts:
        names.append(", ".join(f"%{at + i}" for i in range(count)))
        at += count
    outs = ", ".join(f'"={letter}"(d[{i}])' for i in range(d))
    ins = ", ".join(f'"{letter}"({name}[{32 * i} + t])' for name, n in (("a", a), ("b", b), ("c", c)) for i in range(n))
    vectors = ", ".join(f"{{{each}}}" for each in names)
    return f"""{KERNEL}({kind}* out, const {kind}* a, const {kind}* b, const {kind}* c) {{
        const u32 t = threadIdx.x;
        {kind} d[{d}];
        ASM("{opcode} {vectors};" : {outs} : {ins});
        for (u32 i = 0; i < {d}; ++i) out[32 * i + t] = d[i];
    }}"""


CASES = [
    ("m16n8k16", "f32.f16.f16.f32", "A_F16", "B_F16"),
    ("m16n8k16", "f16.f16.f16.f16", "A_F16", "B_F16"),
    ("m16n8k8", "f32.f16.f16.f32", "A_F16", "B_F16"),
    ("m16n8k8", "f16.f16.f16.f16", "A_F16", "B_F16"),
    ("m16n8k16", "f32.bf16.bf16.f32", "A_F16", "B_F16"),
    ("m16n8k8", "f32.bf16.bf16.f32", "A_F16", "B_F16"),
    ("m16n8k8", "f32.tf32.tf32.f32", "A_WORD", "B_WORD"),
    ("m16n8k4", "f32.tf32.tf32.f32", "A_WORD", "B_WORD"),
    ("m16n8k32", "f32.e4m3.e4m3.f32", "A_BYTE", "B_BYTE"),
    ("m16n8k32", "f32.e4m3.e5m2.f32", "A_BYTE", "B_BYTE"),
    ("m16n8k32", "f16.e5m2.e5m2.f16", "A_BYTE", "B_BYTE"),
    ("m16n8k16", "f32.e5m2.e4m3.f32", "A_BYTE", "B_BYTE"),
    ("m16n8k32", "s32.s8.s8.s32", "A_BYTE", "B_BYTE"),
    ("m16n8k16", "s32.u8.s8.s32", "A_BYTE", "B_BYTE"),
    ("m8n8k16", "s32.s8.u8.s32", "A_EIGHT", "B_BYTE"),
    ("m16n8k64", "s32.s4.u4.s32", "A_NIBBLE", "B_NIBBLE"),
    ("m16n8k32", "s32.u4.s4.s32", "A_NIBBLE", "B_NIBBLE"),
    ("m8n8k32", "s32.s4.s4.s32", "A_EIGHT_NIBBLE", "B_NIBBLE"),
    ("m8n8k4", "f64.f64.f64.f64", "A_EIGHT_WORD", "B_WORD"),
    ("m16n8k4", "f64.f64.f64.f64", "A_WORD", "B_WORD"),
    ("m16n8k8", "f64.f64.f64.f64", "A_WORD", "B_WORD"),
    ("m16n8k16", "f64.f64.f64.f64", "A_WORD", "B_WORD"),
]
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "f64": 64, "s8": 8, "u8": 8, "s4": 4, "u4": 4}
C_TYPES = {"f32": ("f4", 32), "f16": ("f2", 16), "s32": ("i4", 32), "f64": ("f8", 64)}


@pytest.mark.parametrize(("shape", "types", "a_place", "b_place"), CASES, ids=[f"{s}.{t}" for s, t, *_ in CASES])
def test_mma_multiplies(launch: Launch, array: Make, shape: str, types: str, a_place: str, b_place: str) -> None:
    m, n, k = map(int, shape[1:].replace("n", " ").replace("k", " ").split())
    d_kind, a_kind, b_kind, c_kind = types.split(".")
    (a, a_values), (b, b_values) = encoded(a_kind, (m, k), 1), encoded(b_kind, (k, n), 2)
    dtype, c_bits = C_TYPES[c_kind]
    c = (100 * np.random.default_rng(3).standard_normal((m, n))).astype(dtype)
    bits = BITS[a_kind]
    words = (
        fragment(a, m * k // 32, PLACES[a_place], bits),
        fragment(b, k * n // 32, PLACES[b_place], bits),
        fragment(c.view(f"u{c_bits // 8}"), m * n // 32, PLACES["C_ANY"], c_bits),
    )
    out = array(np.zeros_like(words[2]))
    counts = (len(out), *(len(each) for each in words))
    opcode = f"mma.sync.aligned.{shape}.row.col.{types}"
    launch(multiply_kernel(opcode, counts, bits == 64), out, *(array(each) for each in words))
    expected = (a_values @ b_values + c).astype(C_TYPES[d_kind][0])
    found = np.zeros((m, n), dtype)
    per = 2 if d_kind == "f16" else 1
    elements = out[:, :, None].view(dtype).reshape(len(out), 32, per)
    for lane in range(32):
        for i in range(m * n // 32):
            found[PLACES["C_ANY"](i, lane >> 2, lane & 3)] = elements[i // per, lane, i % per]
    if d_kind == "s32":
        assert found.tolist() == expected.tolist()
    else:
        tolerance = {"f64": 1e-12, "f32": 1e-4, "f16": 0.13}[d_kind]
        assert np.abs(found.astype(np.float64) - expected.astype(np.float64)).max() <= tolerance


@pytest.mark.parametrize(("saturates", "expected"), [("", -(2**31) + 15), (".satfinite", 2**31 - 1)])
def test_integer_sum_wraps_or_saturates(launch: Launch, array: Make, saturates: str, expected: int) -> None:
    """Four words of `1 * 2 + 2 * 1` are 16 more than the largest number."""
    kernel = multiply_kernel(f"mma.sync.aligned.m8n8k16.row.col{saturates}.s32.s8.s8.s32", (2, 1, 1, 2), False)
    out, c = array(np.zeros((2, 32)), np.uint32), array(np.full((2, 32), 2**31 - 1), np.uint32)
    a, b = array(np.full((1, 32), 0x0201), np.uint32), array(np.full((1, 32), 0x0102), np.uint32)
    launch(kernel, out, a, b, c)
    assert set(out.view(np.int32).ravel().tolist()) == {expected}


@pytest.mark.parametrize(
    "form",
    [
        "m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e4m3.f32",
        "m16n8k256.row.col.s32.b1.b1.s32.and.popc",
        "m16n8k16.row.col.f32.f16.bf16.f32",
        "m16n8k16.row.row.f32.f16.f16.f32",
        "m16n8k32.row.col.f32.f16.f16.f32",
    ],
)
def test_other_form_of_mma_is_refused_with_its_place(form: str) -> None:
    text = f""".version 8.7
.target sm_90a
.address_size 64
.visible .entry k() {{
 .reg .b32 %r<20>;
 mma.sync.aligned.{form} {{%r1, %r2, %r3, %r4}}, {{%r5, %r6, %r7, %r8}}, {{%r9, %r10}}, {{%r11, %r12, %r13, %r14}};
 ret;
}}"""
    with pytest.raises(EmulationError, match=r"PTX line 6: .* is not modelled"):
        Program(parse_kernel(text, "k")).translate_all()


MATRICES = """(u32* out, const u32* in) {
    const u32 t = threadIdx.x, smem = smem_base();
    for (u32 i = 0; i < 4; ++i) ASM("st.shared.u32 [%0], %1;" :: "r"(smem + 4 * (i * 32 + t)), "r"(in[i * 32 + t]));
    __syncwarp();
    u32 d[4] = {0, 0, 0, 0};
    BODY
    for (u32 i = 0; i < 4; ++i) out[i * 32 + t] = d[i];
}"""


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", ["", ".trans"])
def test_ldmatrix_gives_each_lane_its_elements(launch: Launch, array: Make, count: int, transposed: str) -> None:
    registers = ", ".join(f"%{i}" for i in range(count))
    outs = ", ".join(f'"=r"(d[{i}])' for i in range(count))
    # rows of the matrices in the order of their addresses, which is not that of the memory; others are not looked at
    body = f"""const u32 row = t < {8 * count} ? (t * 5) % 32 : 1000000;
        ASM("ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 {{{registers}}}, [%{count}];"
            : {outs} : "r"(smem + 16 * row));"""
    given = array(np.arange(256), np.uint16)
    out = array(np.zeros(128), np.uint32)
    launch(KERNEL + MATRICES.replace("BODY", body), out, given, smem=512)
    for number in range(count):
        matrix = np.stack([given.reshape(32, 8)[(number * 8 + row) * 5 % 32] for row in range(8)])
        matrix = matrix.T if transposed else matrix
        found = out.reshape(4, 32)[number].view(np.uint16).reshape(8, 8)
        assert found.tolist() == matrix.tolist()


def test_ldmatrix_takes_a_generic_address(launch: Launch, array: Make) -> None:
    body = """ASM("{ .reg .u64 a; cvta.shared.u64 a, %1; ldmatrix.sync.aligned.m8n8.x1.b16 {%0}, [a + 16]; }"
        : "=r"(d[0]) : "l"((unsigned long long)(smem + 16 * (t % 8))));"""
    given, out = array(np.arange(256), np.uint16), array(np.zeros(128), np.uint32)
    launch(KERNEL + MATRICES.replace("BODY", body), out, given, smem=512)
    assert out[:32].view(np.uint16).tolist() == list(range(8, 72))


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", ["", ".trans"])
def test_stmatrix_and_movmatrix_undo_ldmatrix(launch: Launch, array: Make, count: int, transposed: str) -> None:
    """`stmatrix.trans` of what `movmatrix` has transposed is `stmatrix` of what it was."""
    registers = ", ".join(f"%{i + 1}" for i in range(count))
    ins = ", ".join(f'"r"(d[{i}])' for i in range(count))
    move = 'ASM("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d[i]) : "r"(d[i]));' if transposed else ""
    body = f"""for (u32 i = 0; i < {count}; ++i) {{ d[i] = in[i * 32 + t] + 0x10001; {move} }}
        ASM("stmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 [%0], {{{registers}}};"
            :: "r"(smem + 16 * t), {ins} : "memory");
        __syncwarp();
        for (u32 i = 0; i < 4; ++i) ASM("ld.shared.u32 %0, [%1];" : "=r"(d[i]) : "r"(smem + 4 * (i * 32 + t)));"""
    given, out = array(np.arange(256), np.uint16), array(np.zeros(128), np.uint32)
    launch(KERNEL + MATRICES.replace("BODY", body), out, given, smem=512)
    assert out.view(np.uint16).tolist() == [each + (each < 64 * count) for each in range(256)]


LOAD = 'ASM("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(d[0]) : "r"(ADDRESS));'


@pytest.mark.parametrize(
    ("body", "report"),
    [
        (LOAD.replace("ADDRESS", "smem + 16 * t + 8"), "out-of-bounds: .*not aligned"),
        (LOAD.replace("ADDRESS", "smem + 512 + 16 * t"), "unwritten-read"),
        (LOAD.replace("ADDRESS", "smem + 4096 + 16 * t"), "out-of-bounds"),
        (LOAD.replace("ADDRESS", "smem + 16 * t + 0x1000000"), "out-of-bounds: .*another CTA"),
        (f"if (t < 16) {{ {LOAD.replace('ADDRESS', 'smem + 16 * t')} }}", "divergence"),
        (
            f'ASM("st.shared.u32 [%0], %1;" :: "r"(smem + 4 * t), "r"(t)); {LOAD.replace("ADDRESS", "smem + 16 * t")}',
            "race",
        ),
    ],
)
def test_planted_fault_of_ldmatrix_is_reported(launch: Launch, array: Make, body: str, report: str) -> None:
    given, out = array(np.arange(256), np.uint16), array(np.zeros(128), np.uint32)
    with pytest.raises(Fault, match=f"^{report}"):
        launch(KERNEL + MATRICES.replace("BODY", body), out, given, smem=1024)


@pytest.mark.parametrize(("threshold", "runs"), [(0, False), (32, True), (7, None)])
def test_predicate_of_a_collective_is_the_same_in_all_lanes(
    launch: Launch, array: Make, threshold: int, runs: bool | None
) -> None:
    body = """ASM("{ .reg .pred p; setp.lt.u32 p, %2, THRESHOLD;"
        " @p ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1]; }" : "+r"(d[0]) : "r"(smem + 16 * t), "r"(t));"""
    source = KERNEL + MATRICES.replace("BODY", body.replace("THRESHOLD", str(threshold)))
    given, out = array(np.arange(256) + 1, np.uint16), array(np.zeros(128), np.uint32)
    if runs is None:
        with pytest.raises(Fault, match=r"divergence: ldmatrix.* by a part of the warp"):
            launch(source, out, given, smem=1024)
        return
    launch(source, out, given, smem=1024)
    assert bool(out.any()) is runs
