"""Leaf module: where templates, exports and generated trees live, in a checkout or in an installed wheel.

A wheel carries these folders under `cakegen/_data`; a checkout has them beside the package. Nothing is ever
written into an installed package.
"""

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def shipped_root() -> Path:
    """The folder that holds `templates`, `exports` and `generated`."""
    packaged = _PACKAGE / "_data"
    return packaged if packaged.is_dir() else _PACKAGE.parent


def is_checkout() -> bool:
    """Whether the package runs from a source tree, where an export may write `generated`."""
    return not (_PACKAGE / "_data").is_dir()


def templates_root() -> Path:
    """Jinja templates."""
    return shipped_root() / "templates"


def exports_root() -> Path:
    """One folder an export, each with its `export.toml`."""
    return shipped_root() / "exports"


def generated_root() -> Path:
    """One folder an export, each written by `cakegen export`."""
    return shipped_root() / "generated"


def docs_root() -> Path:
    """The pages, as Markdown; a checkout has pictures beside them."""
    return shipped_root() / "docs"


def is_path(name: str | Path) -> bool:
    """Whether a name is written as a path: it holds a separator, or begins with a dot.

    Anything else is the name of what is shipped, and is never looked for in the current folder: whoever can write there
    would choose what is compiled and launched.
    """
    return isinstance(name, Path) or os.sep in name or name.startswith(".")
