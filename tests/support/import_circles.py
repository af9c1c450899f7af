"""Import circles of the package, imports for type checkers and inside functions included.

`python tests/support/import_circles.py` prints how many there are, and the modules of each.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

Graph = Mapping[str, set[str]]


def import_graph(root: Path) -> Graph:
    """Module -> the modules of the package that any line of it imports.

    Parameters
    ----------
    root
        Folder of the package. An import of a submodule is none of the packages around it.
    """
    files = {_name(root, file): file for file in sorted(root.rglob("*.py"))}
    return {name: set(_imports(file, files)) - {name} for name, file in files.items()}


def circles(graph: Graph) -> list[list[str]]:
    """Sets of modules that reach each other, each sorted."""
    reached = {name: _reached(graph, name) for name in graph}
    found = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted(sorted(each) for each in found if each)


def _name(root: Path, file: Path) -> str:
    parts = (root.name, *file.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(file: Path, files: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in files or node.module in files:
                    yield inner if inner in files else node.module


def _reached(graph: Graph, start: str) -> set[str]:
    """Modules that some path of at least one import leads to."""
    seen: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        name = ahead.pop()
        if name not in seen:
            seen.add(name)
            ahead.extend(graph[name])
    return seen


if __name__ == "__main__":
    found = circles(import_graph(Path(__file__).parents[2] / "cakegen"))
    sys.stdout.write(f"{len(found)} import circles\n" + "".join(f"{', '.join(each)}\n" for each in found))
    sys.exit(bool(found))
