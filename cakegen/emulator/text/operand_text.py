"""Pieces of text: where operands are cut and braces close, numbers; names of variables and registers in operands."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator

from cakegen.emulator.text.ptx import Address, Immediate, Negated, Operand, Pair, Register, Symbol, Vector
from cakegen.errors import PtxError

_NUMBER = re.compile(r"-?\d+$|-?0[xX][0-9a-fA-F]+U?$")
_DECIMAL = re.compile(r"-?\d+\.\d*(?:[eE][-+]?\d+)?|-?\d+[eE][-+]?\d+")


def parse_number(text: str) -> Immediate | None:
    """A number as an operand; None: the text is none. A decimal point makes it fp64.

    Raises
    ------
    OverflowError
        It does not fit 64 bits.
    """
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return Immediate(int(text[2:], 16), 4)
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return Immediate(int(text[2:], 16), 8)
    if _DECIMAL.fullmatch(text):
        return Immediate(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 8)
    if not _NUMBER.match(text):
        return None
    value = int(text.rstrip("U"), 0) if len(text) < 32 else 1 << 64
    if not -(1 << 63) <= value < 1 << 64:
        raise OverflowError(f"{text[:40]!r} does not fit 64 bits")
    return Immediate(value)


def symbols_of(operands: Iterable[Operand]) -> Iterator[str]:
    """Names of variables in some operands."""
    for operand in operands:
        if isinstance(operand, Symbol):
            yield operand.name
        elif isinstance(operand, Address):
            yield from symbols_of((operand.base, *operand.coordinates))
        elif isinstance(operand, Vector):
            yield from symbols_of(operand.items)


def registers_in(operands: Iterable[Operand]) -> Iterator[int]:
    """Indices of registers in some operands."""
    for operand in operands:
        if isinstance(operand, Register):
            yield operand.index
        elif isinstance(operand, Negated):
            yield operand.register.index
        elif isinstance(operand, Address):
            yield from registers_in((operand.base, *operand.coordinates))
        elif isinstance(operand, Vector):
            yield from registers_in(operand.items)
        elif isinstance(operand, Pair):
            yield from registers_in((operand.first, operand.second))


def split_operands(text: str) -> list[str]:
    """Cut at commas outside of brackets and braces."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        if character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def closing_brace(text: str, start: int) -> int:
    """Where the brace at a place is closed.

    Raises
    ------
    PtxError
        Nowhere.
    """
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return match.start()
    raise PtxError(f"PTX line {text.count(chr(10), 0, start) + 1}: a brace that nothing closes")
