"""A program that spills is refused however often it is tried, where a driver keeps what NVRTC compiled.

NVRTC 12.9 and later take a repeat from the driver's cache, which holds code and no log: what is known from the log
alone is then lost. Seen with driver 580 and NVRTC 13.0.88: refused at the first try, accepted at the second.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
TRIES = 3
SCRIPT = f"""
import sys
import torch
from support.compile.sources import INDEXED, PLAIN_REQUEST, SETMAXNREG_IGNORED, SPILLING, WGMMA_SERIALIZED, request_of
from cakegen.compile import cached_cubin, load_nvrtc
from cakegen.errors import CompileError
torch.zeros(1, device="cuda")  # the driver is there, and with it its cache
arch = sys.argv[1]
faults = {{"spills": SPILLING, "array": INDEXED, "setmaxnreg": SETMAXNREG_IGNORED}}
if arch == "sm_90a":
    faults["wgmma"] = WGMMA_SERIALIZED
for name, source in faults.items():
    for attempt in range({TRIES}):
        try:
            report = cached_cubin(request_of(source, arch=arch)).report
            print(name, attempt, "accepted", report)
        except CompileError as error:
            print(name, attempt, "refused", str(error).splitlines()[0])
for attempt in range({TRIES}):
    compiled = cached_cubin(PLAIN_REQUEST if arch == "sm_90a" else request_of(PLAIN_REQUEST.source, arch=arch))
    print("plain", attempt, "accepted", compiled.report.stack_bytes)
print(load_nvrtc().label, load_nvrtc().fresh_options)
"""


def attempts(cache: Path, driver_cache: Path, arch: str) -> list[list[str]]:
    """What one process says of each try: the fault's name, the attempt, and the verdict."""
    roots = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
    settings = {"PYTHONPATH": roots, "CAKEGEN_CACHE_DIR": str(cache), "CUDA_CACHE_PATH": str(driver_cache)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, arch],
        env={**os.environ, **settings, "CUDA_CACHE_DISABLE": "0"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [line.split(maxsplit=3) for line in done.stdout.splitlines()[:-1]]


def test_spilling_program_is_refused_three_times_in_a_process_and_in_the_next(tmp_path: Path) -> None:
    """Each process has a compile cache of its own; the driver's they share."""
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}a"
    for process in range(2):
        said = attempts(tmp_path / f"cache{process}", tmp_path / "driver", arch)
        verdicts = {(name, verdict) for name, _, verdict, _ in said}
        faults = {name for name, *_ in said} - {"plain"}
        assert {"spills", "array", "setmaxnreg"} <= faults
        assert verdicts == {(name, "refused") for name in faults} | {("plain", "accepted")}, said
        assert len(said) == TRIES * (len(faults) + 1)
