"""Run every program of the small model under compute-sanitizer: `python tests/gpu/sanitize.py [TOOL ...]`.

Decode runs a call of every route; prefill one of every way to cut, on this device and on smaller ones.

Tools are memcheck and synccheck by default; racecheck sees no race of tensor-map copies, distributed shared memory or
mbarriers (it reported none of three planted ones). Exits 0 when all are clean, 1 when one found something, 2 when
compute-sanitizer is not installed. Waits are given a minute, since a sanitizer slows everything down.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "synccheck")
LIMIT_SECONDS = 420
FOUND = 9


def main(arguments: list[str]) -> int:
    """Run this file again under each tool."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).is_file():
        print("compute-sanitizer is not installed; nothing was checked")
        return 2
    failed = []
    for tool in arguments or TOOLS:
        start = time.monotonic()
        # the bindings ask the driver for functions that it may not have, and those answers are no faults of a program
        options = ["--tool", tool, "--report-api-errors", "no", "--error-exitcode", str(FOUND)]
        command = [sanitizer, *options, sys.executable, __file__, "--programs"]
        # one allocation a tensor, so that a step past its end is seen
        environment = {**os.environ, "CAKEGEN_WAIT_SECONDS": "60", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            code = subprocess.run(command, env=environment, timeout=LIMIT_SECONDS, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
        verdict = {0: "clean", FOUND: "found errors", -1: f"ran past {LIMIT_SECONDS} s"}.get(code, f"exit {code}")
        print(f"{tool}: {verdict} ({time.monotonic() - start:.0f} s)", flush=True)
        if code:
            failed.append(tool)
    return 1 if failed else 0


def run_programs() -> int:
    """One call of every route of the small model, on the device's own facts and on those of small devices."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import torch

    from cakegen.model import DeviceFacts
    from cakegen.registry import load_registry
    from cakegen.runtime import LatentMoe

    registry = load_registry("tiny_latent_moe")
    moes = [LatentMoe(registry)]
    moes += [LatentMoe(registry, device_facts=DeviceFacts.nominal("sm_90a", count)) for count in (3, 6)]
    keys = run_decode(moes)
    forms = run_prefill(moes)
    torch.cuda.synchronize()
    print(f"{len(keys)} decode programs and {forms} prefill forms ran")
    return 0


def run_decode(moes: list[Any]) -> set[str]:
    """Every program once; returns their keys."""
    import torch
    from support.gpu.cases import FrontCase, TailCase, keys_of, make_weights

    weights = make_weights(moes[0].model, torch.device("cuda", 0))
    keys: set[str] = set()
    for moe in moes:
        for tp in (1, 4, 16):
            moe.warm_up("cuda:0", tp, tokens=(1, 5, 16, 30, 64, 127), partials=(1, 2))
            cases = (FrontCase(moe, weights, tp), *(TailCase(moe, weights, tp, tp - 1, count) for count in (1, 2)))
            for case in cases:
                for tokens in (1, 5, 16, 30, 64, 127):
                    runner = case.prepare(tokens)
                    if not keys.issuperset(keys_of(runner)):
                        keys.update(keys_of(runner))
                        runner()
    return keys


def run_prefill(moes: list[Any]) -> int:
    """Every form once, up to a few thousand rows; returns how many forms there were."""
    import torch
    from support.gpu.cases import FrontCase, TailCase, make_weights
    from support.gpu.prefill import DEGREES, STAGES, examples

    rows = 4096
    weights = make_weights(moes[0].model, torch.device("cuda", 0), tokens=rows)
    seen: set[Any] = set()
    for moe in moes:
        for example in examples(moe, seen, STAGES, DEGREES, rows):
            if example.stage == "front":
                FrontCase(moe, weights, example.tp).prepare(example.tokens)()
            else:
                TailCase(moe, weights, example.tp, 0, example.partials).prepare(example.tokens)()
    return len(seen)


if __name__ == "__main__":
    sys.exit(run_programs() if sys.argv[1:] == ["--programs"] else main(sys.argv[1:]))
