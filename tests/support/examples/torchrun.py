"""Starts an example under torchrun, in processes of its own that end in time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def run_example(
    script: str, processes: int, *options: str, seconds: float = 800, **environment: str
) -> tuple[int, str]:
    """Exit status and output of a script of `examples/`, which imports this checkout's cakegen.

    After so many seconds all its processes are killed and the test fails.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    started = subprocess.Popen(
        [*command, str(ROOT / "examples" / script), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **environment},
    )
    try:
        text, _ = started.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        # torchrun ends its workers, which are in sessions of their own; a kill would leave them behind
        started.terminate()
        text, _ = started.communicate(timeout=60)
        raise AssertionError(f"{script} on {processes} processes took over {seconds} s:\n{text}") from None
    return started.returncode, text
