"""Files of the user's own where cakegen writes or cleans up."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cakegen.compile import cache_root, clear_cache
from cakegen.compile.cache_folder import MARKER_FILE
from cakegen.compile.inventory import list_files, prune_cache
from cakegen.emit import compare_tree, write_tree
from cakegen.emit.seal import render_sealed
from cakegen.errors import CompileError, EmitError

FILES = {"a.cu": render_sealed("a.cu", "tiny", "A file", "text\n")}
OLD = {"a.cu": render_sealed("a.cu", "tiny", "A file", "older text\n")}


def _seen(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_ino, path.lstat().st_size) for path in folder.rglob("*")}


def _clean(folder: Path, act: Callable[[], object], marked: bool) -> None:
    own = cache_root() / "v1"
    own.mkdir(parents=True, mode=0o700)
    cache_root().chmod(0o700)
    for name in ("package.lock", "film.partial", f"{'0' * 64}.txt"):
        (own / name).write_text("mine")
        os.utime(own / name, (0, 0))
    if marked:
        (own / MARKER_FILE).touch()
    before = _seen(folder)
    if marked:
        act()
    else:
        with pytest.raises(CompileError):
            act()
    assert _seen(folder) == before


def _export(folder: Path, kind: str) -> None:
    root = folder / "tiny"
    if kind == "a file":
        root.write_text("mine")
    elif kind == "a link":
        (folder / "elsewhere").mkdir()
        root.symlink_to(folder / "elsewhere")
    else:
        write_tree(root, OLD)
        places = {"under its name": root / "a.cu", "beside its files": root / "notes.txt"}
        places |= {"left beside": folder / ".tiny.old" / "notes.txt", "new beside": folder / ".tiny.new" / "notes.txt"}
        places[kind].parent.mkdir(exist_ok=True)
        places[kind].write_text("mine")
    before = _seen(folder)
    with pytest.raises(EmitError):
        write_tree(root, FILES)
    assert _seen(folder) == before


def _check(folder: Path, left: str) -> None:
    root = folder / "tiny"
    write_tree(root, OLD)
    root.rename(folder / left)
    before = _seen(folder)
    assert not compare_tree(root, FILES).clean
    assert _seen(folder) == before


def situations() -> dict[str, Callable[[Path], None]]:
    """Each way to clean up, to write over, and to check."""
    found: dict[str, Callable[[Path], None]] = {}
    for act in (prune_cache, clear_cache, list_files):
        for marked in (False, True):
            name = f"{act.__name__} in a folder {'with' if marked else 'without'} the marker"
            found[name] = functools.partial(_clean, act=act, marked=marked)
    for kind in ("a file", "a link", "under its name", "beside its files", "left beside", "new beside"):
        found[f"export over a user's file: {kind}"] = functools.partial(_export, kind=kind)
    for left in (".tiny.old", ".tiny.new"):
        found[f"check after an interrupted export that left {left}"] = functools.partial(_check, left=left)
    return found
