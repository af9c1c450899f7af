"""Packed arithmetic and 256-bit accesses of sm_100a, as the ISA's text says."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.text import arithmetic

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Launch = Callable[..., Machine]
Make = Callable[..., np.ndarray]

KERNEL = 'extern "C" __global__ void kernel_test'


def bf16_value(bits: int) -> Fraction:
    return Fraction(float(np.uint32(bits << 16).view(np.float32)))


def bf16_rounded(value: Fraction) -> int:
    """A fraction -> bf16 bits, to nearest even, without going through another type; -1 for what overflows."""
    sign, magnitude, exponent = (0x8000 if value < 0 else 0), abs(value), -133
    while magnitude >= Fraction(2) ** (exponent + 8):
        exponent += 1
    scaled = magnitude / Fraction(2) ** exponent
    whole, rest = scaled.numerator // scaled.denominator, scaled % 1
    whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2)
    if whole == 256:
        whole, exponent = 128, exponent + 1
    field = exponent + 134 if whole >= 128 else 0
    return sign | field << 7 | (whole & 127) if field < 255 else -1


def test_bf16_operations_round_once() -> None:
    """Random bits of all sizes, and sums that rounding in fp32 or fp64 first would get wrong."""
    make = np.random.default_rng(0)
    a, b, c = make.integers(0, 1 << 16, (3, 1000)).astype(np.uint16)
    # 1 + 2^-8 (a tie of bf16) and something far below it, which decides
    ties = np.array([[0x3F80, 0x3F80, 0x3B80], [0x3F81, 0x3F81, 0x0080], [0x3F81, 0x3F82, 0x8080]], np.uint16)
    a, b, c = (np.concatenate([values, ties[:, i]]) for i, values in enumerate((a, b, c)))
    finite = (a & 0x7F80 != 0x7F80) & (b & 0x7F80 != 0x7F80) & (c & 0x7F80 != 0x7F80)
    results = {
        "fma": arithmetic.fma_bf16(a, b, c),
        "add": arithmetic.add_bf16(a, b),
        "sub": arithmetic.sub_bf16(a, b),
        "mul": arithmetic.mul_bf16(a, b),
    }
    for i in np.flatnonzero(finite):
        x, y, z = (bf16_value(int(bits[i])) for bits in (a, b, c))
        exact = {"fma": x * y + z, "add": x + y, "sub": x - y, "mul": x * y}
        for name, value in exact.items():
            expected = bf16_rounded(value)
            got = int(results[name][i])
            if expected == -1:
                assert got & 0x7FFF == 0x7F80, (name, i)
            else:
                assert got == expected or (value == 0 and got & 0x7FFF == 0), (name, i, got, expected)


def test_packed_forms_work_on_both_items(launch: Launch, array: Make) -> None:
    source = f"""{KERNEL}(u64* wide, u32* half, const u64* x, const u32* h) {{
        const u32 t = threadIdx.x;
        const u64 a = x[t], b = x[32 + t], c = x[64 + t];
        u64 r[4];
        asm("fma.rn.f32x2 %0, %1, %2, %3;" : "=l"(r[0]) : "l"(a), "l"(b), "l"(c));
        asm("add.rn.f32x2 %0, %1, %2;" : "=l"(r[1]) : "l"(a), "l"(b));
        asm("mul.rn.f32x2 %0, %1, %2;" : "=l"(r[2]) : "l"(a), "l"(b));
        asm("sub.rn.f32x2 %0, %1, %2;" : "=l"(r[3]) : "l"(a), "l"(b));
        const u32 d = h[t], e = h[32 + t], f = h[64 + t];
        u32 s[4];
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(s[0]) : "r"(d), "r"(e), "r"(f));
        asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(s[1]) : "r"(d), "r"(e));
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(s[2]) : "r"(d), "r"(e));
        asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(s[3]) : "r"(d), "r"(e));
        for (u32 i = 0; i < 4; ++i) {{ wide[32 * i + t] = r[i]; half[32 * i + t] = s[i]; }}
    }}"""
    make = np.random.default_rng(1)
    floats = make.standard_normal((3, 64)).astype(np.float32)
    halves = (make.standard_normal((3, 64)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    wide, half = array(np.zeros((4, 64)), np.float32), array(np.zeros((4, 64)), np.uint16)
    launch(source, wide, half, array(floats), array(halves), arch="sm_100a")
    a, b, c = floats
    np.testing.assert_array_equal(wide, [arithmetic.fma_f32(a, b, c), a + b, a * b, a - b])
    d, e, f = halves
    expected = [arithmetic.fma_bf16(d, e, f), arithmetic.add_bf16(d, e), arithmetic.mul_bf16(d, e)]
    np.testing.assert_array_equal(half, [*expected, arithmetic.sub_bf16(d, e)])


WIDE = f"""{KERNEL}(u32* out, const u32* in) {{
    const u32 t = threadIdx.x;
    u32 r[8];
    asm volatile("ld.global.v8.b32 {{%0, %1, %2, %3, %4, %5, %6, %7}}, [%8];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7])
        : "l"(in + 8 * t + SHIFT));
    asm volatile("st.global.v8.b32 [%0], {{%1, %2, %3, %4, %5, %6, %7, %8}};" :: "l"(out + 8 * (31 - t)),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]), "r"(r[6]), "r"(r[7]) : "memory");
    u64 q[4];
    asm volatile("ld.global.v4.b64 {{%0, %1, %2, %3}}, [%4];"
        : "=l"(q[0]), "=l"(q[1]), "=l"(q[2]), "=l"(q[3]) : "l"(in + 8 * t));
    asm volatile("st.global.v4.b64 [%0], {{%1, %2, %3, %4}};" :: "l"(out + 256 + 8 * t),
        "l"(q[3]), "l"(q[2]), "l"(q[1]), "l"(q[0]) : "memory");
}}"""


def test_accesses_of_256_bits(launch: Launch, array: Make) -> None:
    data, out = array(np.arange(256), np.uint32), array(np.zeros(512), np.uint32)
    launch(WIDE.replace("SHIFT", "0"), out, data, arch="sm_100a")
    np.testing.assert_array_equal(out[:256].reshape(32, 8), data.reshape(32, 8)[::-1])
    np.testing.assert_array_equal(
        out[256:].view(np.uint64).reshape(32, 4), data.view(np.uint64).reshape(32, 4)[:, ::-1]
    )


def test_access_of_256_bits_that_is_not_aligned_is_reported(launch: Launch, array: Make) -> None:
    data, out = array(np.arange(272), np.uint32), array(np.zeros(512), np.uint32)
    with pytest.raises(Fault, match=r"32 bytes at argument 1 .* is not aligned"):
        launch(WIDE.replace("SHIFT", "4"), out, data, arch="sm_100a")


@pytest.mark.parametrize("words", [2, 4, 8])
def test_strong_store_of_a_vector_stores_each_word(launch: Launch, array: Make, words: int) -> None:
    """`st.relaxed` takes `.vec` (PTX ISA 9.7.9.12); its address is a multiple of the vector's size (6.4.1.3)."""
    names = ", ".join(f"%{1 + i}" for i in range(words))
    values = ", ".join(f'"r"(t * 10 + {i})' for i in range(words))
    body = f"""{KERNEL}(u32* out, u32 skip) {{
        const u32 t = threadIdx.x;
        asm volatile("st.relaxed.cta.global.L1::no_allocate.v{words}.b32 [%0], {{{{{names}}}}};"
            :: "l"(out + {words} * t + skip), {values} : "memory");
    }}"""
    source = body.replace("{{", "{").replace("}}", "}")
    out = array(np.zeros(33 * words), np.uint32)
    launch(source, out, 0, block=32, arch="sm_100a")
    expected = np.arange(32)[:, None] * 10 + np.arange(words)
    assert (out[: 32 * words].reshape(32, words) == expected).all()
    with pytest.raises(Fault) as found:
        launch(source, out, 1, block=32, arch="sm_100a")
    assert found.value.kind == "out-of-bounds"


@pytest.mark.parametrize("hint", ["ca", "cg", "cs"])
def test_cache_operators_change_no_value(launch: Launch, array: Make, hint: str) -> None:
    """They are hints (PTX ISA 9.7.9.1); a store has `.wb` where a load has `.ca`."""
    source = f"""{KERNEL}(u32* out, const u32* in) {{
        const u32 t = threadIdx.x;
        u32 value;
        asm volatile("ld.global.{hint}.b32 %0, [%1];" : "=r"(value) : "l"(in + t) : "memory");
        asm volatile("st.global.{"wb" if hint == "ca" else hint}.b32 [%0], %1;" :: "l"(out + 31 - t), "r"(value)
            : "memory");
    }}"""
    out = array(np.zeros(32), np.uint32)
    launch(source, out, array(np.arange(32), np.uint32), arch="sm_100a")
    assert out.tolist() == list(range(31, -1, -1))
