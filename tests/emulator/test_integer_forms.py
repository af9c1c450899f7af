"""Integer, logic and bit-field instructions against Python's integers (PTX ISA 9.7.1, 9.7.6, 9.7.8)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
from support.emulator.unit_kernels import Unit, check_units, run_units, unit

from cakegen.errors import EmulationError

pytestmark = pytest.mark.emulator

THREADS = 128
TYPES = {"u16": "u2", "s16": "i2", "u32": "u4", "s32": "i4", "u64": "u8", "s64": "i8"}


def words(seed: int, kind: str) -> np.ndarray:
    """Random bits of all lengths, and the corners of the type."""
    make = np.random.default_rng(seed)
    size = int(kind[1])
    values = make.integers(0, 1 << 64, THREADS, np.uint64, endpoint=False) >> make.integers(0, 64, THREADS, np.uint64)
    corners = np.array([0, 1, (1 << 8 * size) - 1, 1 << 8 * size - 1, (1 << 8 * size - 1) - 1], np.uint64)
    values[make.permutation(THREADS)[:20]] = np.repeat(corners, 4)
    return values.astype(f"u{size}").view(kind)


def small(seed: int, limit: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, limit, THREADS).astype(np.uint32)


def of_lanes(function: Callable[..., int], kind: str, *sources: Iterable[int]) -> np.ndarray:
    """A function of Python's integers, lane by lane, cut to a type's bits."""
    mask = (1 << 8 * int(kind[1])) - 1
    columns = [[int(value) for value in source] for source in sources]
    return np.array([function(*lane) & mask for lane in zip(*columns, strict=True)], f"u{kind[1]}").view(kind)


def extracted(value: int, position: int, length: int, bits: int, signed: bool) -> int:
    """`bfe` bit by bit, as the ISA's loop does."""
    position, length = position & 255, length & 255
    unsigned = value & ((1 << bits) - 1)
    sign = unsigned >> min(position + length - 1, bits - 1) & 1 if signed and length else 0
    result = 0
    for bit in range(bits):
        inside = bit < length and position + bit < bits
        result |= (unsigned >> position + bit & 1 if inside else sign) << bit
    return result


def inserted(a: int, b: int, position: int, length: int, bits: int) -> int:
    for bit in range(min(length & 255, bits)):
        place = (position & 255) + bit
        if place < bits:
            b = b & ~(1 << place) | (a >> bit & 1) << place
    return b


def test_bit_fields_are_those_of_the_isa() -> None:
    units = []
    position, length = small(1, 80), small(2, 80)
    for name in ("u32", "s32", "u64", "s64"):
        kind, bits = TYPES[name], int(name[1:])
        a = words(3, kind)
        wanted = of_lanes(lambda x, p, n, w=bits, s=name[0] == "s": extracted(x, p, n, w, s), kind, a, position, length)
        units.append(unit(f"bfe.{name}", a, position, length, gives=wanted))
    for bits in (32, 64):
        a, b = words(4, f"u{bits // 8}"), words(5, f"u{bits // 8}")
        wanted = of_lanes(lambda x, y, p, n, w=bits: inserted(x, y, p, n, w), f"u{bits // 8}", a, b, position, length)
        units.append(unit(f"bfi.b{bits}", a, b, position, length, gives=wanted))
    check_units(units)


def test_bit_counts_and_orders() -> None:
    units = []
    for bits in (32, 64):
        a = words(6, f"u{bits // 8}")
        units.append(unit(f"popc.b{bits}", a, gives=of_lanes(int.bit_count, "u4", a)))
        units.append(unit(f"clz.b{bits}", a, gives=of_lanes(lambda x, w=bits: w - x.bit_length(), "u4", a)))
        wanted = of_lanes(lambda x, w=bits: int(f"{x:0{w}b}"[::-1], 2), f"u{bits // 8}", a)
        units.append(unit(f"brev.b{bits}", a, gives=wanted))
        for letter in "us":
            values = a.view(f"{'i' if letter == 's' else 'u'}{bits // 8}")
            top = of_lanes(lambda x: (~x if x < 0 else x).bit_length() - 1, "u4", values)
            shift = np.where(top == 0xFFFFFFFF, top, np.uint32(bits - 1) - top)
            units.append(unit(f"bfind.{letter}{bits}", values, gives=top))
            units.append(unit(f"bfind.shiftamt.{letter}{bits}", values, gives=shift))
    check_units(units)


