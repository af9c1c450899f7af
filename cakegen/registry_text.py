"""A registry's text and the shared folder's table -> plain values, parsed and never executed. Imports errors and model.

`cakegen.registry` says what the names mean, and makes records of the values.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cakegen.errors import RegistryError
from cakegen.model import from_literal

REGISTRY_FILE = "cake_jit.py"
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]*")
SHOWN_CHARACTERS = 80
SHARED_FOLDER = "shared"
SHARED_FILE = "headers.json"
SHARED_SCHEMA = 1
JSON_NAMES = "true, false, null = True, False, None"
"""The registry's one line that is no literal: it lets Python read the JSON below."""
TABLES = ("FLAGS", "ARG_PLANS", "TENSOR_MAPS", "BARRIERS", "LAUNCHES")
_NAMES = ("SCHEMA_VERSION", "EXPORT", "MODEL", *TABLES, "FILES", "MODULES", "KERNELS", "SPECIALIZATIONS")
_BETWEEN = re.compile(rf"(?:[ \t]*(?:#[^\n]*)?\n|{re.escape(JSON_NAMES)}\n)*")
_ASSIGNMENT = re.compile(r"([A-Z_]+) = ")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class SharedHeader:
    """A row of the shared folder's table."""

    sha256: str
    includes: tuple[str, ...]


def file_digest(text: str) -> str:
    """The sha256 of a file's bytes, in hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def header_closure(includes: Sequence[str], includes_of: Callable[[str], Sequence[str]]) -> tuple[str, ...]:
    """Headers that are included, directly or not, in the order of inclusion, each once."""
    seen: dict[str, None] = {}
    pending = list(includes)
    while pending:
        name = pending.pop(0)
        if name not in seen:
            seen[name] = None
            pending.extend(includes_of(name))
    return tuple(seen)


WRITERS = {"1": "before 0.1.0", "2": "before 0.1.0", "3": "0.1.0"}
"""The release of cakegen that wrote registries of each schema number."""


def written_by(version: Any) -> str:
    """Which release wrote a registry of a schema version, in words: `written by cakegen 0.1.0`."""
    number = version.partition("-")[0] if isinstance(version, str) else ""
    if number in WRITERS:
        return f"written by cakegen {WRITERS[number]}"
    if number.isdecimal() and int(number) > max(map(int, WRITERS)):
        return "written by a later cakegen"
    return "which no release of cakegen wrote"


def parse_tables(text: str, where: str, schema: str | None = None) -> dict[str, Any]:
    """The names that a registry module assigns, with their values; the module is parsed and never executed.

    Parameters
    ----------
    text
        The module.
    where
        What to call it in a message: its file, or its revision and path.
    schema
        The version that it must be of; it is refused before the rest is read. None: any.

    Raises
    ------
    RegistryError
        It assigns something that is no JSON, holds something else, lacks a name, or is of another schema.
    """
    values: dict[str, Any] = {}
    try:
        for name, value in _assignments(text):
            if name in values:
                raise ValueError(f"{name} is assigned twice")
            values[name] = value
            if name == "SCHEMA_VERSION" and schema not in (None, value):
                raise RegistryError(
                    f"{where}: schema version {value!r}, {written_by(value)}; this cakegen reads {schema!r}. Export"
                    " again, or read it with the cakegen that wrote it."
                )
    except (ValueError, MemoryError, RecursionError) as error:
        raise RegistryError(f"{where}: not a registry ({type(error).__name__}: {error}); export again") from None
    missing = [name for name in _NAMES if name not in values]
    if missing:
        raise RegistryError(f"{where}: lacks {', '.join(missing)}; export again")
    return values


def _assignments(text: str) -> Iterator[tuple[str, Any]]:
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    at = _end_of_blanks(text, 0)
    while at < len(text):
        head = _ASSIGNMENT.match(text, at)
        if head is None:
            line = text.count("\n", 0, at) + 1
            raise ValueError(f"line {line}: needs `NAME = ` and JSON; got {text[at : at + SHOWN_CHARACTERS]!r}")
        value, end = decoder.raw_decode(text, head.end())
        if text[end : end + 1] not in ("", "\n"):
            line = text.count("\n", 0, end) + 1
            raise ValueError(
                f"line {line}: needs a line's end behind a value; got {text[end : end + SHOWN_CHARACTERS]!r}"
            )
        yield head[1], value
        at = _end_of_blanks(text, end)


def _end_of_blanks(text: str, at: int) -> int:
    """Behind comments, blank lines, and the line that gives JSON's names to Python."""
    found = _BETWEEN.match(text, at)
    assert found is not None
    return found.end()


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def parse_shared_table(text: str, where: str) -> dict[str, SharedHeader]:
    """The same from its text; `where` names it in a message."""
    try:
        values = json.loads(text)
        got = values.get("schema") if isinstance(values, dict) else type(values).__name__
        if type(got) is not int or got != SHARED_SCHEMA:
            raise RegistryError(f"schema {got!r}; this cakegen reads {SHARED_SCHEMA}")
        headers = {}
        for name, row in values["headers"].items():
            check_file_name("headers", name)
            headers[name] = from_literal(SharedHeader, row)
            checked_digest(name, headers[name].sha256)
    except (AttributeError, KeyError, ValueError, RecursionError, RegistryError) as error:
        raise RegistryError(
            f"{where}: damaged table of headers ({type(error).__name__}: {error}); export again"
        ) from None
    return headers


def check_file_name(where: str, name: object) -> None:
    """Refuse what would name a file outside of the tree."""
    if not isinstance(name, str) or FILE_NAME.fullmatch(name) is None:
        raise RegistryError(f"{where}: needs a plain file name of letters, digits, '_' and '.'; got {name!r}")


def checked_digest(file: str, digest: object) -> str:
    """A file's digest, which must be the 64 hex digits of a sha256.

    Raises
    ------
    RegistryError
        It is none.
    """
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise RegistryError(f"FILES: {file!r} needs a sha256 of 64 hex digits; got {digest!r}")
    return digest
