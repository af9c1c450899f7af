"""Progress of a long command where stderr is no terminal."""

from __future__ import annotations

import pytest

from cakegen.cli.progress import emulation_progress, progress


@pytest.mark.parametrize(("total", "lines"), [(0, 0), (3, 3), (20, 20), (812, 20)])
def test_progress_in_a_pipe_is_a_line_now_and_then(total: int, lines: int, capsys: pytest.CaptureFixture[str]) -> None:
    with progress(total) as advance:
        for number in range(total):
            advance(f"program {number}")
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == lines
    if total:
        assert shown[-1] == f"compiled {total} of {total} programs"


def test_emulated_launch_in_a_pipe_has_a_line_every_five_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    ticks = iter((0, 4, 5, 5, 6, 9, 11, 11))
    with emulation_progress("front", lambda: next(ticks)) as advance:
        for done in range(1, 6):
            advance(done, 64)
    assert capsys.readouterr().err.splitlines() == [
        "front: 2 of 64 clusters have ended",
        "front: 5 of 64 clusters have ended",
    ]
