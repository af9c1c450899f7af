"""Leaf module: the parts of a text that has a limit, and which of them stay. Imports nothing of cakegen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# from what stays longest to what goes first
EDIT, DECISIONS, COST, FOLLOWING, KEYS = range(5)
_CUT = "… {} more lines"
_LEAST_ROOM = 400


@dataclass(frozen=True)
class Part:
    """One part, which stands alone.

    Parameters
    ----------
    rank
        `EDIT`, `DECISIONS`, `COST`, `FOLLOWING` or `KEYS`.
    title, body
        Markdown; the body as code where there is a `language`.
    language
        Of the code; empty for plain code, None where the body is Markdown.
    """

    rank: int
    title: str
    body: str
    language: str | None = None
    opened: bool = False

    @property
    def text(self) -> str:
        """The whole part."""
        return self._framed(self.body)

    def shortened(self, room: int) -> str | None:
        """The part in at most `room` characters: code loses its last lines; None where that leaves nothing of it."""
        if len(self.text) <= room:
            return self.text
        frame = len(self._framed("")) + len(_CUT) + 16
        if self.language is None or room < frame + _LEAST_ROOM:
            return None
        lines = self.body.splitlines()
        used, kept = frame, 0
        while kept < len(lines) and used + len(lines[kept]) + 1 <= room:
            used += len(lines[kept]) + 1
            kept += 1
        if not kept:
            return None
        return self._framed("\n".join([*lines[:kept], _CUT.format(len(lines) - kept)]))

    def _framed(self, body: str) -> str:
        if self.language is not None:
            longest = max((len(run) for run in re.findall("`+", self.body)), default=0)
            fence = "`" * max(3, longest + 1)
            body = f"{fence}{self.language}\n{body}\n{fence}"
        return f"<details{' open' if self.opened else ''}><summary>{self.title}</summary>\n\n{body}\n\n</details>"


def fit_parts(parts: Sequence[Part], room: int) -> list[str | None]:
    """The text of each part, shortened, or None for what is left out, so that all have at most `room` characters.

    Parts of a rank share what is left evenly, the shortest first. No list of keys stays once anything else has gone.
    """
    texts: list[str | None] = [None] * len(parts)
    complete = True
    for rank in range(EDIT, KEYS + 1):
        if rank == KEYS and not complete:
            break
        waiting = sorted((i for i, part in enumerate(parts) if part.rank == rank), key=lambda i: len(parts[i].text))
        for position, index in enumerate(waiting):
            share = room if rank == KEYS else room // (len(waiting) - position)
            text = parts[index].shortened(share - 2)
            texts[index] = text
            room -= len(text) + 2 if text is not None else 0
            complete = complete and text == parts[index].text
    return texts
