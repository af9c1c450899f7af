"""The adversary: which warp runs next, and when what was issued happens. Leaf module: imports zlib and random only.

All choices come from one seed, and every choice goes into a hash: two runs with one hash had one schedule.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

# A warp's number is its CTA's index in the grid times this, plus its index in the CTA.
MAX_WARPS = 64
SCHEDULES = ("random", "early", "late")
# Of the polls that would succeed or park, so many fail first under a random schedule: `try_wait` may.
_SPURIOUS = 1 / 64
# Of the requests that could take over a waiting cluster, so many are refused.
_REFUSED = 1 / 8
# Warps whose priorities are compared at one point: all of a large grid would take long.
_CANDIDATES = 24
# Draws for a warp that may run, before all of a large grid are looked at.
_TRIES = 8
STYLES = ("starve", "priority", "starve", "even")
# What is starved together: single warps, the warps of one role (their index in the CTA), the warps of one CTA.
_GROUPINGS: tuple[Callable[[int], int], ...] = (
    lambda number: number,
    lambda number: number % MAX_WARPS,
    lambda number: number // MAX_WARPS,
)


class Numbered(Protocol):
    """A warp, as the adversary sees it."""

    @property
    def number(self) -> int:
        """The same for the same warp in every run."""


W = TypeVar("W", bound=Numbered)
# What is known of a ready warp: nothing yet, that it is starved, that it is not.
_UNKNOWN, _STARVED, _FED = range(3)


class ReadyWarps(list[W]):
    """Warps that can go on, each with a mark of the adversary's beside it, so that it need not ask all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.marks = bytearray()

    def enter(self, warp: W) -> None:
        """One more."""
        self.append(warp)
        self.marks.append(_UNKNOWN)

    def leave(self, index: int) -> None:
        """One less; the last takes its place."""
        self[index] = self[-1]
        self.pop()
        self.marks[index] = self.marks[-1]
        self.marks.pop()


