"""Functions of a module, calls of them, and tables of branches, as text (PTX ISA 5.1.6, 7, 9.7.12)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cakegen.emulator.text.operand_text import closing_brace

_CALL = re.compile(
    r"(?:\.uni)?\s*(?:\(\s*([^)]*?)\s*\)\s*,)?\s*([\w$%]+)\s*(?:,\s*\(\s*([^)]*?)\s*\))?\s*(?:,\s*([\w$]+)\s*)?$"
)


@dataclass(frozen=True)
class Call:
    """A call: the function's name, the variables that it fills, and those that it takes."""

    name: str
    results: tuple[str, ...]
    arguments: tuple[str, ...]
    indirect: bool


@dataclass(frozen=True)
class Function:
    """A function with a body: names of its results and parameters, and where its statements start and end."""

    results: tuple[str, ...]
    parameters: tuple[str, ...]
    start: int
    end: int


def parse_call(text: str) -> Call:
    """`call`, without its name.

    Raises
    ------
    ValueError
        It is none.
    """
    match = _CALL.match(text)
    if match is None:
        raise ValueError("a call is `call (results), function, (arguments)`")
    results, name, arguments, prototype = match.groups()
    return Call(name, _names(results), _names(arguments), prototype is not None or name.startswith("%"))


def _names(text: str | None) -> tuple[str, ...]:
    """What stands between parentheses: the last word of each part, without its extent."""
    parts = (part.split("[")[0].split() for part in (text or "").split(","))
    return tuple(words[-1] for words in parts if words)


def find_function(module: str, name: str) -> Function | None:
    """A function by its name; None: the module only declares it, or does not hold it.

    Raises
    ------
    PtxError
        Its body has no end.
    """
    pattern = rf"\.func\s*(?:\.\w+\s*)*(?:\(([^)]*)\))?\s*{re.escape(name)}(?![\w$])\s*(?:\(([^)]*)\))?[^;{{]*([;{{])"
    for match in re.finditer(pattern, module):
        if match.group(3) == "{":
            start = match.end()
            return Function(_names(match.group(1)), _names(match.group(2)), start, closing_brace(module, start - 1))
    return None


def branch_targets(module: str, start: int, end: int, name: str) -> tuple[str, ...]:
    """Labels of a `.branchtargets` list, which stands between two places of a module; none: it does not."""
    pattern = re.compile(rf"(?<![\w$]){re.escape(name)}\s*:\s*\.branchtargets\s+([^;]*);")
    match = pattern.search(module, start, end)
    return tuple(part.strip() for part in match.group(1).split(",")) if match else ()
