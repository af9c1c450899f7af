"""A cache or a bundle that others can reach, and what is exchanged in it."""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.compile.sources import PLAIN_REQUEST

from cakegen.compile import CacheWarning, cached_cubin
from cakegen.compile import cache as cache_module
from cakegen.compile.bundle import MANIFEST_FILE, open_bundle, request_identity, write_bundle
from cakegen.compile.cache_folder import schema_folder
from cakegen.errors import CompileError

OTHER = replace(PLAIN_REQUEST, constants=(("SCALE", 5),))


def _fill() -> tuple[Path, bytes]:
    cubin = cached_cubin(PLAIN_REQUEST).cubin
    cache_module._memory.clear()
    cache_module._warned.clear()
    (entry,) = schema_folder().glob("*.cubin")
    return entry, cubin


def _open_folder(folder: Path, mode: int, root: bool) -> None:
    entry, _ = _fill()
    (entry.parent.parent if root else entry.parent).chmod(mode)
    with pytest.warns(CacheWarning, match="other users can write it"):
        assert not cached_cubin(PLAIN_REQUEST).cached


def _odd_entry(folder: Path, kind: str) -> None:
    entry, cubin = _fill()
    if kind == "link":
        entry.rename(folder / "target")
        entry.symlink_to(folder / "target")
    elif kind == "fifo":
        entry.unlink()
        os.mkfifo(entry)
    elif kind == "terabyte":
        os.truncate(entry, 2**40)
    elif kind == "cut":
        os.truncate(entry, entry.stat().st_size // 2)
    else:
        cached_cubin(OTHER)
        (other,) = set(entry.parent.glob("*.cubin")) - {entry}
        entry.write_bytes(other.read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = cached_cubin(PLAIN_REQUEST)
    assert not again.cached
    assert again.cubin == cubin


def _bundle(folder: Path, kind: str) -> None:
    out = folder / "bundle"
    write_bundle(out, "small", [(request, cached_cubin(request), ["a"]) for request in (PLAIN_REQUEST, OTHER)])
    manifest = out / MANIFEST_FILE
    values = json.loads(manifest.read_text())
    lines = values["programs"]
    one, two = request_identity(PLAIN_REQUEST), request_identity(OTHER)
    file = out / f"program-{lines[one]['sha256']}.cubin"
    if kind == "exchanged lines":
        lines[one], lines[two] = lines[two], lines[one]
    elif kind == "another compiler":
        lines[one]["compiler"] = "nvrtc-1.0.0"
    elif kind == "link":
        file.rename(folder / "target")
        file.symlink_to(folder / "target")
    elif kind == "fifo":
        file.unlink()
        os.mkfifo(file)
    else:
        os.truncate(file, 2**40)
    manifest.write_text(json.dumps(values))
    with pytest.raises(CompileError):
        open_bundle(out).program(PLAIN_REQUEST)


def situations() -> dict[str, Callable[[Path], None]]:
    """Each right to write, each odd entry, each odd item of a bundle."""
    found: dict[str, Callable[[Path], None]] = {}
    for mode in (0o777, 0o770, 0o1777, 0o702):
        for root in (True, False):
            name = f"cache's {'folder' if root else 'folder of entries'} of mode {mode:o}"
            found[name] = functools.partial(_open_folder, mode=mode, root=root)
    for kind in ("link", "fifo", "terabyte", "cut", "exchanged"):
        found[f"cache entry: {kind}"] = functools.partial(_odd_entry, kind=kind)
    for kind in ("exchanged lines", "another compiler", "link", "fifo", "terabyte"):
        found[f"bundle item: {kind}"] = functools.partial(_bundle, kind=kind)
    return found
