"""fp32 and fp64 instructions against fractions and numpy (PTX ISA 9.7.3, 9.7.6)."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from support.emulator.rounding import exact, floats_of, rounded_bits
from support.emulator.unit_kernels import Unit, check_units, run_units, unit

from cakegen.emulator.text import arithmetic
from cakegen.errors import EmulationError

pytestmark = [pytest.mark.emulator, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

THREADS = 128
NAMES = {"f4": "f32", "f8": "f64"}
CORNERS = [0.0, -0.0, 1.0, -1.0, 1.5, -2.5, 2.5, np.inf, -np.inf, np.nan, 2.0**-126, -(2.0**-130), 2.0**-149, 3.4e38]


def floats(seed: int, kind: str = "f4", *, finite: bool = False) -> np.ndarray:
    """Random floats of moderate and of any size, with corners."""
    make = np.random.default_rng(seed)
    wild = make.integers(0, 1 << 64, THREADS, np.uint64).astype(f"u{kind[1]}").view(kind)
    plain = make.standard_normal(THREADS).astype(kind) * np.exp2(make.integers(-20, 20, THREADS)).astype(kind)
    values = np.where(make.integers(0, 3, THREADS) == 0, wild, plain)
    values[make.permutation(THREADS)[:42]] = np.repeat(np.array(CORNERS), 3).astype(kind)
    return np.where(np.isfinite(values), values, np.array(1.25, kind)) if finite else values


def flushed(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) < np.float32(2.0**-126), np.copysign(np.float32(0), values), values)


def of_fractions(
    function: Callable[..., Fraction | None], kind: str, mode: str, *sources: np.ndarray, zero: Callable[..., float]
) -> np.ndarray:
    """An exact function, rounded once; `zero` gives what it is where it is 0 or None."""
    codes = []
    for lane in zip(*sources, strict=True):
        value = function(*map(exact, lane))
        if value:
            codes.append(rounded_bits(value, NAMES[kind], mode))
        else:
            codes.append(int(np.array(zero(*lane), kind).view(f"u{kind[1]}")))
    return floats_of(codes, kind)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("kind", ["f4", "f8"])
def test_sums_and_products_round_once_in_their_direction(kind: str, mode: str) -> None:
    a, b, c = (floats(seed, kind, finite=True) for seed in (1, 2, 3))
    c = np.where(np.arange(THREADS) % 5 == 0, -(a * b), c)
    c = np.where(np.isfinite(c), c, np.array(-0.0, kind))
    # what sums of zeros give: one sign keeps, two signs are -0 towards minus infinity alone
    lower = -0.0 if mode == "rm" else 0.0

    def zero_sum(x: float, y: float) -> float:
        return float(x) if x == 0 and y == 0 and np.signbit(x) == np.signbit(y) else lower

    def zero_product(x: float, y: float) -> float:
        return -0.0 if np.signbit(x) ^ np.signbit(y) else 0.0

    def zero_fma(x: float, y: float, z: float) -> float:
        product = exact(x) * exact(y)
        return zero_sum(zero_product(x, y), z) if product == 0 else lower

    name = NAMES[kind]
    units = [
        unit(f"add.{mode}.{name}", a, b, gives=of_fractions(lambda x, y: x + y, kind, mode, a, b, zero=zero_sum)),
        unit(
            f"sub.{mode}.{name}",
            a,
            b,
            gives=of_fractions(lambda x, y: x - y, kind, mode, a, b, zero=lambda x, y: zero_sum(x, -y)),
        ),
        unit(f"mul.{mode}.{name}", a, b, gives=of_fractions(lambda x, y: x * y, kind, mode, a, b, zero=zero_product)),
    ]
    wanted = of_fractions(lambda x, y, z: x * y + z, kind, mode, a, b, c, zero=zero_fma)
    units.append(unit(f"fma.{mode}.{name}", a, b, c, gives=wanted))
    if kind == "f4":
        divisor = np.where(b == 0, np.float32(3), b)
        wanted = of_fractions(lambda x, y: x / y, kind, mode, a, divisor, zero=zero_product)
        units.append(unit(f"div.{mode}.f32", a, divisor, gives=wanted))
        wanted = of_fractions(lambda x: 1 / x, kind, mode, divisor, zero=lambda x: 0.0)
        units.append(unit(f"rcp.{mode}.f32", divisor, gives=wanted))
    check_units(units)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_square_roots_round_in_their_direction(mode: str) -> None:
    a = np.abs(floats(4, finite=True))

    def is_right(value: float, root: float) -> bool:
        """Whether a root lies where the rounding wants it, by squares of exact numbers."""
        x, r = exact(value), exact(root)
        below = exact(float(np.nextafter(np.float32(root), np.float32(-1)))) if root else Fraction(0)
        above = exact(float(np.nextafter(np.float32(root), np.float32(np.inf))))
        if mode in ("rz", "rm"):
            return r**2 <= x < above**2
        if mode == "rp":
            return (not root and not x) or below**2 < x <= r**2
        return (not root and not x) or ((below + r) / 2) ** 2 <= x <= ((r + above) / 2) ** 2

    (found,) = run_units([unit(f"sqrt.{mode}.f32", a, gives=a)])
    assert [value for value, root in zip(a, found[0], strict=True) if not is_right(value, root)] == []


def test_ftz_and_sat_of_directed_sums() -> None:
    a, b = floats(5), floats(6)
    total = arithmetic.flush_f32(flushed(a) + flushed(b))
    clamped = np.where(np.isnan(total), np.float32(0), np.clip(total, np.float32(0), np.float32(1)))
    tiny = np.full(THREADS, 2.0**-126, np.float32)
    check_units(
        [
            unit("add.ftz.f32", a, b, gives=total),
            unit("add.rn.ftz.sat.f32", a, b, gives=clamped),
            # 2^-126 - 2^-149 / 2 is subnormal, whatever direction it is rounded in
            unit("mul.rz.ftz.f32", tiny, np.full(THREADS, 0.75, np.float32), gives=np.zeros(THREADS, np.float32)),
            unit("mul.rp.f32", tiny, np.full(THREADS, 2.0**-40, np.float32), gives=floats_of([1] * THREADS, "f4")),
        ]
    )


def lower_of(x: float, y: float, *, nan_wins: bool) -> float:
    """`min` of two numbers, as the ISA's table says."""
    if np.isnan(x) or np.isnan(y):
        return np.nan if nan_wins or (np.isnan(x) and np.isnan(y)) else y if np.isnan(x) else x
    if x == y == 0:
        return x if np.signbit(x) else y
    return min(x, y)


