"""What bit-field and permutation instructions compute, on arrays of 32 lanes. Leaf module: imports numpy only.

Sections of the PTX ISA: 9.7.1.17 to 9.7.1.22 (`bfe`, `bfi`, `bfind`, `brev`, `clz`), 9.7.8 (`lop3`, `shf`), 9.7.9.7
(`prmt`).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Lanes: TypeAlias = Any  # NDArray of 32 lanes
_BYTE = np.uint32(0xFF)


def _width(a: Lanes) -> int:
    return int(a.dtype.itemsize) * 8


def _unsigned(a: Lanes) -> Lanes:
    return a.view(f"u{a.dtype.itemsize}")


def _low_ones(count: Lanes, like: Lanes) -> Lanes:
    """Words whose lowest `count` bits are set; all of them from the word's width on."""
    width, one = _width(like), like.dtype.type(1)
    small = np.minimum(count, np.uint32(width - 1)).astype(like.dtype)
    return np.where(count >= width, ~like.dtype.type(0), (one << small) - one)


def bit_insert(a: Lanes, b: Lanes, position: Lanes, length: Lanes) -> Lanes:
    """`bfi d, a, b, position, length`: the low bits of a into b. What reaches past the word is dropped."""
    start, count = position & _BYTE, length & _BYTE
    width = _width(a)
    small = np.minimum(start, np.uint32(width - 1)).astype(a.dtype)
    inside = start < width
    field = np.where(inside, _low_ones(count, a) << small, a.dtype.type(0))
    return (b & ~field) | (np.where(inside, a << small, a.dtype.type(0)) & field)


def bit_extract(a: Lanes, position: Lanes, length: Lanes) -> Lanes:
    """`bfe d, a, position, length`: a signed type repeats the field's sign, or the word's if it reaches past it.

    An empty field gives 0.
    """
    start, count = position & _BYTE, length & _BYTE
    bits, width = _unsigned(a), _width(a)
    small = np.minimum(start, np.uint32(width - 1)).astype(bits.dtype)
    moved = np.where(start < width, bits >> small, bits.dtype.type(0))
    held = np.minimum(count, np.uint32(width) - np.minimum(start, np.uint32(width)))
    ones = _low_ones(held, bits)
    result = moved & ones
    if a.dtype.kind == "i":
        last = np.minimum(start + count - np.uint32(1), np.uint32(width - 1)).astype(bits.dtype)
        negative = (count > 0) & ((bits >> last) & bits.dtype.type(1) != 0)
        result = np.where(negative, result | ~ones, result)
    return result.astype(bits.dtype).view(a.dtype)


def leading_zeros(a: Lanes) -> Lanes:
    """`clz`: of 0, the width."""
    return (_width(a) - 1 - _highest(_unsigned(a))).astype(np.uint32)


def _highest(a: Lanes) -> Lanes:
    """Index of the highest set bit; -1 of 0."""
    found = np.full(a.shape, -1, np.int64)
    step = _width(a) // 2
    rest, base = a.copy(), np.zeros(a.shape, np.int64)
    while step:
        upper = rest >> rest.dtype.type(step)
        moves = upper != 0
        rest, base = np.where(moves, upper, rest), base + np.where(moves, step, 0)
        step //= 2
    return np.where(a != 0, base, found)


def find_leading(a: Lanes, shift_amount: bool) -> Lanes:
    """`bfind`: the highest bit that differs from a signed value's sign, or the highest set bit; none: all ones.

    With `.shiftamt` the left shift that brings it to the top.
    """
    bits = _unsigned(a)
    if a.dtype.kind == "i":
        bits = np.where(a < 0, ~bits, bits)
    found = _highest(bits)
    amount = (_width(a) - 1 - found) if shift_amount else found
    return np.where(found < 0, np.uint32(0xFFFFFFFF), amount.astype(np.uint32))


def reverse_bits(a: Lanes) -> Lanes:
    """`brev`."""
    rows = np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(a.size, -1), axis=1, bitorder="little")
    reversed_rows = np.ascontiguousarray(rows[:, ::-1])
    return np.packbits(reversed_rows, axis=1, bitorder="little").view(a.dtype).reshape(a.shape)


def logic_of_three(a: Lanes, b: Lanes, c: Lanes, table: int) -> Lanes:
    """`lop3.b32`: bit i of the table says the result where (a, b, c) read as a number are i."""
    result = np.zeros_like(a)
    for entry in range(8):
        if table >> entry & 1:
            terms = (each if entry >> place & 1 else ~each for each, place in ((a, 2), (b, 1), (c, 0)))
            x, y, z = terms
            result |= x & y & z
    return result


def funnel_shift(low: Lanes, high: Lanes, count: Lanes, left: bool, wraps: bool) -> Lanes:
    """`shf.b32 d, a, b, c`: of the 64 bits `{b, a}` the upper word after a left, the lower after a right shift."""
    amount = (count & np.uint32(31)) if wraps else np.minimum(count, np.uint32(32))
    both = high.astype(np.uint64) << np.uint64(32) | low
    moved = (both << amount.astype(np.uint64)) >> np.uint64(32) if left else both >> amount.astype(np.uint64)
    return (moved & np.uint64(0xFFFFFFFF)).astype(np.uint32)


# `prmt` by mode: which byte of the eight each of the four takes, for a selector 0 to 3
_MODES = {
    "f4e": lambda s: [s, s + 1, s + 2, s + 3],
    "b4e": lambda s: [s, (s - 1) % 8, (s - 2) % 8, (s - 3) % 8],
    "rc8": lambda s: [s] * 4,
    "ecl": lambda s: [max(s, i) for i in range(4)],
    "ecr": lambda s: [min(s, i) for i in range(4)],
    "rc16": lambda s: [2 * (s & 1), 2 * (s & 1) + 1] * 2,
}
PERMUTATIONS = frozenset(_MODES)


def permute_bytes(a: Lanes, b: Lanes, selector: Lanes, mode: str = "") -> Lanes:
    """`prmt.b32`: four of the eight bytes `{b, a}`; in the default mode a nibble's bit 3 repeats the byte's sign."""
    source = np.stack((a, b), 1).view(np.uint8).reshape(-1, 8)
    rows = np.arange(source.shape[0])[:, None]
    if mode:
        table = np.array([_MODES[mode](s) for s in range(4)])
        chosen = source[rows, table[(selector & np.uint32(3)).astype(np.int64)]]
        return np.ascontiguousarray(chosen).view(np.uint32).reshape(-1)
    nibbles = (selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & np.uint32(15)
    chosen = source[rows, (nibbles & np.uint32(7)).astype(np.int64)]
    signs = np.where(chosen & 0x80, np.uint8(0xFF), np.uint8(0))
    return np.ascontiguousarray(np.where(nibbles & np.uint32(8), signs, chosen)).view(np.uint32).reshape(-1)


def dot_of_bytes(a: Lanes, b: Lanes, c: Lanes, signs: tuple[str, str]) -> Lanes:
    """`dp4a`: four products of bytes, added to c; a sign's letter is `i` or `u`."""
    left, right = (
        each.view(f"{letter}1").reshape(-1, 4).astype(np.int64) for each, letter in zip((a, b), signs, strict=True)
    )
    return ((left * right).sum(1) + c.astype(np.int64)).astype(np.uint64).astype(np.uint32)
