"""Leaf module: what the emulator reports.

A fault is raised where it is seen, with what is known there; whoever knows the instruction, the CTA and the warp adds
them on the way up.
"""

from __future__ import annotations

from dataclasses import dataclass

from cakegen.emulator.text.ptx import Instruction
from cakegen.errors import EmulationError


@dataclass(frozen=True)
class Where:
    """The point in a program: instruction, CTA (linear index in the grid), warp, and the lanes that were active."""

    instruction: Instruction
    cta: int
    warp: int
    lanes: str

    def __str__(self) -> str:
        """One line."""
        text = self.instruction.text
        text = text if len(text) <= 120 else f"{text[:100]} … {text[-16:]}"
        return f"CTA {self.cta} warp {self.warp} lanes {self.lanes}: `{text}` at {self.instruction.place}"


class Fault(EmulationError):
    """The program did something that its GPU does not define, or that its own bookkeeping contradicts.

    Parameters
    ----------
    kind
        A short name that tests and filters use: `out-of-bounds`, `unwritten-read`, `pending-write`, `pending-read`,
        `barrier`, `deadlock`, `trap`, `divergence`, `descriptor`, `exit`, `output`, `race`, `proxy`, `programmatic`,
        `assert`; of Blackwell `tensor-memory`, `fence`, `launch-control`.
    message
        What was done to what, with numbers.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.where: Where | None = None
        self.launch = ""

    def at(self, where: Where) -> Fault:
        """The same fault with its place, unless it has one."""
        if self.where is None:
            self.where = where
        return self

    def __str__(self) -> str:
        """Kind, message, place, and the launch where there are several."""
        place = f"\n  at {self.where}" if self.where is not None else ""
        launch = f"\n  in {self.launch}" if self.launch else ""
        return f"{self.kind}: {self.message}{place}{launch}"


def lanes_text(active: list[int]) -> str:
    """`0-31`, `0`, `0,4,8`: lanes as a person writes them."""
    if active == list(range(active[0], active[-1] + 1)) if active else False:
        return f"{active[0]}-{active[-1]}" if len(active) > 1 else str(active[0])
    return ",".join(map(str, active)) or "none"
