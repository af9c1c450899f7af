"""Small models of `exports/small`, exported where a test asks for them: no generated trees of them are kept."""

from __future__ import annotations

from pathlib import Path

from cakegen import paths
from cakegen.emit import render_tree, write_exports
from cakegen.registry import Registry, load_registry
from cakegen.spec import parse_export


def exported_small(name: str, root: Path) -> Registry:
    """The registry of a small model, exported below `root`."""
    model = parse_export(paths.exports_root() / "small" / f"{name}.toml").to_model()
    write_exports(root, [render_tree(model, model.name)])
    return load_registry(root / model.name)
