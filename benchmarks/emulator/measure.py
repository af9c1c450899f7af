"""Speed of the emulator on this machine: `python benchmarks/emulator/measure.py > benchmarks/emulator/table.txt`.

Seconds are the process's CPU time of whole requests (operands, launches, comparison) on one thread, the fastest of
three runs; the first of them compiles and translates. `measure.py tiny` runs the rows whose name holds the word.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator

import torch

from cakegen.emulator import Options
from cakegen.emulator.launches.cases import Case, emulate_case
from cakegen.registry import load_registry

_TINY, _FULL = "tiny_latent_moe", "kimi_k3_latent_moe"
_ROWS = (
    ("tiny front TP 8, T 8", _TINY, Case("front", 8, 8)),
    ("tiny tail TP 8, T 8", _TINY, Case("tail", 8, 8)),
    ("tiny norm and GEMM TP 1, T 2048, 3 SMs", _TINY, Case("tail", 1, 2048, sm_count=3)),
    ("tiny front GEMM TP 1, T 256", _TINY, Case("front", 1, 256)),
    ("full front TP 8, T 8", _FULL, Case("front", 8, 8)),
    ("full tail TP 8, T 8", _FULL, Case("tail", 8, 8)),
)
_WAYS = (("checks", "hopper", True), ("checks", "wide", True), ("no checks", "wide", False))


def _lines(word: str) -> Iterator[str]:
    yield f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    yield ""
    yield f"{'program':40}{'arithmetic':>12}{'order':>12}{'instructions':>14}{'CPU s':>8}{'a second':>10}"
    for name, export, case in _ROWS:
        if word not in name:
            continue
        registry = load_registry(export)
        for order, arithmetic, checks in _WAYS:
            options = Options("random", 0, arithmetic, checks=checks)
            seconds = float("inf")
            # the first run compiles and translates
            for _ in range(3):
                start = time.process_time()
                report = emulate_case(registry, case, options)
                seconds = min(seconds, time.process_time() - start)
            count = sum(launch.instructions for launch in report.launches)
            yield f"{name:40}{arithmetic:>12}{order:>12}{count:>14,}{seconds:>8.2f}{count / seconds:>10,.0f}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for text in _lines(sys.argv[1] if len(sys.argv) > 1 else ""):
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