def test_products_keep_the_part_that_they_name() -> None:
    units = []
    for name, kind in TYPES.items():
        bits = int(name[1:])
        a, b, c = words(7, kind), words(8, kind), words(9, kind)
        high = of_lanes(lambda x, y, w=bits: x * y >> w, kind, a, b)
        units.append(unit(f"mul.hi.{name}", a, b, gives=high))
        units.append(unit(f"mul.lo.{name}", a, b, gives=of_lanes(lambda x, y: x * y, kind, a, b)))
        units.append(unit(f"mad.lo.{name}", a, b, c, gives=of_lanes(lambda x, y, z: x * y + z, kind, a, b, c)))
        wanted = of_lanes(lambda x, y, z, w=bits: (x * y >> w) + z, kind, a, b, c)
        units.append(unit(f"mad.hi.{name}", a, b, c, gives=wanted))
        wanted = of_lanes(lambda x, y, z: z + abs(x - y), kind, a, b, c)
        units.append(unit(f"sad.{name}", a, b, c, gives=wanted))
        if bits < 64:
            wide = f"{kind[0]}{int(kind[1]) * 2}"
            d = words(10, wide)
            units.append(unit(f"mul.wide.{name}", a, b, gives=of_lanes(lambda x, y: x * y, wide, a, b)))
            wanted = of_lanes(lambda x, y, z: x * y + z, wide, a, b, d)
            units.append(unit(f"mad.wide.{name}", a, b, d, gives=wanted))
    check_units(units)


def clamped(value: int) -> int:
    return max(-(1 << 31), min((1 << 31) - 1, value))


def test_sums_and_extrema() -> None:
    a, b = words(11, "i4"), words(12, "i4")
    units = [
        unit("add.sat.s32", a, b, gives=of_lanes(lambda x, y: clamped(x + y), "i4", a, b)),
        unit("sub.sat.s32", a, b, gives=of_lanes(lambda x, y: clamped(x - y), "i4", a, b)),
        unit("min.relu.s32", a, b, gives=of_lanes(lambda x, y: max(0, min(x, y)), "i4", a, b)),
        unit("max.relu.s32", a, b, gives=of_lanes(lambda x, y: max(0, x, y), "i4", a, b)),
    ]
    for name, kind in TYPES.items():
        a, b = words(13, kind), words(14, kind)
        units.append(unit(f"min.{name}", a, b, gives=of_lanes(min, kind, a, b)))
        units.append(unit(f"max.{name}", a, b, gives=of_lanes(max, kind, a, b)))
    check_units(units)