def test_extrema_treat_nan_zeros_and_signs_as_the_isa_says() -> None:
    a, b, c = floats(7), floats(8), floats(9)
    b = np.where(np.arange(THREADS) % 7 == 0, -a, b)

    def extremum(root: str, *values: float, nan_wins: bool) -> float:
        sign = 1 if root == "min" else -1
        result = values[0]
        for value in values[1:]:
            result = sign * lower_of(sign * result, sign * value, nan_wins=nan_wins)
        return result

    units: list[Unit] = []
    for root in ("min", "max"):
        for nan_wins in (False, True):
            for sources in ((a, b), (a, b, c)):
                lanes = list(zip(*sources, strict=True))
                modifier = ".NaN" if nan_wins else ""
                plain = [extremum(root, *lane, nan_wins=nan_wins) for lane in lanes]
                units.append(unit(f"{root}{modifier}.f32", *sources, gives=np.array(plain, np.float32)))
                signed = []
                for lane in lanes:
                    magnitude = extremum(root, *(abs(x) for x in lane), nan_wins=nan_wins)
                    odd = sum(int(np.signbit(x)) for x in lane) % 2
                    signed.append(magnitude if np.isnan(magnitude) else -magnitude if odd else magnitude)
                if len(sources) == 2:
                    opcode = f"{root}{modifier}.xorsign.abs.f32"
                    units.append(unit(opcode, *sources, gives=np.array(signed, np.float32)))
                else:
                    lane_max = [extremum(root, *(abs(x) for x in lane), nan_wins=nan_wins) for lane in lanes]
                    opcode = f"{root}{modifier}.abs.f32"
                    units.append(unit(opcode, *sources, gives=np.array(lane_max, np.float32)))
        wide = floats(10, "f8"), floats(11, "f8")
        plain = [extremum(root, *lane, nan_wins=False) for lane in zip(*wide, strict=True)]
        units.append(unit(f"{root}.f64", *wide, gives=np.array(plain)))
    check_units(units)


ORDERED = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x < y or x > y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "num": lambda x, y: x == x and y == y,
    "nan": lambda x, y: x != x or y != y,
}


@pytest.mark.parametrize("kind", ["f4", "f8"])
def test_comparisons_say_what_nan_is(kind: str) -> None:
    a, b = floats(12, kind), floats(13, kind)
    b = np.where(np.arange(THREADS) % 3 == 0, a, b)
    third = np.arange(THREADS) % 2 == 0
    name, units = NAMES[kind], []
    for comparison, function in ORDERED.items():
        holds = np.array([bool(function(float(x), float(y))) for x, y in zip(a, b, strict=True)])
        units.append(unit(f"setp.{comparison}.{name}", a, b, gives=(holds, ~holds)))
        units.append(unit(f"setp.{comparison}.or.{name}", a, b, third, gives=(holds | third, ~holds | third)))
        wanted = np.where(holds, np.float32(1), np.float32(0))
        units.append(unit(f"set.{comparison}.f32.{name}", a, b, gives=wanted))
        if comparison not in ("num", "nan"):
            holds = holds | np.isnan(a) | np.isnan(b)
            units.append(unit(f"setp.{comparison}u.{name}", a, b, gives=(holds, ~holds)))
    if kind == "f4":
        x, y = flushed(a), flushed(b)
        units.append(unit("setp.lt.ftz.f32", a, b, gives=(x < y, ~(x < y))))
        units.append(unit("slct.b32.f32", a, b, b, gives=np.where(b >= 0, a, b)))
    check_units(units)