@dataclass
class Adversary:
    """A legal but hostile schedule.

    Parameters
    ----------
    kind
        `random`: by the seed. `early`: whatever is issued happens at once, and warps run in their order. `late`:
        what was issued happens only once no warp can go on, the newest first, and the warp that was woken last runs.
    seed
        Of the random schedule.

    Notes
    -----
    A seed takes one of three styles. `even`: any ready warp at each point. `priority`: every warp has a priority that
    seldom changes, so that one runs as far ahead of the others as it can (a ring's depth, a cluster's peer). `starve`:
    some warps, some roles or some CTAs go on only when nothing else can happen at all; whatever should have waited
    for them and does not, gets ahead.
    """

    kind: str = "random"
    seed: int = 0
    digest: int = 0
    choices: int = 0
    _random: random.Random = field(init=False, repr=False)
    _style: str = field(init=False, default="even")
    _priorities: dict[int, float] = field(init=False, repr=False, default_factory=dict)
    _starved: dict[int, bool] = field(init=False, repr=False, default_factory=dict)
    _groups: dict[int, bool] = field(init=False, repr=False, default_factory=dict)
    _landing_bias: float = field(init=False, default=0.5)
    _group_of: Callable[[int], int] = field(init=False, repr=False, default=lambda number: number)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        if self.kind == "random":
            self._style = STYLES[self.seed % len(STYLES)]
            self._landing_bias = self._random.choice((0.02, 0.2, 0.5, 0.9))
            self._group_of = self._random.choice(_GROUPINGS)

    @property
    def at_issue(self) -> bool:
        """Whether an operation happens as it is issued."""
        return self.kind == "early"

    def products_at_issue(self, count: int) -> list[bool]:
        """Which of some wgmmas read their operands at once; the others when they are waited for."""
        if self.kind != "random":
            return [self.kind == "early"] * count
        draw = self._random.random
        return [draw() < 0.5 for _ in range(count)]

    def fails_spuriously(self) -> bool:
        """Whether a `try_wait` that could succeed or park returns false instead."""
        return self.kind == "random" and self._random.random() < _SPURIOUS

    def residency(self, clusters: int, cooperative: bool) -> int:
        """Clusters that are resident at once: all of a cooperative grid; else as few as one."""
        if cooperative or self.kind == "late":
            return clusters
        return 1 if self.kind == "early" else min(clusters, self._random.choice((1, 2, 5)))

    def refuses_cancel(self) -> bool:
        """Whether cluster launch control says that nothing is left, though clusters wait."""
        return self.kind == "random" and self._random.random() < _REFUSED

    def elect_salt(self) -> int:
        """Which lane `elect.sync` takes, as a number modulo the active lanes."""
        return 0 if self.kind == "early" else self._random.randrange(32) if self.kind == "random" else 31

    def overlap_style(self) -> str:
        """How launches that may overlap do: `apart`, the dependent `ahead` as far as it can get, or `even`."""
        if self.kind != "random":
            return "apart" if self.kind == "early" else "ahead"
        return self._random.choice(("ahead", "ahead", "even"))

    def choose_launch(self, count: int, style: str) -> int:
        """Which of some launches of a stream, the oldest first, goes on."""
        return self._random.randrange(count) if style == "even" else count - 1

    def note(self, choice: int) -> None:
        """Put a choice that was made elsewhere into the hash."""
        self._note(choice)

    def choose(self, ready: ReadyWarps[W], pending: int) -> tuple[bool, int]:
        """(whether something issued happens, its index; or the index of the warp that goes on).

        At least one of the two must be there.
        """
        candidates: Sequence[int] = range(len(ready))
        if self._style == "starve":
            candidates = self._fed(ready)
            if not candidates and not pending:
                candidates = range(len(ready))
        lands = pending > 0 and (
            not candidates or (self.kind == "random" and self._random.random() < self._landing_bias)
        )
        if lands:
            index = self._below(pending) if self.kind == "random" else pending - 1
            self._note(index)
            return True, index
        index = self._pick(ready, candidates)
        self._note(~ready[index].number)
        return False, index

    def _pick(self, ready: Sequence[Numbered], candidates: Sequence[int]) -> int:
        if self.kind != "random":
            return candidates[0] if self.kind == "early" else candidates[-1]
        if self._style != "priority":
            return candidates[self._below(len(candidates))]
        if len(candidates) > _CANDIDATES:
            candidates = self._random.sample(candidates, _CANDIDATES)
        best = max(candidates, key=lambda index: self._priority(ready[index].number))
        if self._random.random() < 1 / 32:
            self._priorities[ready[best].number] = self._random.random()
        return best

    def _priority(self, number: int) -> float:
        if number not in self._priorities:
            self._priorities[number] = self._random.random()
        return self._priorities[number]

    def _fed(self, ready: ReadyWarps[W]) -> Sequence[int]:
        """Warps that are not starved: one of them, drawn evenly, where a few draws find one; else all there are."""
        marks, size = ready.marks, len(ready)
        # `_below`, written out: most draws of a run are made here
        draw, bits = self._random.getrandbits, size.bit_length()
        for _ in range(_TRIES if size else 0):
            index = draw(bits)
            while index >= size:
                index = draw(bits)
            if (marks[index] or self._mark(ready, index)) == _FED:
                return (index,)
        index = marks.find(_UNKNOWN)
        while index >= 0:
            self._mark(ready, index)
            index = marks.find(_UNKNOWN, index + 1)
        found = []
        index = marks.find(_FED)
        while index >= 0:
            found.append(index)
            index = marks.find(_FED, index + 1)
        return found

    def _mark(self, ready: ReadyWarps[W], index: int) -> int:
        mark = _STARVED if self._is_starved(ready[index].number) else _FED
        ready.marks[index] = mark
        return mark

    def _below(self, size: int) -> int:
        """`randrange(size)`: the same draws, in half the time."""
        bits = size.bit_length()
        draw = self._random.getrandbits
        value = draw(bits)
        while value >= size:
            value = draw(bits)
        return value

    def _is_starved(self, number: int) -> bool:
        if number not in self._starved:
            group = self._group_of(number)
            self._starved[number] = self._groups.setdefault(group, self._random.random() < 0.5)
        return self._starved[number]

    def _note(self, choice: int) -> None:
        self.choices += 1
        self.digest = zlib.crc32(choice.to_bytes(4, "little", signed=True), self.digest)

    @property
    def schedule_hash(self) -> str:
        """8 hex digits that name the schedule taken."""
        return f"{zlib.crc32(self.choices.to_bytes(8, 'little'), self.digest):08x}"
