"""f16, bf16 and pairs of them, against fractions and numpy (PTX ISA 9.7.4, 9.7.5, 9.7.6)."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from support.emulator.rounding import exact, floats_of, rounded_bits
from support.emulator.unit_kernels import Unit, check_units, run_units, unit

from cakegen.errors import EmulationError

pytestmark = [pytest.mark.emulator, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

THREADS = 128
CORNERS = [0x0000, 0x8000, 0x0001, 0x83FF, 0x3C00, 0x3F80, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x7F80, 0xFF80, 0x7FC0]


def codes(seed: int, name: str) -> np.ndarray:
    """Bits of halves of moderate and of any size; no NaN that is not the canonical one."""
    make = np.random.default_rng(seed)
    bits = make.integers(0, 1 << 16, THREADS).astype(np.uint16)
    plain = make.standard_normal(THREADS).astype(np.float32)
    near = (
        plain.astype(np.float16).view(np.uint16) if name == "f16" else (plain.view(np.uint32) >> 16).astype(np.uint16)
    )
    bits = np.where(make.integers(0, 2, THREADS) == 0, bits, near)
    bits[make.permutation(THREADS)[: 2 * len(CORNERS)]] = CORNERS * 2
    return np.where(np.isnan(values(bits, name)), np.uint16(0x7FFF), bits)


def values(bits: np.ndarray, name: str) -> np.ndarray:
    if name == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def paired(bits: np.ndarray) -> np.ndarray:
    """Each with its neighbour in its upper half."""
    return bits.astype(np.uint32) | np.roll(bits, 1).astype(np.uint32) << 16


OPERATIONS: dict[str, Callable[..., Fraction]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "fma": lambda x, y, z: x * y + z,
}


def computed(root: str, name: str, *sources: np.ndarray) -> np.ndarray:
    """Bits of the exact result rounded once; where it is 0 or no number, as fp64 has it."""
    plain = [values(bits, name).astype(np.float64) for bits in sources]
    a, b = plain[:2]
    wide = {"add": a + b, "sub": a - b, "mul": a * b}.get(root)
    wide = a * b + plain[2] if wide is None else wide
    found = []
    for lane, around in zip(zip(*plain, strict=True), wide, strict=True):
        if np.isfinite(lane).all() and (value := OPERATIONS[root](*map(exact, lane))):
            found.append(rounded_bits(value, name))
        elif np.isnan(around):
            found.append(0x7FFF)
        else:
            found.append(
                (0x8000 if np.signbit(around) else 0) | ({"f16": 0x7C00, "bf16": 0x7F80}[name] if around else 0)
            )
    return np.array(found, np.uint16)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_halves_are_computed_exactly_and_rounded_once(name: str) -> None:
    sources = codes(1, name), codes(2, name), codes(3, name)
    # ties: 1 + half a unit, and far less than that, which decides
    one, half, little = (0x3C00, 0x1000, 0x0001) if name == "f16" else (0x3F80, 0x3B80, 0x0001)
    for array, value in zip(sources, (one, half, little), strict=True):
        array[:3] = value
    units: list[Unit] = []
    for root in OPERATIONS:
        taken = sources if root == "fma" else sources[:2]
        wanted = computed(root, name, *taken)
        pairs = [paired(each) for each in taken]
        units.append(unit(f"{root}.rn.{name}", *taken, gives=wanted))
        units.append(unit(f"{root}.rn.{name}x2", *pairs, gives=paired(wanted)))
        if root == "fma":
            relu = np.where(wanted == 0x7FFF, wanted, np.where(wanted & 0x8000, 0, wanted)).astype(np.uint16)
            units.append(unit(f"fma.rn.relu.{name}x2", *pairs, gives=paired(relu)))
        if name == "f16":
            half = wanted.view(np.float16)
            clamped = np.where(np.isnan(half), np.float16(0), np.clip(half, np.float16(0), np.float16(1)))
            units.append(unit(f"{root}.rn.sat.f16x2", *pairs, gives=paired(clamped.view(np.uint16))))
            clean = computed(root, name, *(flushed(each) for each in taken))
            units.append(unit(f"{root}.rn.ftz.f16", *taken, gives=flushed(clean)))
    check_units(units)


def flushed(bits: np.ndarray) -> np.ndarray:
    """f16 subnormals as zeros."""
    return np.where(bits & 0x7C00, bits, bits & 0x8000).astype(np.uint16)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_signs_and_extrema_of_halves(name: str) -> None:
    a, b = codes(4, name), codes(5, name)
    b[:8] = a[:8] ^ 0x8000
    units = [
        unit(f"abs.{name}", a, gives=a & np.uint16(0x7FFF)),
        unit(f"neg.{name}x2", paired(a), gives=paired(a ^ np.uint16(0x8000))),
    ]
    if name == "f16":
        units.append(unit("neg.ftz.f16", a, gives=flushed(a ^ np.uint16(0x8000))))
    x, y = values(a, name), values(b, name)
    # as integers of one order: the magnitude, with -0 below +0
    order = [np.where(c & 0x8000, -(c & 0x7FFF).astype(int) - 1, (c & 0x7FFF).astype(int)) for c in (a, b)]
    sign = (a ^ b) & np.uint16(0x8000)
    for root, first in (("min", order[0] <= order[1]), ("max", order[0] >= order[1])):
        plain = np.where(np.isnan(y) | (first & ~np.isnan(x)), a, b).astype(np.uint16)
        strict = np.where(np.isnan(x) | np.isnan(y), np.uint16(0x7FFF), plain)
        units.append(unit(f"{root}.{name}x2", paired(a), paired(b), gives=paired(plain)))
        units.append(unit(f"{root}.NaN.{name}", a, b, gives=strict))
        less = (a & 0x7FFF) <= (b & 0x7FFF)
        magnitude = np.where(less == (root == "min"), a & 0x7FFF, b & 0x7FFF).astype(np.uint16)
        magnitude = np.where(np.isnan(x) | np.isnan(y), np.uint16(0x7FFF), magnitude | sign)
        units.append(unit(f"{root}.NaN.xorsign.abs.{name}", a, b, gives=magnitude))
    check_units(units)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_comparisons_of_halves(name: str) -> None:
    a, b = codes(6, name), codes(7, name)
    b[::3] = a[::3]
    x, y = values(a, name), values(b, name)
    third = np.arange(THREADS) % 2 == 0
    nan = np.isnan(x) | np.isnan(y)
    units: list[Unit] = []
    for comparison, holds in (
        *(("lt", x < y), ("ge", x >= y), ("eq", x == y), ("ltu", (x < y) | nan)),
        *(("ne", (x < y) | (x > y)), ("num", ~nan), ("nan", nan)),
    ):
        upper = np.roll(holds, 1)
        units.append(unit(f"setp.{comparison}.{name}", a, b, gives=holds))
        units.append(unit(f"setp.{comparison}.{name}x2", paired(a), paired(b), gives=(holds, upper)))
        both = (holds & third, upper & third)
        units.append(unit(f"setp.{comparison}.and.{name}x2", paired(a), paired(b), third, gives=both))
        units.append(unit(f"set.{comparison}.u32.{name}", a, b, gives=np.where(holds, 0xFFFFFFFF, 0).astype(np.uint32)))
    check_units(units)


@pytest.mark.parametrize(
    ("opcode", "function", "absolute", "relative"),
    [
        ("ex2.approx.f16x2", np.exp2, 0.0, 2.0**-9.9),
        ("ex2.approx.ftz.bf16x2", np.exp2, 0.0, 2.0**-7),
        ("tanh.approx.f16x2", np.tanh, 2.0**-10.987, 0.0),
        ("tanh.approx.bf16x2", np.tanh, 2.0**-8, 0.0),
    ],
)
def test_curves_of_halves_stay_within_their_documented_error(
    opcode: str, function: Callable[..., np.ndarray], absolute: float, relative: float
) -> None:
    name = opcode.split(".")[-1].removesuffix("x2")
    single = np.random.default_rng(8).uniform(-4, 4, THREADS).astype(np.float32)
    bits = (
        single.astype(np.float16).view(np.uint16) if name == "f16" else (single.view(np.uint32) >> 16).astype(np.uint16)
    )
    ((found,), (alone,)) = run_units(
        [
            unit(opcode, paired(bits), gives=paired(bits)),
            unit(opcode.removesuffix("x2"), bits, gives=bits),
        ]
    )
    assert (found == paired(alone)).all()
    exactly = function(values(bits, name).astype(np.float64))
    error = np.abs(values(alone, name) - exactly)
    assert (error <= np.maximum(absolute, relative * np.abs(exactly))).all()


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_halves_are_added_and_multiplied_into_fp32(name: str, mode: str) -> None:
    """`add.f32.bf16` and the like of sm_100: halves widen exactly, and the result is rounded once."""
    a, b = (
        np.where(np.isfinite(values(each, name)), each, 0x3C01).astype(np.uint16)
        for each in (codes(9, name), codes(10, name))
    )
    a, b = (np.where(each & 0x7FFF, each, 0x3C01).astype(np.uint16) for each in (a, b))
    c = (np.random.default_rng(11).standard_normal(THREADS) * 3).astype(np.float32)
    x, y, z = (list(map(exact, each)) for each in (values(a, name), values(b, name), c))
    rows = {
        "add": [p + r for p, r in zip(x, z, strict=True)],
        "sub": [p - r for p, r in zip(x, z, strict=True)],
        "fma": [p * q + r for p, q, r in zip(x, y, z, strict=True)],
    }
    units = []
    for root, row in rows.items():
        wanted = floats_of([rounded_bits(value, "f32", mode) for value in row], "f4")
        sources = (a, b, c) if root == "fma" else (a, c)
        units.append(unit(f"{root}.{mode}.f32.{name}", *sources, gives=wanted))
        clamped = np.clip(wanted, np.float32(0), np.float32(1))
        units.append(
            unit(f"{root}.{mode}.sat.f32.{name}", *sources, gives=np.where(clamped == 0, np.float32(0), clamped))
        )
    check_units(units)


@pytest.mark.parametrize("mode", ["rz", "rp"])
def test_pairs_of_fp32_round_in_their_direction(mode: str) -> None:
    make = np.random.default_rng(12)
    a, b, c = make.standard_normal((3, 2 * THREADS)).astype(np.float32)
    units = []
    for root, function in OPERATIONS.items():
        sources = (a, b, c) if root == "fma" else (a, b)
        row = [function(*map(exact, lane)) for lane in zip(*sources, strict=True)]
        wanted = floats_of([rounded_bits(value, "f32", mode) for value in row], "f4").view(np.uint64)
        units.append(unit(f"{root}.{mode}.f32x2", *(each.view(np.uint64) for each in sources), gives=wanted))
    check_units(units)


@pytest.mark.parametrize(
    "opcode",
    ["add.relu.f16", "add.sat.bf16", "fma.rz.f16", "neg.ftz.bf16x2", "ex2.approx.bf16", "tanh.approx.ftz.f16"],
)
def test_half_form_that_is_none_is_refused_with_its_line(opcode: str) -> None:
    bits = codes(0, "f16")
    source = paired(bits) if opcode.endswith("x2") else bits
    count = {"add": 2, "fma": 3}.get(opcode.split(".")[0], 1)
    with pytest.raises(EmulationError, match=r"PTX line \d+: .*is not modelled"):
        run_units([unit(opcode, *[source] * count, gives=source)])
