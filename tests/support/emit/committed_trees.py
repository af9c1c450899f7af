"""The committed trees as text, for tests."""

from __future__ import annotations

import functools
from pathlib import Path

from cakegen import paths
from cakegen.emit import RenderedTree
from cakegen.registry import SHARED_FILE, SHARED_FOLDER, Registry, header_closure, parse_shared_table


def texts_below(folder: Path, pattern: str = "*") -> dict[str, str]:
    """Texts by path below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob(pattern) if path.is_file()}


@functools.cache
def committed_tree(export: str) -> RenderedTree:
    """An export as it is committed, with the headers of all exports."""
    root = paths.generated_root()
    return RenderedTree(export, texts_below(root / export), texts_below(root / SHARED_FOLDER, "*.cuh"))


def device_headers(registry: Registry, *, hopper: bool = False) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Names to include for the device functions, of Hopper with every width of wgmma; and all texts that these need."""
    table = parse_shared_table((registry.shared / SHARED_FILE).read_text(), SHARED_FILE)
    widths = [name for name in table if name.startswith("cake_device_wgmma_mma_")]
    names = ("base", "cluster", "grid", "math", "mbarrier", "memory", "stmatrix", "tma")
    includes = (*(f"cake_device_{name}.cuh" for name in names), *(widths if hopper else ()))
    return includes, tuple(
        (name, registry.read(name)) for name in header_closure(includes, lambda n: table[n].includes)
    )
