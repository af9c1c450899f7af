"""What costs the design is refused, whether the compiler leaves a log or none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.compile.sources import INDEXED, PLAIN_REQUEST, SETMAXNREG_IGNORED, SPILLING, WGMMA_SERIALIZED, request_of

from cakegen.arch import ARCHITECTURES
from cakegen.compile import cached_cubin, program
from cakegen.errors import CompileError

FAULTS = {"spills": SPILLING, "indexed array": INDEXED, "ignored setmaxnreg": SETMAXNREG_IGNORED}


def _refused(folder: Path, source: str, arch: str, silent: bool) -> None:
    build = program.Nvrtc.build
    with pytest.MonkeyPatch.context() as patch:
        if silent:
            patch.setattr(program.Nvrtc, "build", lambda *a, **k: replace(build(*a, **k), log=""))
        for _ in range(3):
            with pytest.raises(CompileError):
                cached_cubin(request_of(source, arch=arch))
    assert cached_cubin(replace(PLAIN_REQUEST, arch=arch)).report.stack_bytes == 0


def situations() -> dict[str, Callable[[Path], None]]:
    """Each fault for each target, three tries with a log and three without."""
    found: dict[str, Callable[[Path], None]] = {}
    for arch in ARCHITECTURES:
        faults = FAULTS | ({"serialised wgmma": WGMMA_SERIALIZED} if arch == "sm_90a" else {})
        for name, source in faults.items():
            for silent in (False, True):
                words = f"{name} for {arch}, {'no log' if silent else 'a log'}"
                found[words] = functools.partial(_refused, source=source, arch=arch, silent=silent)
    return found
