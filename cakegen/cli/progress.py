"""Progress of a long command, on stderr: a bar on a terminal, else a line now and then. Imports click and rich."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

_LINES = 20
"""So many lines at most tell of progress where stderr is no terminal: a log should not be made of them."""
_SECONDS_A_LINE = 5
"""Of an emulated launch there: one that takes less has none."""


@contextmanager
def progress(total: int, doing: str = "compile", done: str = "compiled", things: str = "programs") -> Iterator[Any]:
    """A function to call with the name of each finished one of `total` things."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(total, done, things)
        return
    columns = (
        TextColumn(doing),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)


def _lines(total: int, verb: str, things: str) -> Any:
    step = max(1, -(-total // _LINES))
    done = 0

    def advance(_name: str) -> None:
        nonlocal done
        done += 1
        if done % step == 0 or done == total:
            click.echo(f"{verb} {done} of {total} {things}", err=True)

    return advance


@contextmanager
def emulation_progress(name: str, now: Callable[[], float] = time.monotonic) -> Iterator[Callable[[int, int], None]]:
    """A function to call with (clusters of an emulated launch that have ended, clusters of the launch).

    Parameters
    ----------
    name
        What runs.
    now
        Seconds of a clock.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines_in_time(name, now)
        return
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TextColumn("clusters"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines_in_time(name: str, now: Callable[[], float]) -> Callable[[int, int], None]:
    due = now() + _SECONDS_A_LINE

    def advance(done: int, total: int) -> None:
        nonlocal due
        if now() >= due:
            due = now() + _SECONDS_A_LINE
            click.echo(f"{name}: {done} of {total} clusters have ended", err=True)

    return advance
