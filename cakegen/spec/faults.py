"""Leaf module: reads a TOML file, and says in this project's words what pydantic found in it. Imports errors."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from cakegen.errors import SpecError

MOST_FILE_BYTES = 1 << 20
MOST_LEVELS = 32


def read_toml(file: Path, what: str) -> dict[str, Any]:
    """The tables of a file.

    Parameters
    ----------
    what
        What the file is, for the error of a missing one.

    Raises
    ------
    SpecError
        It is missing, larger than any such file, or not TOML: also where a number has more digits than Python reads,
        or a table more levels than any such file has.
    """
    where = f"{file.parent.name}/{file.name}"
    try:
        size = file.stat().st_size
        if size > MOST_FILE_BYTES:
            raise SpecError(f"{where}: {size} bytes; a file of at most {MOST_FILE_BYTES} is read")
        values = tomllib.loads(file.read_bytes().decode("utf-8"))
    except OSError as error:
        raise SpecError(f"{file}: {error.strerror}; {what}") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{where}: not a TOML file: {error}") from None
    if _levels(values) > MOST_LEVELS:
        # dotted keys nest without brackets, as deep as a line is long
        raise SpecError(f"{where}: tables within tables, more than {MOST_LEVELS} levels of them; no such file has them")
    return values


def _levels(values: Any) -> int:
    """How deep tables and arrays are nested, counted up to one more than are read."""
    within, levels = [values], 0
    while within and levels <= MOST_LEVELS:
        levels += 1
        held = (each.values() if isinstance(each, dict) else each for each in within)
        within = [item for items in held for item in items if isinstance(item, (dict, list))]
    return levels


def frozen(value: Any) -> Any:
    """TOML arrays as tuples, which a strict model takes for tuples."""
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    return tuple(frozen(item) for item in value) if isinstance(value, list) else value


def explain(entry: Any, why: str = "") -> str:
    """One fault: the field, what was received, what is needed and why, what to do.

    Parameters
    ----------
    entry
        One of `ValidationError.errors()`.
    why
        What the bounds of the field come from.
    """
    location = [part for part in entry["loc"] if isinstance(part, int) or not part.startswith("tuple[")]
    field = ".".join(str(part) for part in location)
    if entry["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{field}: unknown key; remove it, or correct its spelling"
    if entry["type"] == "missing":
        return f"{field}: missing; every key is required that is no rule which may be left out"
    return f"{field} = {_shown(entry['input'])}: {entry['msg']}{f' ({why})' if why else ''}"


def _shown(value: Any) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."
