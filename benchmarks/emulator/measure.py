"""Speed of the emulator on this machine: `python benchmarks/emulator/measure.py > benchmarks/emulator/table.txt`.

Seconds are CPU time of whole requests (operands, launches, comparison) on one thread. Every row has a process of its
own with an empty cache: `first` is its first request, which compiles, translates and may compile products to machine
code; `next` is the fastest of those that follow. `measure.py --only tiny` runs the rows whose name holds the word, and
`--runs 1` the first requests alone. `--before CHECKOUT` runs each row's first request in another checkout too, just
before: its programs are its own, so that instructions may differ.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_TINY, _FULL = "tiny_latent_moe", "kimi_k3_latent_moe"
# name, export, arguments of the case, SMs
_ROWS = (
    ("tiny front TP 8, T 8", _TINY, ("front", 8, 8), 132),
    ("tiny tail TP 8, T 8", _TINY, ("tail", 8, 8), 132),
    ("tiny norm and GEMM TP 1, T 2048, 3 SMs", _TINY, ("tail", 1, 2048), 3),
    ("tiny front GEMM TP 1, T 256", _TINY, ("front", 1, 256), 132),
    ("full front TP 8, T 8", _FULL, ("front", 8, 8), 132),
    ("full tail TP 8, T 8", _FULL, ("tail", 8, 8), 132),
)
_WAYS = (("checks", "hopper", True), ("checks", "wide", True), ("no checks", "wide", False))


def _measure(row: int, way: int, runs: int) -> None:
    """One row, in this process: prints instructions and the seconds of each request."""
    import torch

    from cakegen.emulator import Options
    from cakegen.registry import load_registry

    # a checkout of before may have it elsewhere
    found = importlib.util.find_spec("cakegen.emulator.launches")
    cases = importlib.import_module(f"cakegen.emulator.{'launches.' if found else ''}cases")

    torch.set_num_threads(1)
    _, export, case, sm_count = _ROWS[row]
    _, arithmetic, checks = _WAYS[way]
    registry = load_registry(export)
    seconds = []
    for _ in range(runs):
        start = time.process_time()
        request = cases.Case(*case, sm_count=sm_count)
        report = cases.emulate_case(registry, request, Options("random", 0, arithmetic, checks=checks))
        seconds.append(time.process_time() - start)
    count = sum(launch.instructions for launch in report.launches)
    sys.stdout.write(" ".join(map(str, (count, *seconds))) + "\n")


def _in_a_process(row: int, way: int, runs: int, checkout: Path = ROOT) -> tuple[int, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "CAKEGEN_CACHE_DIR": folder, "PYTHONPATH": str(checkout)}
        command = [sys.executable, __file__, "--row", str(row), "--way", str(way), "--runs", str(runs)]
        output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    count, *seconds = output.split()
    return int(count), [float(each) for each in seconds]


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _show(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _show_machine() -> None:
    import torch

    _show(f"{_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}\n")


def _print_before_and_after(word: str, checkout: Path) -> None:
    _show_machine()
    _show(
        f"{'program':40}{'arithmetic':>12}{'order':>12}{'instructions':>14}{'after':>11}{'first s':>9}{'after':>8}"
        f"{'ratio':>7}"
    )
    for row, (name, *_) in enumerate(_ROWS):
        if word not in name:
            continue
        for way, (order, arithmetic, _) in enumerate(_WAYS):
            count, (before,) = _in_a_process(row, way, 1, checkout)
            count_after, (after,) = _in_a_process(row, way, 1)
            _show(
                f"{name:40}{arithmetic:>12}{order:>12}{count:>14,}{count_after:>11,}{before:>9.2f}{after:>8.2f}"
                f"{before / after:>7.1f}"
            )


def _print_table(word: str, runs: int) -> None:
    _show_machine()
    _show(
        f"{'program':40}{'arithmetic':>12}{'order':>12}{'instructions':>14}{'first s':>9}{'next s':>9}{'a second':>10}"
    )
    for row, (name, *_) in enumerate(_ROWS):
        if word not in name:
            continue
        for way, (order, arithmetic, _) in enumerate(_WAYS):
            count, (first, *later) = _in_a_process(row, way, runs)
            best = min(later, default=first)
            rest = f"{best:.2f}" if later else "-"
            _show(f"{name:40}{arithmetic:>12}{order:>12}{count:>14,}{first:>9.2f}{rest:>9}{count / best:>10,.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--runs", type=int, default=4, help="requests a row")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="first requests there and here, with the ratio")
    parser.add_argument("--row", type=int, help="this row alone, in this process")
    parser.add_argument("--way", type=int, default=0, help="of that row: arithmetic and checks, by its number")
    chosen = parser.parse_args()
    if chosen.row is not None:
        _measure(chosen.row, chosen.way, chosen.runs)
    elif chosen.before is not None:
        _print_before_and_after(chosen.only, chosen.before.resolve())
    else:
        _print_table(chosen.only, chosen.runs)
