"""Leaf module: JSON as text, one way only, so that equal values give equal bytes. Imports no cakegen."""

from __future__ import annotations

import json
from typing import Any

_INDENT = 4


def render_literal(value: Any, columns: int, indent: int = 0, reserved: int = 0) -> str:
    """A nested dict, list, number or string as JSON in ASCII; one line where it fits, else one entry a line.

    Parameters
    ----------
    value
        Dicts keep their order: sort them before, where the order means nothing.
    columns
        Longest line that is wanted; a single string may exceed it.
    indent
        Blanks in front of the line that the literal starts on.
    reserved
        Columns of that line which are taken beside the indent (a key, a comma).
    """
    flat = _flat(value)
    if indent + reserved + len(flat) <= columns or not isinstance(value, (dict, list, tuple)) or not value:
        return flat
    inner = " " * (indent + _INDENT)
    if isinstance(value, dict):
        entries = [_entry(key, item, columns, indent + _INDENT) for key, item in value.items()]
        opening, closing = "{", "}"
    else:
        entries = [render_literal(item, columns, indent + _INDENT, reserved=1) for item in value]
        opening, closing = "[", "]"
    body = ",\n".join(f"{inner}{entry}" for entry in entries)
    return f"{opening}\n{body}\n{' ' * indent}{closing}"


def _entry(key: str, item: Any, columns: int, indent: int) -> str:
    head = f"{_flat(key)}: "
    one_line = head + render_literal(item, columns, indent, reserved=len(head) + 1)
    if indent + len(one_line.split("\n", 1)[0]) + 1 <= columns or isinstance(item, (dict, list, tuple)):
        return one_line
    deeper = indent + _INDENT
    return f"{head.rstrip()}\n{' ' * deeper}{_flat(item)}"


def _flat(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
