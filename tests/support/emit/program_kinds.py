"""Kinds of programs, for tests that take one of each: the same body, switches and call; what differs is sizes."""

from __future__ import annotations

import re
from collections.abc import Hashable

from cakegen.registry import Program, Registry

# members of `struct Cfg` that are counts, and of which code asks whether they are 1
SWITCHES = ("kClusterCtas", "kTileCtas", "kTokenParts", "kTileGroups", "kGroupBlocks", "kStaggerUnits")


def switches_of(text: str) -> tuple[str, ...]:
    """The switches of a program with their values."""
    return tuple(re.findall(rf"^    static constexpr int ((?:{'|'.join(SWITCHES)}) = \d+);", text, re.MULTILINE))


def kind_of(registry: Registry, program: Program) -> tuple[Hashable, ...]:
    """Role, targets, every flag and switch, the barriers' names, and the call with its operands."""
    text = registry.read(program.kernel_source)
    flags = re.findall(r"^    static constexpr bool (\w+ = \w+);", text, re.MULTILINE)
    call = text[text.index(") {\n") :]
    return program.role, program.arches, *flags, *switches_of(text), *(name for name, *_ in program.barriers), call
