"""`cvt` between all types, against fractions, Python's integers, and torch's 8-bit floats (PTX ISA 9.7.9.21)."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from support.emulator.rounding import FIELDS, exact, floats_of, rounded_bits
from support.emulator.unit_kernels import check_units, run_units, unit

from cakegen.errors import EmulationError

pytestmark = [pytest.mark.emulator, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

THREADS = 128
INTEGERS = {"u8": "u1", "s8": "i1", "u16": "u2", "s16": "i2", "u32": "u4", "s32": "i4", "u64": "u8", "s64": "i8"}
FLOATS = {"f16": "f2", "f32": "f4", "f64": "f8"}
DIRECTIONS = ["rn", "rz", "rm", "rp"]


def integers(seed: int, kind: str) -> np.ndarray:
    make = np.random.default_rng(seed)
    bits = 8 * int(kind[1])
    values = make.integers(0, 1 << 64, THREADS, np.uint64) >> make.integers(0, 64, THREADS, np.uint64)
    corners = np.array([0, 1, (1 << bits) - 1, 1 << bits - 1, (1 << bits - 1) - 1], np.uint64)
    values[make.permutation(THREADS)[:20]] = np.repeat(corners, 4)
    return values.astype(f"u{kind[1]}").view(kind)


def floats(seed: int, kind: str, *, finite: bool = False, widest: int = 40) -> np.ndarray:
    """Floats around the bounds of all integer types, halves of odd numbers, subnormals, infinities and NaN."""
    make = np.random.default_rng(seed)
    values = make.standard_normal(THREADS) * np.exp2(make.integers(-widest, widest, THREADS).astype(float))
    values[:24] = make.integers(-9, 9, 24) + 0.5
    values[24:48] = np.exp2(make.integers(0, 66, 24).astype(float)) * make.choice([-1, 1], 24)
    values[48:60] = np.repeat([0.0, -0.0, np.nan, np.inf, -np.inf, 1e300], 2)
    values[60:70] = make.standard_normal(10) * 2.0**-135
    result = values.astype(kind)
    return np.where(np.isfinite(result), result, np.array(3, kind)) if finite else result


def register(values: np.ndarray) -> np.ndarray:
    """As the register holds them: a byte stands in 16 bits, with its sign; halves are bits."""
    if values.dtype.itemsize == 1:
        return values.astype(f"{values.dtype.kind}2").view(np.uint16)
    return values.view(np.uint16) if values.dtype.kind == "f" and values.dtype.itemsize == 2 else values


def test_integers_are_cut_extended_and_clamped() -> None:
    units = []
    for source, kind in INTEGERS.items():
        values = integers(1, kind)
        for to, wanted in INTEGERS.items():
            bits, low = int(to[1:]), -(1 << int(to[1:]) - 1) if to[0] == "s" else 0
            high = low + (1 << bits) - 1
            plain = np.array([((int(v) - low) & ((1 << bits) - 1)) + low for v in values], wanted)
            units.append(unit(f"cvt.{to}.{source}", register(values), gives=register(plain)))
            if not low <= np.iinfo(kind).min <= np.iinfo(kind).max <= high:
                clamped = np.array([min(max(int(v), low), high) for v in values], wanted)
                units.append(unit(f"cvt.sat.{to}.{source}", register(values), gives=register(clamped)))
    check_units(units)


TO_WHOLE: dict[str, Callable[[Fraction], int]] = {
    "rni": round,
    "rzi": math.trunc,
    "rmi": math.floor,
    "rpi": math.ceil,
}


@pytest.mark.parametrize("rounding", TO_WHOLE)
def test_floats_become_the_nearest_integer_of_the_type(rounding: str) -> None:
    units = []
    for source, kind in FLOATS.items():
        values = floats(2, kind)
        for to, wanted in INTEGERS.items():
            bits, low = int(to[1:]), -(1 << int(to[1:]) - 1) if to[0] == "s" else 0
            high = low + (1 << bits) - 1
            # the highest bit alone, or 0
            nan = (low or 1 << bits - 1) if bits == 64 or kind == "f8" else 0
            limits = {np.inf: high, -np.inf: low}
            found = [
                min(max(TO_WHOLE[rounding](exact(v)), low), high) if np.isfinite(v) else limits.get(float(v), nan)
                for v in values
            ]
            units.append(
                unit(f"cvt.{rounding}.{to}.{source}", register(values), gives=register(np.array(found, wanted)))
            )
        whole = [float(TO_WHOLE[rounding](exact(v))) if np.isfinite(v) else float(v) for v in values]
        same = np.copysign(np.array(whole), values).astype(kind)
        bits = np.where(np.isnan(same), np.uint16(0x7FFF), register(same)) if kind == "f2" else same
        units.append(unit(f"cvt.{rounding}.{source}.{source}", register(values), gives=bits))
    check_units(units)


@pytest.mark.parametrize("mode", DIRECTIONS)
def test_integers_become_floats_rounded_once(mode: str) -> None:
    units = []
    for source, kind in INTEGERS.items():
        values = integers(3, kind)
        for to, wanted in FLOATS.items():
            if to == "f64" and int(source[1:]) == 64 and mode != "rn":
                continue
            codes = [rounded_bits(Fraction(int(value)), to, mode) for value in values]
            units.append(unit(f"cvt.{mode}.{to}.{source}", register(values), gives=register(floats_of(codes, wanted))))
        if kind not in ("u1", "i1"):
            codes = [rounded_bits(Fraction(int(value)), "bf16", mode) for value in values]
            units.append(unit(f"cvt.{mode}.bf16.{source}", register(values), gives=np.array(codes, np.uint16)))
    check_units(units)


def coded(value: float, name: str, mode: str = "rn", *, saturates: bool = False, relu: bool = False) -> int:
    """Bits of a float in a narrower format, with its NaN, by the ISA's text."""
    exponent_bits, mantissa_bits = FIELDS[name]
    sign, infinity = 1 << exponent_bits + mantissa_bits, ((1 << exponent_bits) - 1) << mantissa_bits
    # e4m3 has one NaN and no infinity; the formats of 4 and 6 bits have neither
    largest = {"e4m3": 0x7E, "e3m2": 0x1F, "e2m3": 0x1F, "e2m1": 0x7}.get(name, infinity - 1)
    if np.isnan(value):
        return {"f16": 0x7FFF, "bf16": 0x7FFF, "e5m2": 0x7F, "e4m3": 0x7F}.get(name, largest)
    if relu and np.signbit(value):
        return 0
    if np.isinf(value):
        return (sign if value < 0 else 0) | (largest if saturates else infinity)
    code = rounded_bits(exact(value), name, mode) if value else (sign if np.signbit(value) else 0)
    if name in ("e4m3", "e3m2", "e2m3", "e2m1"):
        # their largest exponent holds numbers, so that one more bit of exponent has to be looked at
        wider = _without_infinity(exact(value), name, mode) if value else 0
        code = code & sign | min(wider, largest)
    elif saturates:
        code = code & sign | min(code & ~sign, largest)
    return code


