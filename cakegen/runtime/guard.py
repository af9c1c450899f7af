"""Locks that end in an error and never in a hang: in a signal handler, in a forked child. Imports errors only."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType

from cakegen.errors import LaunchError

MOST_WAIT_SECONDS = 300.0
"""Longer than any program takes to compile and load on a busy machine."""


class Section:
    """Code that a thread must not enter again while it is inside, as a signal handler or a finaliser would.

    Parameters
    ----------
    what
        What the code does, for the error.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._inside: set[int] = set()
        _sections.add(self)

    def __enter__(self) -> None:
        thread = threading.get_ident()
        if thread in self._inside:
            raise LaunchError(
                f"{self._what}: this thread is in the middle of it already. A signal handler or a finaliser that "
                "interrupted it must not prepare, warm up or load: let it set a flag, and act on the flag afterwards."
            )
        self._inside.add(thread)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inside.discard(threading.get_ident())

    def renew(self) -> None:
        """Forget the threads inside: in a forked child there are none."""
        self._inside = set()


class GuardedLock(Section):
    """A lock whose owner is told when it asks again, whose others wait for a bounded time, and which a fork frees.

    A child that was forked while another thread held a lock would wait for that thread, which it does not have.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        super().__enter__()
        held = False
        try:
            held = self._lock.acquire(timeout=MOST_WAIT_SECONDS)
            if not held:
                raise LaunchError(
                    f"{self._what}: another thread has been in the middle of it for {MOST_WAIT_SECONDS:g} s, longer "
                    "than it ever takes. faulthandler.dump_traceback() shows where it stands."
                )
        finally:
            if not held:
                super().__exit__(None, None, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # not where this thread forked in here, and this is the child: its lock is another
        if threading.get_ident() in self._inside:
            self._lock.release()
        super().__exit__(kind, error, traceback)

    def renew(self) -> None:
        """Forget the threads inside, and whoever held the lock."""
        super().renew()
        self._lock = threading.Lock()


_sections: weakref.WeakSet[Section] = weakref.WeakSet()


def _renew_all() -> None:
    for section in list(_sections):
        section.renew()


os.register_at_fork(after_in_child=_renew_all)
