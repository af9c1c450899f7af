"""What parts of a launch ask of it, each as a narrow protocol.

`Machine` is all of them. A part that needs more states a protocol of its own, made of these, where it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.memory import GlobalMemory
from cakegen.emulator.text.ptx import Kernel
from cakegen.emulator.units.pending import Pending
from cakegen.emulator.units.wgmma.issue import ProductHost

Triple = tuple[int, int, int]


class Issues(Protocol):
    """Takes what was issued, and says when it happens."""

    def issue(self, operation: Pending) -> None:
        """Something asynchronous begins."""


class Wakes(Protocol):
    """Lets parked strands go on."""

    def wake(self, waiters: list[Any]) -> None:
        """Let them try again."""


class HasMemory(Protocol):
    """Has the allocations that a launch may touch."""

    @property
    def memory(self) -> GlobalMemory:
        """Global memory."""


class Watches(Protocol):
    """Knows who polls which word of global memory."""

    @property
    def watched(self) -> Mapping[int, list[Any]]:
        """Address of a word -> strands that are parked at it."""

    def touch(self, addresses: NDArray[Any]) -> None:
        """Global words were written."""


class HasAdversary(Protocol):
    """Has the schedule."""

    @property
    def adversary(self) -> Adversary:
        """Who chooses."""


class WarpHost(Wakes, Watches, HasMemory, ProductHost, Protocol):
    """What warps and CTAs ask of their launch."""

    @property
    def kernel(self) -> Kernel:
        """The kernel's records."""

    @property
    def grid(self) -> Triple:
        """CTAs."""

    @property
    def block(self) -> Triple:
        """Threads of a CTA."""

    @property
    def cluster(self) -> Triple:
        """CTAs of a cluster."""

    @property
    def dynamic_start(self) -> int:
        """Where dynamic shared memory starts."""

    @property
    def barrier_names(self) -> Mapping[int, str]:
        """Offset in dynamic shared memory -> name."""

    @property
    def shared_symbols(self) -> Mapping[str, int]:
        """Variable in shared memory -> its offset."""

    @property
    def variables(self) -> Mapping[str, int]:
        """Variable of the module in global memory -> its address."""

    @property
    def elect_salt(self) -> int:
        """Which lane `elect.sync` takes, modulo the active ones."""

    def parameter(self, offset: int, kind: str) -> NDArray[Any]:
        """A kernel parameter as 32 equal lanes."""

    def read_clock(self) -> int:
        """Modelled time in ns."""
