"""Opens kernel libraries, each after a rehearsal in a process of its own. Imports torch and this package.

What is built for another torch may end the process that imports it, and a kernel that fails takes the context along; so
a library's first product is not the bench's. It also fills the library's cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

import cakegen
from cakegen.bench.libraries import LIBRARIES, Library
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
    found = {name: _obstacle(LIBRARIES[name], search) for name in names}
    found |= _rehearse([name for name in names if found[name] is None], device)
    libraries = []
    for name in names:
        if found[name] is None:
            try:
                libraries.append(LIBRARIES[name](search))
            except Exception as error:
                found[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:_REASON_COLS]}"
    told = {
        name: versions_of(LIBRARIES[name]) if reason is None else f"does not run: {reason}"
        for name, reason in found.items()
    }
    return Opened(tuple(libraries), told)


def _obstacle(library: type[Library], search: bool) -> str | None:
    """What stands in the way before anything is imported."""
    package = library.module.partition(".")[0]
    if find_spec(package) is None:
        return f"module {package} is not installed"
    if library.only_searches and not search:
        return "its GEMMs are found by a search; ask for one with --search"
    return None


def versions_of(library: type[Library]) -> str:
    """The distributions that a library comes from and builds on, and their versions."""
    named = (*_distributions().get(library.module.partition(".")[0], ()), *library.builds_on)
    return ", ".join(map(_version, dict.fromkeys(named))) or "of no distribution"


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Distributions by module; reads the records of all that is installed."""
    return metadata.packages_distributions()


def _version(distribution: str) -> str:
    try:
        return f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:
        return f"{distribution} of no known version"


def _rehearse(names: Sequence[str], device: torch.device) -> dict[str, str | None]:
    """Run `rehearse` for each library, all at once; by name, why it failed if it did."""
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
    return {name: _outcome(child) for name, child in started.items()}


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
    library = LIBRARIES[name](search=LIBRARIES[name].only_searches)
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