def test_signs_and_properties() -> None:
    units = []
    for kind, name in NAMES.items():
        a, b = floats(14, kind), floats(15, kind)
        magnitude, tiny = np.abs(a), np.finfo(kind).tiny
        subnormal = (magnitude > 0) & (magnitude < tiny)
        units += [
            unit(f"abs.{name}", a, gives=magnitude),
            unit(f"neg.{name}", a, gives=-a),
            unit(f"copysign.{name}", a, b, gives=np.copysign(b, a)),
            unit(f"testp.finite.{name}", a, gives=np.isfinite(a)),
            unit(f"testp.infinite.{name}", a, gives=np.isinf(a)),
            unit(f"testp.number.{name}", a, gives=~np.isnan(a)),
            unit(f"testp.notanumber.{name}", a, gives=np.isnan(a)),
            unit(f"testp.subnormal.{name}", a, gives=subnormal),
            unit(f"testp.normal.{name}", a, gives=np.isfinite(a) & ~subnormal),
        ]
    check_units(units)


def test_approximations_stay_within_their_documented_error() -> None:
    """Bounds of PTX ISA 9.7.3: absolute for sin, cos, lg2 near 1; else relative."""
    a = np.random.default_rng(16).uniform(-6, 6, THREADS).astype(np.float32)
    positive = np.abs(a) + np.float32(0.25)
    wide, high = a.astype(np.float64), positive.astype(np.float64)
    cases = [
        ("sin.approx.f32", a, np.sin(wide), 2.0**-20.5, 0.0),
        ("cos.approx.ftz.f32", a, np.cos(wide), 2.0**-20.5, 0.0),
        ("ex2.approx.ftz.f32", a, np.exp2(wide), 0.0, 2.0**-22),
        ("lg2.approx.f32", positive, np.log2(high), 2.0**-22, 2.0**-22),
        ("tanh.approx.f32", a, np.tanh(wide), 0.0, 2.0**-11),
        ("rsqrt.approx.ftz.f32", positive, 1 / np.sqrt(high), 0.0, 2.0**-22.9),
        ("rcp.approx.ftz.f32", positive, 1 / high, 0.0, 2.0**-23),
        ("sqrt.approx.f32", positive, np.sqrt(high), 0.0, 2.0**-23),
        ("rcp.approx.ftz.f64", high, 1 / high, 0.0, 2.0**-20),
        ("rsqrt.approx.ftz.f64", high, 1 / np.sqrt(high), 0.0, 2.0**-20),
        ("rsqrt.approx.f64", high, 1 / np.sqrt(high), 0.0, 2.0**-20),
    ]
    found = run_units([unit(opcode, values, gives=values) for opcode, values, *_ in cases])
    for (opcode, _, wanted, absolute, relative), (got,) in zip(cases, found, strict=True):
        error = np.abs(got.astype(np.float64) - wanted)
        assert (error <= np.maximum(absolute, relative * np.abs(wanted))).all(), opcode
        assert got.dtype.kind == "f"
        assert (np.abs(got) > 0).all(), opcode


def test_exact_functions_of_fp64() -> None:
    a, b = floats(17, "f8", finite=True), floats(18, "f8", finite=True)
    check_units(
        [
            unit("div.rn.f64", a, b, gives=a / b),
            unit("rcp.rn.f64", a, gives=1 / a),
            unit("sqrt.rn.f64", np.abs(a), gives=np.sqrt(np.abs(a))),
            unit("add.f64", a, b, gives=a + b),
            unit("mul.f64", a, b, gives=a * b),
        ]
    )


@pytest.mark.parametrize(
    "opcode",
    ["min.relu.f32", "min.abs.f32", "div.rz.f64", "testp.odd.f32", "sqrt.rz.f64", "setp.ltv.f32", "mul.hi.f32"],
)
def test_float_form_that_is_none_is_refused_with_its_line(opcode: str) -> None:
    values = floats(0, "f8" if opcode.endswith("64") else "f4")
    sources = [values] * (1 if opcode.split(".")[0] in ("testp", "sqrt") else 2)
    result = values == 0 if opcode.split(".")[0] in ("testp", "setp") else values
    with pytest.raises(EmulationError, match=r"PTX line \d+: .*is not modelled"):
        run_units([unit(opcode, *sources, gives=result)])


def test_three_inputs_need_a_later_target() -> None:
    a = floats(0)
    with pytest.raises(EmulationError, match="three inputs are for f32 on sm_100 and later"):
        run_units([unit("max.f32", a, a, a, gives=a)], "sm_90a")
