"""Who hands what to whom inside a program: barriers and edges, and the comment that draws them. Pure.

A barrier stands here once, with its arrivals and who makes them. Its place in shared memory, its initialisation, the
kernel's comment and the report of a stuck wait all come from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cakegen.errors import EmitError
from cakegen.plan.gemm_layout import MBARRIER_BYTES


@dataclass(frozen=True)
class Barrier:
    """One kind of mbarrier of a program.

    Parameters
    ----------
    name
        What has happened once a phase is complete (`stage_full`).
    count
        How many lie side by side: one a stage, or one.
    arrivals
        That complete a phase of each.
    arrives
        Who makes them, and when.
    """

    name: str
    count: int
    arrivals: int
    arrives: str

    @property
    def camel(self) -> str:
        """The name as C++ constants spell it: `StageFull`."""
        return "".join(word.capitalize() for word in self.name.split("_"))

    @property
    def label(self) -> str:
        """The name with its count: `stage_full[12]`."""
        return self.name if self.count == 1 else f"{self.name}[{self.count}]"


@dataclass(frozen=True)
class Edge:
    """What one role hands to another, and the barrier or counter by which the other knows ("": the launch ends)."""

    source: str
    what: str
    target: str
    by: str = ""


@dataclass(frozen=True)
class Pipeline:
    """What the roles of a program hand to each other.

    Parameters
    ----------
    about
        What a CTA, or a pair of them, does; a sentence or more.
    barriers
        In shared-memory order, from its start on.
    edges
        Each barrier is on one of them, at least.

    Raises
    ------
    EmitError
        An edge names a barrier that is not there, or a barrier is on no edge.
    """

    about: str
    barriers: tuple[Barrier, ...] = ()
    edges: tuple[Edge, ...] = ()

    def __post_init__(self) -> None:
        named = {edge.by for edge in self.edges if edge.by and not edge.by.startswith(COUNTER)}
        have = {barrier.name for barrier in self.barriers}
        if named != have:
            raise EmitError(f"edges by {sorted(named)} do not match the barriers {sorted(have)}; each needs an edge")

    def offsets(self) -> Iterator[tuple[Barrier, int]]:
        """Each kind of barrier with the byte offset of its first."""
        offset = 0
        for barrier in self.barriers:
            yield barrier, offset
            offset += barrier.count * MBARRIER_BYTES

    @property
    def barrier_bytes(self) -> int:
        """Bytes of all barriers."""
        return sum(barrier.count for barrier in self.barriers) * MBARRIER_BYTES

    @property
    def diagram(self) -> tuple[str, ...]:
        """Lines of the kernel's comment: an arrow an edge, then who arrives at each barrier."""
        labels = {barrier.name: barrier.label for barrier in self.barriers}
        source = max(len(edge.source) for edge in self.edges)
        what = max(len(edge.what) for edge in self.edges)
        target = max(len(edge.target) for edge in self.edges)
        lines = [
            f"{edge.source:<{source}} --{f' {edge.what} ':-<{what + 4}}> {edge.target:<{target}}"
            f"  {labels.get(edge.by, edge.by)}".rstrip()
            for edge in self.edges
        ]
        width = max((len(label) for label in labels.values()), default=0)
        arrivals = [f"{barrier.label:<{width}}  {barrier.arrivals:>2}: {barrier.arrives}" for barrier in self.barriers]
        return (
            (*lines, "", "Barriers, each with the arrivals that complete a phase:", *arrivals)
            if arrivals
            else (*lines,)
        )


COUNTER = "counter"
"""How the label of an edge begins that is known by a word in global memory, not by a barrier."""
