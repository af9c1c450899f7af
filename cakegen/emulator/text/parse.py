"""PTX text -> `Kernel`.

Reads what NVRTC 13.0 prints, and inline assembly as it was written: nested scopes with their own registers and labels,
several instructions a line, comments. What it does not know is an EmulationError with its line, never skipped.
"""

from __future__ import annotations

import re

from cakegen.emulator.text.body import Body
from cakegen.emulator.text.declarations import (
    check_shared,
    module_variables,
    parse_parameters,
)
from cakegen.emulator.text.module_variables import parse_variables
from cakegen.emulator.text.operand_text import closing_brace
from cakegen.emulator.text.ptx import (
    MALFORMED,
    Kernel,
)
from cakegen.errors import EmulationError, PtxError

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.M)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(")
_NAME = re.compile(r"[A-Za-z_$][\w$]*")


def parse_kernel(text: str, symbol: str) -> Kernel:
    """The entry `symbol` of a PTX module.

    Raises
    ------
    EmulationError
        No such entry, or a construct that this reader does not know; the message holds the line.
    """
    clean = _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    for entry in _ENTRY.finditer(clean):
        if entry.group(1) == symbol:
            break
    else:
        raise EmulationError(f"PTX: no .entry {symbol}; it has {', '.join(_ENTRY.findall(clean)) or 'none'}")
    line = clean.count("\n", 0, entry.start()) + 1
    try:
        return _parse_entry(clean, entry, line)
    except MALFORMED as error:
        raise PtxError(f"PTX line {line}: .entry {symbol} can't be read ({type(error).__name__}: {error})") from None


def _parse_entry(clean: str, entry: re.Match[str], line: int) -> Kernel:
    symbol = entry.group(1)
    files = {int(number): path.rsplit("/", 1)[-1] for number, path in _FILE.findall(clean)}
    target = re.search(r"\.target\s+(\w+)", clean)
    close = clean.find(")", entry.end())
    brace = clean.find("{", close)
    if close < 0 or brace < 0:
        part = "list of parameters never ends" if close < 0 else "body is missing"
        raise PtxError(f"PTX line {line}: .entry {symbol}: its {part}")
    parameters = parse_parameters(clean[entry.end() : close], line)
    end = closing_brace(clean, brace)
    head, header = clean[: entry.start()], clean[close + 1 : brace]
    body = Body(clean, files)
    body.read(brace + 1, end)
    named = {*_NAME.findall(clean, brace, end), *body.symbols()}
    shared = module_variables(head, named) + tuple(body.shared)
    check_shared(shared, symbol)
    variables = parse_variables(clean, named)
    known = {each.name for group in (parameters, shared, variables, body.local) for each in group}
    return Kernel(
        name=symbol,
        target=target.group(1) if target else "",
        parameters=parameters,
        banks=tuple(body.banks),
        instructions=body.resolved(known),
        labels=frozenset(body.label_places()),
        shared=shared,
        max_threads=_triple(header, "maxntid") or (),
        cluster=_triple(header, "reqnctapercluster"),
        files=files,
        local=tuple(body.local),
        variables=variables,
    )


def _triple(header: str, directive: str) -> tuple[int, int, int] | None:
    match = re.search(rf"\.{directive}\s+(\d+(?:\s*,\s*\d+)*)", header)
    if not match:
        return None
    numbers = [int(number) for number in match.group(1).split(",")]
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z
