"""Streams that end before the runners that used them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_runners_go_on_when_their_streams_were_destroyed() -> None:
    """A decode runner, one after a capture, a workspace, and the control words of runners that died."""
    script = Path(__file__).with_name("lost_stream.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=150, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("went on") == 5
