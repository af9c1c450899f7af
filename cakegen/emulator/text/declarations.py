"""Declarations of a PTX module -> parameters and shared variables, within the bounds of any device."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from cakegen.emulator.text.ptx import Parameter, SharedVariable
from cakegen.errors import PtxError

MOST_PARAMETER_BYTES = 32764
"""Of a kernel (PTX ISA 4.5, .param)."""
MOST_SHARED_BYTES = 232448
"""Of a CTA on the largest device (CUDA C++ Programming Guide, compute capabilities)."""
MOST_LOCAL_BYTES = 1 << 19
"""Of a thread (CUDA C++ Programming Guide, compute capabilities)."""
MOST_REGISTERS = 1 << 18
_MOST_ALIGN = 1024

_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([bsuf])(8|16|32|64|128)\s+"
    r"(?:\.ptr\s+(?:\.(?!align)\w+\s+)?(?:\.align\s+\d+\s+)?)?([\w$]+)\s*(?:\[\s*(\d+)\s*\])?"
)
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.[bsuf](8|16|32|64|128)\s+([\w$]+)\s*((?:\[\s*\d*\s*\]\s*)*)")
_LOCAL = re.compile(
    r"\.(?:local|param)\s+(?:\.align\s+(\d+)\s+)?\.[bsuf](8|16|32|64|128)\s+([\w$]+)\s*((?:\[\s*\d+\s*\]\s*)*)"
)
_BRACES = re.compile(r"[{}]")


def parse_parameters(text: str, line: int) -> tuple[Parameter, ...]:
    """What stands between the parentheses of an entry.

    Parameters
    ----------
    line
        Of the entry, for errors.

    Raises
    ------
    PtxError
        A part is no parameter, or they are too large.
    """
    found: list[Parameter] = []
    end = 0
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _PARAMETER.fullmatch(part)
        if match is None:
            raise PtxError(f"PTX line {line}: {_short(part)!r} is no parameter; a ')' ends their list")
        align, _, bits, name, count = match.groups()
        size = int(bits) // 8 * (_number(count, line) if count else 1)
        step = _alignment(align, int(bits) // 8, line)
        end = -(-end // step) * step
        found.append(Parameter(name, end, size))
        end += size
        if end > MOST_PARAMETER_BYTES:
            raise PtxError(f"PTX line {line}: {end} bytes of parameters; a kernel has at most {MOST_PARAMETER_BYTES}")
    return tuple(found)


def parse_shared(text: str, line: int) -> SharedVariable | None:
    """A shared variable from its declaration without the semicolon; None: it is none.

    Raises
    ------
    PtxError
        Its size or alignment is none that a CTA has.
    """
    match = _SHARED.fullmatch(text.strip())
    if match is None:
        return None
    align, bits, name, dims = match.groups()
    item = int(bits) // 8
    extents = re.findall(r"\[\s*(\d*)\s*\]", dims)
    # without extents it is one element; with an empty one it is the dynamic part
    total = item * math.prod(_number(extent or "0", line) for extent in extents)
    if total > MOST_SHARED_BYTES:
        raise PtxError(f"PTX line {line}: {name} has {total} bytes; a CTA has at most {MOST_SHARED_BYTES}")
    return SharedVariable(name, _alignment(align, item, line), total)


def parse_local(text: str, line: int) -> tuple[str, int, int] | None:
    """(name, alignment, bytes) of a `.local` variable, or of a call's `.param`, without the semicolon; None: neither.

    Raises
    ------
    PtxError
        Its size or alignment is none that a thread has.
    """
    match = _LOCAL.fullmatch(text.strip())
    if match is None:
        return None
    align, bits, name, dims = match.groups()
    item = int(bits) // 8
    total = item * math.prod(_number(extent, line) for extent in re.findall(r"\[\s*(\d+)\s*\]", dims))
    if not 0 < total <= MOST_LOCAL_BYTES:
        raise PtxError(f"PTX line {line}: {name} has {total} bytes; a thread has at most {MOST_LOCAL_BYTES}")
    return name, _alignment(align, item, line), total


def module_variables(head: str, used: Iterable[str]) -> tuple[SharedVariable, ...]:
    """Shared variables of a module's scope that a kernel names: what another kernel declares or names is not its.

    Parameters
    ----------
    head
        The module up to the entry.
    used
        Names that stand in the kernel.
    """
    names, found = set(used), []
    for position, statement in _outside_of_braces(head):
        start = statement.find(".shared")
        if start < 0:
            continue
        variable = parse_shared(statement[start:], head.count("\n", 0, position + start) + 1)
        if variable is not None and variable.name in names:
            found.append(variable)
    return tuple(found)


def check_shared(variables: Iterable[SharedVariable], kernel: str) -> None:
    """Refuse more static shared memory than a CTA has.

    Raises
    ------
    PtxError
        There is.
    """
    total = sum(variable.num_bytes for variable in variables)
    if total > MOST_SHARED_BYTES:
        raise PtxError(f"PTX, {kernel}: {total} bytes of shared variables; a CTA has at most {MOST_SHARED_BYTES}")


def _outside_of_braces(text: str) -> Iterable[tuple[int, str]]:
    """Statements of the module's scope with their positions."""
    depth, start = 0, 0
    for match in _BRACES.finditer(text):
        if match.group() == "{":
            if depth == 0:
                yield from _statements(text, start, match.start())
            depth += 1
        elif depth:
            depth -= 1
            start = match.end()
    if depth == 0:
        yield from _statements(text, start, len(text))


def _statements(text: str, start: int, end: int) -> Iterable[tuple[int, str]]:
    while start < end:
        stop = text.find(";", start, end)
        stop = end if stop < 0 else stop
        yield start, text[start:stop]
        start = stop + 1


def _alignment(text: str | None, natural: int, line: int) -> int:
    if text is None:
        return natural
    align = _number(text, line)
    if not 1 <= align <= _MOST_ALIGN or align & (align - 1):
        raise PtxError(f"PTX line {line}: .align {align}; it must be a power of two, 1 to {_MOST_ALIGN}")
    return align


def _number(text: str, line: int) -> int:
    if len(text) > 19:
        raise PtxError(f"PTX line {line}: a number of {len(text)} digits; no size has more than 19")
    return int(text)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."
