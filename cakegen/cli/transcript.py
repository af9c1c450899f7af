"""Lines of a command that say when they were printed. Imports click."""

from __future__ import annotations

import time
from collections.abc import Callable

import click


class Transcript:
    """Prints lines on stdout, each behind the seconds since the transcript began.

    Parameters
    ----------
    now
        Seconds of a clock.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._began = now()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._now() - self._began

    def line(self, text: str) -> None:
        """Print a line; further lines of a text are indented below its first."""
        click.echo(f"{self.seconds:6.1f} s  " + text.replace("\n", "\n" + 10 * " "))

    def head(self, text: str) -> None:
        """Print the heading of a part, apart from what is above it."""
        click.echo()
        self.line(click.style(text, bold=True))

    def step(self, what: str, text: str) -> None:
        """Print a step of a part: what is done, and what came of it."""
        self.line(f"  {what:8} {text}")
