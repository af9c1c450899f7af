"""Opens kernel libraries, each after a rehearsal in a process of its own. Imports torch and this package.

What is built for another torch may end the process that imports it, and a kernel that fails takes the context along; so
a library's first product is not the bench's. It also fills the library's cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

import cakegen
from cakegen.bench.libraries import LIBRARIES, Library, TritonTemplates
from cakegen.errors import BenchError

SHAPE = 16, 512, 512
"""Tokens, rows of the weight and K of a rehearsal: tiles of every library divide them."""
LARGEST_ERROR = 0.01
"""Relative error of a product, as norms; rounding to bf16 gives about 0.002."""
_SECONDS = 300
_REASON_COLS = 300


@dataclass(frozen=True)
class Opened:
    """Libraries that run here, and of each that was asked for its version, or why it does not run."""

    libraries: tuple[Library, ...]
    found: dict[str, str]


def open_libraries(names: Sequence[str], device: torch.device, *, search: bool) -> Opened:
    """Open libraries by name.

    Parameters
    ----------
    search
        As `Library` has it.

    Raises
    ------
    BenchError
        A name is not known.
    """
    unknown = [name for name in names if name not in LIBRARIES]
    if unknown:
        raise BenchError(f"library {unknown[0]!r} is not known; known: {', '.join(LIBRARIES)}")
    failures = _rehearse(names, device)
    libraries, found = [], {}
    for name in names:
        reason = failures.get(name)
        if reason is None:
            try:
                libraries.append(LIBRARIES[name](search))
                found[name] = version_of(LIBRARIES[name].module)
                continue
            except Exception as error:
                reason = _reason(error)
        found[name] = f"does not run: {reason}"
    return Opened(tuple(libraries), found)


def version_of(module: str) -> str:
    """The distribution that a module comes from, and its version."""
    package = module.partition(".")[0]
    named = metadata.packages_distributions().get(package, [])
    return ", ".join(f"{name} {metadata.version(name)}" for name in dict.fromkeys(named)) or "of no distribution"


def _rehearse(names: Sequence[str], device: torch.device) -> dict[str, str]:
    """Run `rehearse` for each library, all at once; why it failed, by name."""
    root = str(Path(cakegen.__file__).resolve().parents[1])
    path = os.pathsep.join((root, os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)
    code = "import sys; from cakegen.bench.rehearsal import rehearse; rehearse(*sys.argv[1:])"
    started = {
        name: subprocess.Popen(
            (sys.executable, "-c", code, name, str(device)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        for name in names
    }
    return {name: reason for name, child in started.items() if (reason := _outcome(child)) is not None}


def _outcome(child: subprocess.Popen[str]) -> str | None:
    try:
        _, told = child.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return f"no result in {_SECONDS} s"
    if child.returncode == 0:
        return None
    lines = [line for line in told.splitlines() if line.strip()]
    return f"{lines[-1][:_REASON_COLS] if lines else 'no message'} (status {child.returncode})"


def rehearse(name: str, device: str) -> None:
    """Compute one small product with a library, without a search where it can do without.

    Raises
    ------
    BenchError
        The product is wrong.
    Exception
        Whatever the library raised.
    """
    kind = LIBRARIES[name]
    library = kind(search=kind is TritonTemplates)
    tokens, rows, width = SHAPE
    torch.manual_seed(0)
    x, weight = (torch.randn(count, width, device=device, dtype=torch.bfloat16) for count in (tokens, rows))
    out = torch.full((tokens, rows), float("nan"), device=device, dtype=torch.bfloat16)
    library.multiply(x, weight, out)
    wanted = x.float() @ weight.float().T
    error = float((out.float() - wanted).norm() / wanted.norm())
    if not error <= LARGEST_ERROR:
        raise BenchError(
            f"{name}: a product of {tokens} tokens by a weight [{rows}, {width}] has relative error {error:.3g}; "
            f"at most {LARGEST_ERROR} is rounding to bf16"
        )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_REASON_COLS]}"
