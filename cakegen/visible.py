"""Leaf module: text of others, for a terminal or a page. Imports nothing.

What cannot be seen is spelled: control characters, which move a terminal's cursor or end a line; characters that turn
the direction of writing, which show code in another order than it has; lone surrogates, which no file can hold.
"""

from __future__ import annotations

import re
from typing import Any

_UNSEEN = re.compile(r"[^\S ]|[\x00-\x1f\x7f-\x9f\xad]|[^\x00-\xff]")


def visible(text: str, keep: str = "") -> str:
    """A text whose every character is printable; others are spelled as Python spells them (`\\x1b`, `\\u202e`).

    Parameters
    ----------
    keep
        Characters that stay as they are: line ends and tabs, where the text is more than a word.
    """

    def spelled(found: re.Match[str]) -> str:
        character = found[0]
        return character if character.isprintable() or character in keep else repr(character)[1:-1]

    return _UNSEEN.sub(spelled, text)


def unseen_text(value: Any) -> str:
    """The first text of nested literals, names included, that holds what `visible` spells; empty where none does."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple)):
        return next((found for item in value if (found := unseen_text(item))), "")
    return value if isinstance(value, str) and not value.isprintable() else ""
