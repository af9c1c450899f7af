"""Variables of a module in global and constant memory, with what they hold at first (PTX ISA 5.4)."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable

from cakegen.emulator.text.operand_text import parse_number
from cakegen.emulator.text.ptx import ModuleVariable
from cakegen.errors import EmulationError, PtxError

MOST_BYTES = 1 << 30
"""Of one variable: more than any part's constant memory, and than what a module's text is likely to hold."""

_VARIABLE = re.compile(
    r"\.(global|const)\s+(?:\.attribute\s*\([^)]*\)\s*)?(?:\.align\s+\d+\s+)?(?:\.v([24])\s+)?\.([bsuf])(8|16|32|64)\s+"
    r"([\w$]+)\s*((?:\[\s*\d*\s*\]\s*)*)(?:=\s*([^;]*))?;"
)


def parse_variables(module: str, used: Iterable[str]) -> tuple[ModuleVariable, ...]:
    """Those that some names mean.

    Raises
    ------
    EmulationError
        One starts with what is not modelled, such as an address.
    """
    names, digest = set(used), ""
    found: dict[str, ModuleVariable] = {}
    for match in _VARIABLE.finditer(module):
        name = match.group(5)
        if name in names and (name not in found or match.group(7)):
            digest = digest or hashlib.sha256(module.encode()).hexdigest()[:16]
            line = module.count("\n", 0, match.start()) + 1
            found[name] = ModuleVariable(name, digest, match.group(1) == "const", _content(match, line))
    return tuple(found.values())


def _content(match: re.Match[str], line: int) -> bytes:
    _, vector, letter, bits, name, dims, initial = match.groups()
    item = int(bits) // 8
    values = [part.strip() for part in re.sub(r"[{}]", " ", initial or "").split(",")]
    encoded = b"".join(_encode(value, letter, item, name, line) for value in values if value)
    extents = re.findall(r"\[\s*(\d*)\s*\]", dims)
    # an empty extent is as long as its values
    size = item * int(vector or 1)
    for extent in extents:
        size = size * int(extent) if extent else len(encoded)
    if not 0 < size <= MOST_BYTES or len(encoded) > size:
        raise PtxError(
            f"PTX line {line}: {name} has {size} bytes, at most {MOST_BYTES}, and starts with {len(encoded)}"
        )
    return encoded.ljust(size, b"\0")


def _encode(value: str, letter: str, item: int, name: str, line: int) -> bytes:
    number = parse_number(value)
    if number is None:
        raise EmulationError(f"PTX line {line}: {name} starts with {value[:60]!r}; only numbers are modelled")
    bits = number.value
    if letter == "f" and item == 4 and number.float_bytes == 8:
        bits = struct.unpack("<I", struct.pack("<f", struct.unpack("<d", struct.pack("<Q", bits))[0]))[0]
    return (bits & ((1 << 8 * item) - 1)).to_bytes(item, "little")
