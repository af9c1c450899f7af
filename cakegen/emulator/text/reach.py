"""Where control may go in a kernel, and whether it can leave it."""

from __future__ import annotations

from collections.abc import Mapping

from cakegen.emulator.text.ptx import Instruction, Kernel, Label
from cakegen.errors import PtxError

EXIT = -1


def followers(last: Instruction, index: int) -> tuple[int, ...]:
    """Where control may go on behind the last instruction of a block, whose index is given; `EXIT`: it leaves."""
    if last.root not in ("bra", "ret", "exit", "trap"):
        return (index + 1,)
    target = last.operands[0] if last.operands else None
    there = target.target if isinstance(target, Label) else EXIT
    return (there,) if last.guard is None else (there, index + 1)


def require_an_end(kernel: Kernel, after: Mapping[int, tuple[int, ...]]) -> None:
    """Refuse a kernel that control can't leave from somewhere on.

    Parameters
    ----------
    after
        First instruction of each block that control reaches -> where it may go on.

    Raises
    ------
    PtxError
        No ret, exit or trap can be reached from a block.
    """
    before: dict[int, list[int]] = {}
    for start, targets in after.items():
        for target in targets:
            before.setdefault(target, []).append(start)
    ending, found = {EXIT}, [EXIT]
    while found:
        new = set(before.get(found.pop(), ())) - ending
        ending |= new
        found.extend(new)
    endless = sorted(set(after) - ending)
    if endless:
        first = kernel.instructions[endless[0]]
        raise PtxError(f"{first.place}: from {first.text!r} on no ret, exit or trap can be reached: it never ends")
