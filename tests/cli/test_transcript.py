"""Lines with the seconds since the start."""

from __future__ import annotations

import pytest

from cakegen.cli.transcript import Transcript


def test_lines_begin_with_the_seconds_since_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    ticks = iter((100.0, 100.04, 101.26, 1234.5, 1300.0))
    shown = Transcript(lambda: next(ticks))
    shown.line("begins")
    shown.step("plan", "one")
    shown.head("2. a part")
    shown.line("first\n\tsecond")
    assert capsys.readouterr().out.splitlines() == [
        "   0.0 s  begins",
        "   1.3 s    plan     one",
        "",
        "1134.5 s  2. a part",
        "1200.0 s  first",
        "          \tsecond",
    ]
