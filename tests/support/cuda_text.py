"""What a header of `templates/kernels` declares, read with simple patterns: enough for how these texts are written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_NOISE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:[^\"\\\n]|\\.)*\"", re.DOTALL)
_DECLARED = (
    re.compile(r"\b(?:struct|enum class|enum)\s+(\w+)"),
    re.compile(r"\busing\s+(\w+)\s*="),
    re.compile(r"\bconstexpr\s+(?:\w+\s+)*?\w+[\s&*]+(\w+)(?:\[\w*\])?\s*(?:=|\{)"),
)
_TYPE_ALONE = re.compile(r"(?:const )?\w+(?:<[^<>]*>)?\s*[&*]*")
_ENUMERATORS = re.compile(r"\benum class \w+(?:\s*:\s*\w+)?\s*\{([^}]*)\}")


@dataclass(frozen=True)
class Function:
    """A definition.

    Parameters
    ----------
    name
        As it is called.
    parameters
        Names of its parameters, in order; that of one without a name is empty.
    body
        Text behind its parameters, initialisers included.
    """

    name: str
    parameters: tuple[str, ...]
    body: str


def code_of(text: str) -> str:
    """A text without comments and strings."""
    return _NOISE.sub(lambda found: '""' if found[0].startswith('"') else "", text)


def functions(code: str) -> Iterator[Function]:
    """Definitions of device functions, members included."""
    for found in re.finditer(r"\b__device__\b", code):
        opened = re.compile(r"[^;{}(]*?(~?\b\w+)(?:<[^()]*>)?\s*\(").match(code, found.end())
        if opened is None:
            continue
        close = _closing(code, opened.end() - 1, "()")
        begin = re.compile(r"[^;{]*").match(code, close + 1)
        assert begin is not None
        if code[begin.end() : begin.end() + 1] != "{":
            continue
        end = _closing(code, begin.end(), "{}")
        names = tuple(map(_name, _split(code[opened.end() : close])))
        yield Function(opened[1], names, code[close + 1 : end])


def declared(code: str) -> set[str]:
    """Names of the structs, aliases, constants and enumerators that a text declares."""
    names = {name for pattern in _DECLARED for name in pattern.findall(code)}
    return names | {word for listed in _ENUMERATORS.findall(code) for word in re.findall(r"\bk\w+", listed)}


def _closing(code: str, opened: int, pair: str) -> int:
    depth = 0
    for at in range(opened, len(code)):
        depth += (code[at] == pair[0]) - (code[at] == pair[1])
        if depth == 0:
            return at
    raise AssertionError(f"{pair[0]} of {code[opened : opened + 60]!r} is not closed")


def _split(parameters: str) -> list[str]:
    """At commas outside of brackets."""
    found, depth = [""], 0
    for letter in parameters:
        depth += (letter in "(<[{") - (letter in ")>]}")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [part.strip() for part in found if part.strip()]


def _name(parameter: str) -> str:
    """`const u32 (&pairs)[4]` -> `pairs`; `const Split&` -> nothing."""
    if _TYPE_ALONE.fullmatch(parameter):
        return ""
    inner = re.search(r"\(\s*[&*]\s*(\w+)\s*\)", parameter)
    return inner[1] if inner else re.findall(r"\w+", re.sub(r"\[.*\]|=.*", "", parameter))[-1]
