"""Leaf module: reads a TOML file, and says in this project's words what pydantic found in it. Imports errors."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from cakegen.errors import SpecError


def read_toml(file: Path, what: str) -> dict[str, Any]:
    """The tables of a file.

    Parameters
    ----------
    what
        What the file is, for the error of a missing one.

    Raises
    ------
    SpecError
        It is missing or not TOML.
    """
    try:
        return tomllib.loads(file.read_bytes().decode("utf-8"))
    except OSError as error:
        raise SpecError(f"{file}: {error.strerror}; {what}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{file.parent.name}/{file.name}: not a TOML file: {error}") from None


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
    if entry["type"] == "extra_forbidden":
        return f"{field}: unknown key; remove it, or correct its spelling"
    if entry["type"] == "missing":
        return f"{field}: missing; every key is required that is no rule which may be left out"
    return f"{field} = {_shown(entry['input'])}: {entry['msg']}{f' ({why})' if why else ''}"


def _shown(value: Any) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."
