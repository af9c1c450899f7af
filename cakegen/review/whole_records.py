"""Registries of schemas 1 and 2, which a comparison may have as its base. Imports errors.

They held Python literals and a whole record a program, with its sources and headers, all in the tree's own folder.
"""

from __future__ import annotations

import ast
from typing import Any

from cakegen.errors import RegistryError

_NAMES = ("SCHEMA_VERSION", "EXPORT", "MODEL", "MODULES", "KERNELS", "SPECIALIZATIONS")


def parse_whole_records(text: str, where: str) -> dict[str, Any]:
    """The names that such a module assigns, with their values; it is parsed and never executed.

    Parameters
    ----------
    text
        The module.
    where
        What to call it in a message: its revision and path.

    Raises
    ------
    RegistryError
        It is not Python, assigns something that is no literal, or lacks a name.
    """
    try:
        values = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in ast.parse(text).body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise RegistryError(f"{where}: not a registry ({type(error).__name__}: {error}); export again") from None
    missing = [name for name in _NAMES if name not in values]
    if missing:
        raise RegistryError(f"{where}: lacks {', '.join(missing)}; export again")
    return values
