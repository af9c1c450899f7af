"""Long service: memory stays flat, what fails is given back, and a forked child is told so. A process a part."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("long_service.py")


def run_part(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("part", ["replays", "loads", "release"])
def test_memory_is_flat(part: str, record_property: Callable[[str, object], None]) -> None:
    record_property("found", run_part(part).strip())


@pytest.mark.parametrize("first", ["ours", "torch", "other"])
def test_child_is_told_of_the_fork_whoever_initialised_the_driver(first: str) -> None:
    answer = run_part("fork", first)
    assert answer.startswith("refused: ")
    assert "this process was forked from one that had initialised the CUDA driver" in answer