def _without_infinity(value: Fraction, name: str, mode: str) -> int:
    exponent_bits, mantissa_bits = FIELDS[name]
    bias = (1 << exponent_bits - 1) - 1
    # subnormals' unit is that of the format; far above, the code only has to be too large
    unit_ = max(math.floor(math.log2(abs(value))), 1 - bias) - mantissa_bits
    scaled = abs(value) / Fraction(2) ** unit_
    below, rest = math.floor(scaled), scaled - math.floor(scaled)
    below += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and below % 2 == 1)
    return max(0, ((unit_ + bias + mantissa_bits - 1) << mantissa_bits) + below)


@pytest.mark.parametrize("mode", DIRECTIONS)
def test_floats_become_narrower_floats(mode: str) -> None:
    single, double = floats(4, "f4", widest=20), floats(5, "f8", widest=60)
    to_f32 = [rounded_bits(exact(v), "f32", mode) if np.isfinite(v) and v else 0 for v in double]
    plain = np.where(np.isfinite(double) & (double != 0), floats_of(to_f32, "f4"), double.astype("f4"))
    units = [
        unit(f"cvt.{mode}.f32.f64", double, gives=plain),
        unit(f"cvt.{mode}.f16.f32", single, gives=np.array([coded(v, "f16", mode) for v in single], np.uint16)),
        unit(f"cvt.{mode}.f16.f64", double, gives=np.array([coded(v, "f16", mode) for v in double], np.uint16)),
        unit(f"cvt.{mode}.bf16.f64", double, gives=np.array([coded(v, "bf16", mode) for v in double], np.uint16)),
    ]
    if mode in ("rn", "rz"):
        for name in ("f16", "bf16"):
            for relu in (False, True):
                for saturates in (False, True):
                    parts = f"{mode}{'.relu' if relu else ''}{'.satfinite' if saturates else ''}.{name}"
                    codes = [coded(v, name, mode, saturates=saturates, relu=relu) for v in single]
                    units.append(unit(f"cvt.{parts}.f32", single, gives=np.array(codes, np.uint16)))
                    pair = np.array(codes, np.uint32) << 16 | np.array(codes[::-1], np.uint32)
                    units.append(unit(f"cvt.{parts}x2.f32", single, single[::-1].copy(), gives=pair))
    check_units(units)


