"""wgmmas of a block that follow each other, brought together: they are decoded and issued as one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from cakegen.emulator.text.memo import Line, is_pure, registers_of
from cakegen.emulator.text.ptx import Kernel
from cakegen.emulator.units.wgmma.batch import IssueRun

_ISSUE = "w.wgmma.issue("


def issue_later(lines: Sequence[Line], kernel: Kernel) -> list[Line]:
    """Lines with each wgmma behind the arithmetic that follows and that has nothing to do with it."""
    found: list[Line] = []
    held: list[Line] = []
    taken: set[int] = set()
    for index, text in lines:
        if text.startswith(_ISSUE):
            held.append((index, text))
            taken |= registers_of(kernel.instructions[index])
        elif held and is_pure(text) and not taken & registers_of(kernel.instructions[index]):
            found.append((index, text))
        else:
            found += [*held, (index, text)]
            held, taken = [], set()
    return found + held


def issue_together(lines: Sequence[Line], decoded: dict[Any, Any]) -> list[Line]:
    """Those that follow each other in one line.

    Parameters
    ----------
    decoded
        What lines name: the form of a wgmma by its index. A run is added by the indices of all of its wgmmas.
    """
    found: list[Line] = []
    for is_issue, group in itertools.groupby(lines, lambda line: line[1].startswith(_ISSUE)):
        run = list(group)
        if is_issue:
            indices = tuple(index for index, _ in run)
            decoded[indices] = IssueRun(tuple((decoded[index], index) for index in indices))
            run = [(indices[0], f"{_ISSUE}I[{indices}], R)")]
        found += run
    return found
