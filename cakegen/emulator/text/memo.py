"""Runs of register arithmetic in a block, remembered: the same inputs give the same outputs, so they are computed once.

Addresses, descriptors and loop counters are the same in every stage of a ring, in most warps and in most CTAs. What
differs each time, as data do, is noticed after some misses, and is computed from then on.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cakegen.emulator.faults import Fault
from cakegen.emulator.text.ptx import Instruction, Kernel, Register

# A line of a block: the index of its instruction, and its text.
Line = tuple[int, str]

# Shorter runs cost as much as a lookup does.
_SHORTEST = 4
_MOST_INPUTS = 12
# Misses after which a run is given up whose inputs seldom repeat, and entries after which a table starts again.
_PATIENCE = 64
_MOST_ENTRIES = 4096
_TARGET = re.compile(r"R\[(\d+)\] =(?!=)")
_REGISTER = re.compile(r"R\[(\d+)\]")
_WARP = re.compile(r"\bw\b")


@dataclass(eq=False)
class Memo:
    """The outputs of one run by its inputs.

    Parameters
    ----------
    recall
        Takes the registers (and the mask); whether it has put the outputs into them.
    keep
        Takes the registers as the run left them.
    """

    recall: Callable[..., bool]
    keep: Callable[[list[Any]], None]


class Touched:
    """Which instructions of a kernel read or write a register."""

    def __init__(self, kernel: Kernel) -> None:
        self._by: dict[int, set[int]] = {}
        for index, instruction in enumerate(kernel.instructions):
            for register in registers_of(instruction):
                self._by.setdefault(register, set()).add(index)

    def only_in(self, register: int, indices: set[int]) -> bool:
        """Whether no other instruction does."""
        return self._by.get(register, set()) <= indices


def registers_of(instruction: Instruction) -> set[int]:
    """Indices of all registers that an instruction names."""
    guard = set() if instruction.guard is None else {instruction.guard.index}
    return guard.union(*map(_registers_in, instruction.operands))


def _registers_in(operand: Any) -> set[int]:
    if isinstance(operand, Register):
        return {operand.index}
    if isinstance(operand, tuple):
        return set().union(*map(_registers_in, operand))
    return set().union(*(_registers_in(getattr(operand, name)) for name in _fields_of(operand.__class__)))


@functools.cache
def _fields_of(kind: type) -> tuple[str, ...]:
    return tuple(each.name for each in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


def is_pure(text: str) -> bool:
    """Whether a line is arithmetic on registers alone."""
    return text.startswith("R[") and not _WARP.search(text)


class MemoWriter:
    """Puts memos into blocks of one kernel.

    Parameters
    ----------
    excluded
        Registers whose arrays others tell apart by identity.
    """

    def __init__(self, kernel: Kernel, excluded: Iterable[int], memos: list[Memo]) -> None:
        self._kernel = kernel
        self._excluded = set(excluded)
        self._memos = memos

    @functools.cached_property
    def _touched(self) -> Touched:
        return Touched(self._kernel)

    def rewrite(self, lines: Sequence[Line], divergent: bool) -> list[Line]:
        """Lines of a block, with runs of arithmetic behind a lookup."""
        found: list[Line] = []
        run: list[Line] = []
        for index, text in [*lines, (-1, "")]:
            if index >= 0 and is_pure(text) and not self._excluded & registers_of(self._kernel.instructions[index]):
                run.append((index, text))
                continue
            found += self._remember(run, divergent)
            run = []
            if index >= 0:
                found.append((index, text))
        return found

    def _remember(self, run: list[Line], divergent: bool) -> list[Line]:
        inputs, outputs = self._ends(run)
        if len(run) < _SHORTEST or len(inputs) > _MOST_INPUTS or not outputs:
            return run
        number = len(self._memos)
        self._memos.append(_memo(inputs, outputs, divergent))
        mask = ", m" if divergent else ""
        return [
            (run[0][0], f"if not M[{number}].recall(R{mask}):"),
            *((index, f" {text}") for index, text in run),
            (run[-1][0], f" M[{number}].keep(R)"),
        ]

    def _ends(self, run: list[Line]) -> tuple[list[int], list[int]]:
        """Registers that a run reads before it writes them, and those that it leaves to others."""
        read: dict[int, None] = {}
        written: dict[int, None] = {}
        for _, text in run:
            targets = [int(index) for index in _TARGET.findall(text)]
            for index in map(int, _REGISTER.findall(_TARGET.sub("", text))):
                if index not in written:
                    read[index] = None
            written.update(dict.fromkeys(targets))
        indices = {index for index, _ in run}
        kept = [each for each in written if each in read or not self._touched.only_in(each, indices)]
        return list(read), kept


def _memo(inputs: list[int], outputs: list[int], divergent: bool) -> Memo:
    keys = [f"R[{index}].tobytes()" for index in inputs] + ["m.tobytes()"] * divergent
    names = ", ".join(f"R[{index}]" for index in outputs)
    source = f"""
def make(Fault):
    table = {{}}
    waiting, calls, misses = None, 0, 0
    def recall(R{", m" * divergent}):
        nonlocal waiting, calls, misses
        if misses < 0:
            return False
        calls += 1
        try:
            key = ({"".join(f"{key}, " for key in keys)})
        except Fault:
            waiting = None
            return False
        found = table.get(key)
        if found is not None:
            {names}, = found
            return True
        misses += 1
        waiting = key
        if misses % {_PATIENCE} == 0 and 2 * misses > calls:
            misses = -1
            table.clear()
        elif len(table) >= {_MOST_ENTRIES}:
            table.clear()
        return False
    def keep(R):
        if misses >= 0 and waiting is not None:
            table[waiting] = ({names}, )
    return recall, keep
"""
    scope: dict[str, Any] = {}
    exec(source, scope)
    return Memo(*scope["make"](Fault))
