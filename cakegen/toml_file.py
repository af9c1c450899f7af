"""Leaf module: reads a TOML file within bounds of size and depth. Imports errors."""

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
