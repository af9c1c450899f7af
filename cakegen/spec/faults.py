"""Leaf module: says in this project's words what pydantic found in a TOML file. Imports nothing of cakegen."""

from __future__ import annotations

from typing import Any


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