@pytest.mark.parametrize("mode", ["", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"])
def test_prmt_takes_the_bytes_of_its_mode(mode: str) -> None:
    a, b, selector = words(15, "u4"), words(16, "u4"), words(17, "u4")
    # rows of the ISA's table: the byte of {b, a} that each byte of the result takes, highest first
    table = {
        "f4e": [[3, 2, 1, 0], [4, 3, 2, 1], [5, 4, 3, 2], [6, 5, 4, 3]],
        "b4e": [[5, 6, 7, 0], [6, 7, 0, 1], [7, 0, 1, 2], [0, 1, 2, 3]],
        "rc8": [[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]],
        "ecl": [[3, 2, 1, 0], [3, 2, 1, 1], [3, 2, 2, 2], [3, 3, 3, 3]],
        "ecr": [[0, 0, 0, 0], [1, 1, 1, 0], [2, 2, 1, 0], [3, 2, 1, 0]],
        "rc16": [[1, 0, 1, 0], [3, 2, 3, 2], [1, 0, 1, 0], [3, 2, 3, 2]],
    }

    def chosen(x: int, y: int, s: int) -> int:
        source = [(y << 32 | x) >> 8 * i & 255 for i in range(8)]
        if mode:
            taken = [source[i] for i in reversed(table[mode][s & 3])]
        else:
            nibbles = [s >> 4 * i & 15 for i in range(4)]
            taken = [(255 if source[n & 7] >> 7 else 0) if n & 8 else source[n] for n in nibbles]
        return sum(byte << 8 * i for i, byte in enumerate(taken))

    wanted = of_lanes(chosen, "u4", a, b, selector)
    check_units([unit(f"prmt.b32{'.' if mode else ''}{mode}", a, b, selector, gives=wanted)])


def test_funnel_shifts() -> None:
    a, b, count = words(18, "u4"), words(19, "u4"), small(20, 70)
    units = []
    for mode in ("clamp", "wrap"):
        amounts = [int(c) & 31 if mode == "wrap" else min(int(c), 32) for c in count]
        left = of_lanes(lambda x, y, n: (y << 32 | x) << n >> 32, "u4", a, b, amounts)
        right = of_lanes(lambda x, y, n: (y << 32 | x) >> n, "u4", a, b, amounts)
        units.append(unit(f"shf.l.{mode}.b32", a, b, count, gives=left))
        units.append(unit(f"shf.r.{mode}.b32", a, b, count, gives=right))
    check_units(units)


@pytest.mark.parametrize("table", [0x00, 0x1B, 0x80, 0x96, 0xCA, 0xE8, 0xFE, 0xFF])
def test_lop3_is_the_table(table: int) -> None:
    a, b, c = words(21, "u4"), words(22, "u4"), words(23, "u4")

    def looked_up(x: int, y: int, z: int) -> int:
        return sum((table >> ((x >> i & 1) << 2 | (y >> i & 1) << 1 | (z >> i & 1)) & 1) << i for i in range(32))

    check_units([unit("lop3.b32", a, b, c, f"{table:#x}", gives=of_lanes(looked_up, "u4", a, b, c))])


@pytest.mark.parametrize("left", ["u", "s"])
@pytest.mark.parametrize("right", ["u", "s"])
def test_dp4a_adds_products_of_bytes(left: str, right: str) -> None:
    a, b, c = words(24, "u4"), words(25, "u4"), words(26, "u4")

    def byte(word: int, i: int, sign: str) -> int:
        value = word >> 8 * i & 255
        return value - 256 if sign == "s" and value > 127 else value

    wanted = of_lanes(lambda x, y, z: z + sum(byte(x, i, left) * byte(y, i, right) for i in range(4)), "u4", a, b, c)
    check_units([unit(f"dp4a.{left}32.{right}32", a, b, c, gives=wanted)])


COMPARISONS = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
COMBINED = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def test_comparisons_of_integers_have_two_results_and_a_combination() -> None:
    units: list[Unit] = []
    third = small(27, 2).astype(np.bool_)
    for name, kind in {**TYPES, "b16": "u2", "b32": "u4", "b64": "u8"}.items():
        a, b = words(28, kind), words(29, kind)
        b = np.where(small(30, 4) == 0, a, b)
        names = ["eq", "ne"] if name[0] == "b" else [*COMPARISONS, *(UNSIGNED if name[0] == "u" else ())]
        for comparison in names:
            holds = COMPARISONS[UNSIGNED.get(comparison, comparison)](a, b)
            units.append(unit(f"setp.{comparison}.{name}", a, b, gives=(holds, ~holds)))
            for combination, combine in COMBINED.items():
                both = (combine(holds, third), combine(~holds, third))
                units.append(unit(f"setp.{comparison}.{combination}.{name}", a, b, third, gives=both))
    check_units(units)


def test_choices_and_masks_by_a_comparison() -> None:
    a, b, c = words(31, "i4"), words(32, "i4"), words(33, "i4")
    third = small(34, 2).astype(np.bool_)
    ones, one = np.uint32(0xFFFFFFFF), np.float32(1)
    long_a, long_b = words(35, "u8"), words(36, "u8")
    check_units(
        [
            unit("set.lt.u32.s32", a, b, gives=np.where(a < b, ones, np.uint32(0))),
            unit("set.ge.f32.s32", a, b, gives=np.where(a >= b, one, np.float32(0))),
            unit("set.eq.and.s32.u32", a, b, third, gives=np.where((a == b) & third, np.int32(-1), np.int32(0))),
            unit("slct.b32.s32", a, b, c, gives=np.where(c >= 0, a, b)),
            unit("slct.u64.s32", long_a, long_b, c, gives=np.where(c >= 0, long_a, long_b)),
            unit("selp.b64", long_a, long_b, third, gives=np.where(third, long_a, long_b)),
        ]
    )


@pytest.mark.parametrize(
    "opcode",
    ["bfe.u16", "bfi.u32", "shf.l.b32", "prmt.b32.f5e", "add.cc.u32", "mul.u32", "setp.lo.s32", "setp.lt.nand.u32"],
)
def test_form_that_is_none_is_refused_with_its_line(opcode: str) -> None:
    kind = "u2" if opcode.endswith("16") else "u4"
    count = {"bfi": 4, "shf": 3, "prmt": 3, "bfe": 3}.get(opcode.split(".")[0], 2)
    result = words(0, kind) < 0 if opcode.startswith("setp") else words(0, kind)
    sources = [words(0, kind)] * count + ([result] if "nand" in opcode else [])
    with pytest.raises(EmulationError, match=r"PTX line \d+: .*(is not modelled|is no form of)"):
        run_units([unit(opcode, *sources, gives=result)])