def test_halves_widen_exactly_and_flushing_and_clamping_follow_the_isa() -> None:
    bits = np.random.default_rng(6).integers(0, 1 << 16, THREADS).astype(np.uint16)
    halves, brains = bits.view(np.float16), (bits.astype(np.uint32) << 16).view(np.float32)
    single = floats(7, "f4", widest=3)
    flushed = np.where(np.abs(single) < np.float32(2.0**-126), np.copysign(np.float32(0), single), single)
    clamped = np.where(np.isnan(single), np.float32(0), np.clip(single, np.float32(0), np.float32(1)))
    check_units(
        [
            unit("cvt.f32.f16", bits, gives=halves.astype(np.float32)),
            unit("cvt.f64.f16", bits, gives=halves.astype(np.float64)),
            unit("cvt.f32.bf16", bits, gives=brains),
            unit("cvt.f64.f32", single, gives=single.astype(np.float64)),
            unit("cvt.ftz.f64.f32", single, gives=flushed.astype(np.float64)),
            unit("cvt.sat.f32.f32", single, gives=clamped),
            unit("cvt.ftz.f32.f32", single, gives=flushed),
            unit("cvt.rpi.ftz.f32.f32", single, gives=np.ceil(flushed)),
        ]
    )


def test_tf32_keeps_the_upper_bits() -> None:
    single = floats(8, "f4", widest=30)
    finite = np.where(np.isfinite(single), single, np.float32(-7.7))
    units = []
    for mode in ("rna", "rn", "rz"):
        codes = [coded(v, "tf32", mode) << 13 for v in finite]
        units.append(unit(f"cvt.{mode}.tf32.f32", finite, gives=np.array(codes, np.uint32)))
    units.append(
        unit("cvt.rna.tf32.f32", np.full(THREADS, np.nan, np.float32), gives=np.full(THREADS, 0x7FFFFFFF, np.uint32))
    )
    check_units(units)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"])
def test_narrow_pairs_from_fp32_and_halves_and_back(name: str) -> None:
    make = np.random.default_rng(9)
    a, b = (floats(seed, "f4", widest=6) for seed in (10, 11))
    kind, shift = (np.uint8, 4) if name == "e2m1" else (np.uint16, 8)
    units = []
    for relu in (False, True):
        high, low = ([coded(v, name, saturates=True, relu=relu) for v in values] for values in (a, b))
        wanted = (np.array(high) << shift | np.array(low)).astype(kind)
        units.append(unit(f"cvt.rn.satfinite{'.relu' if relu else ''}.{name}x2.f32", a, b, gives=wanted))
    bits = 1 + sum(FIELDS[name])
    codes = make.integers(0, 1 << bits, (2, THREADS))
    values = [decoded(row, name) for row in codes]
    halves = [value.astype(np.float16).view(np.uint16) for value in values]
    halves = [np.where(np.isnan(value), np.uint16(0x7FFF), half) for value, half in zip(values, halves, strict=True)]
    packed = (codes[0] << shift | codes[1]).astype(kind)
    wide = halves[0].astype(np.uint32) << 16 | halves[1]
    units.append(unit(f"cvt.rn.f16x2.{name}x2", packed, gives=wide))
    if name in ("e4m3", "e5m2"):
        source = make.integers(0, 1 << 32, THREADS).astype(np.uint32)
        items = [(source >> s & 0xFFFF).astype(np.uint16).view(np.float16) for s in (16, 0)]
        high, low = ([coded(float(v), name, saturates=True) for v in each] for each in items)
        wanted = (np.array(high) << 8 | np.array(low)).astype(np.uint16)
        units.append(unit(f"cvt.rn.satfinite.{name}x2.f16x2", source, gives=wanted))
    check_units(units)


