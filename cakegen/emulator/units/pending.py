"""What was issued and has not happened yet."""

from __future__ import annotations

from cakegen.emulator.faults import Where


class Pending:
    """Something issued that has not happened yet; `where` says who issued it."""

    where: Where | None = None

    def complete(self) -> None:
        """Let it happen."""
        raise NotImplementedError
