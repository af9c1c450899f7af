"""A translated basic block, whose Python function is compiled when it first runs: most blocks of a program never do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cakegen.emulator.text.memo import Line, MemoWriter

Split = tuple[Any, int, int]
BlockFunction = Callable[..., int | Split]


@dataclass(eq=False)
class Block:
    """A basic block.

    Parameters
    ----------
    name
        What tracebacks call it.
    count
        How many instructions it runs.
    written
        Its lines, without memos.
    divergent
        Whether its function takes the active lanes.
    memos
        Who puts memos into it.
    scope
        What its lines name.
    """

    name: str
    count: int
    written: Sequence[Line]
    divergent: bool
    memos: Callable[[], MemoWriter]
    scope: dict[str, Any]

    @functools.cached_property
    def lines(self) -> list[int]:
        """Which instruction each line of the function is."""
        return [index for index, _ in self._rewritten]

    @functools.cached_property
    def _rewritten(self) -> list[Line]:
        return self.memos().rewrite(self.written, self.divergent)

    @functools.cached_property
    def run(self) -> BlockFunction:
        """Its function."""
        head = "def block(w, R, m):" if self.divergent else "def block(w, R):"
        source = "\n".join([head, *(f" {line}" for _, line in self._rewritten)])
        local: dict[str, BlockFunction] = {}
        exec(compile(source, self.name, "exec"), self.scope, local)
        return local["block"]
