"""A process that ends at a step of its own, for tests of what it leaves behind."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

STEPS = ("open", "fsync", "replace", "unlink")


def end_at_call(number: int) -> None:
    """Kill this process at the call of that number of those that change what is on the disk, before it is made."""
    numbers = itertools.count()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            if next(numbers) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return made

    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))