def decoded(codes: np.ndarray, name: str) -> np.ndarray:
    """Values of codes: of 8 bits by torch, of fewer by the definition."""
    if name in ("e4m3", "e5m2"):
        dtype = torch.float8_e4m3fn if name == "e4m3" else torch.float8_e5m2
        return torch.from_numpy(codes.astype(np.uint8)).view(dtype).float().numpy()
    exponent_bits, mantissa_bits = FIELDS[name]
    bias, result = (1 << exponent_bits - 1) - 1, []
    for code in codes.tolist():
        exponent, mantissa = code >> mantissa_bits & ((1 << exponent_bits) - 1), code & ((1 << mantissa_bits) - 1)
        magnitude = math.ldexp(
            mantissa + ((1 << mantissa_bits) if exponent else 0), max(exponent, 1) - bias - mantissa_bits
        )
        result.append(-magnitude if code >> exponent_bits + mantissa_bits else magnitude)
    return np.array(result, np.float32)


def test_scales_are_powers_of_two() -> None:
    a, b = (np.abs(floats(seed, "f4", widest=100)) for seed in (12, 13))

    def scale(value: float, mode: str, saturates: bool) -> int:
        if np.isnan(value):
            return 0xFF
        if np.isinf(value):
            return 0xFE if saturates else 0xFF
        if value == 0:
            return 0
        exponent = math.frexp(value)[1] - 1
        up = mode == "rp" and exact(value) > Fraction(2) ** max(exponent, -127)
        code = max(exponent + 127, 0) + up
        return min(code, 0xFE) if saturates else min(code, 0xFF)

    units = []
    for mode in ("rz", "rp"):
        for saturates in (False, True):
            high, low = ([scale(float(v), mode, saturates) for v in values] for values in (a, b))
            opcode = f"cvt.{mode}{'.satfinite' if saturates else ''}.ue8m0x2.f32"
            units.append(unit(opcode, a, b, gives=(np.array(high) << 8 | np.array(low)).astype(np.uint16)))
    codes = np.random.default_rng(14).integers(0, 1 << 16, THREADS).astype(np.uint16)
    items = []
    for shift in (8, 0):
        exponents = (codes >> shift & 255).astype(np.int64)
        values = np.where(exponents == 255, np.nan, np.ldexp(1.0, exponents - 127)).astype(np.float32)
        items.append([coded(float(v), "bf16") for v in values])
    wide = np.array(items[0], np.uint32) << 16 | np.array(items[1], np.uint32)
    units.append(unit("cvt.rn.bf16x2.ue8m0x2", codes, gives=wide))
    check_units(units)


def test_packs_clamp_and_put_the_first_on_top() -> None:
    a, b, c = integers(15, "i4"), integers(16, "i4"), integers(17, "u4")
    units = []
    for name, low, bits in (("u8", 0, 8), ("s8", -128, 8), ("u16", 0, 16), ("s16", -(1 << 15), 16)):
        mask = (1 << bits) - 1
        codes = [[min(max(int(v), low), low + mask) & mask for v in values] for values in (a, b)]
        pair = np.array(codes[0], np.uint32) << bits | np.array(codes[1], np.uint32)
        if bits == 8:
            units.append(unit(f"cvt.pack.sat.{name}.s32.b32", a, b, c, gives=c << 16 | pair))
        else:
            units.append(unit(f"cvt.pack.sat.{name}.s32", a, b, gives=pair))
    check_units(units)


@pytest.mark.parametrize(
    "opcode",
    ["cvt.f32.u32", "cvt.s32.f32", "cvt.rn.rz.f32.f64", "cvt.rn.e4m3x2.f32", "cvt.f16.f32", "cvt.rs.bf16x2.f32"],
)
def test_conversion_that_is_none_is_refused_with_its_line(opcode: str) -> None:
    values = floats(0, "f8" if opcode.endswith("64") else "f4")
    result = (
        values.view(np.uint16)[:THREADS].copy()
        if "e4m3" in opcode or ".f16." in opcode
        else values.view("u4")[:THREADS].copy()
    )
    with pytest.raises(EmulationError, match=r"PTX line \d+: .*is not modelled"):
        run_units([unit(opcode, *[values] * (2 if "x2" in opcode else 1), gives=result)])
