"""Bounds that every source keeps: the length of files and functions, documented names, and words that say nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import cakegen

PACKAGE = Path(cakegen.__file__).parent
ROOT = PACKAGE.parent
PYTHON = sorted(file for folder in (PACKAGE, ROOT / "tests") for file in folder.rglob("*.py"))
MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 60
EMPTY_WORDS = {"manager", "helper", "helpers", "util", "utils", "misc", "data", "info", "v2", "new"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def definitions(tree: ast.AST, public: bool = True) -> Iterator[tuple[bool, Function | ast.ClassDef]]:
    """Every function and class of a module, and whether others may use it; what a function defines is its own."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            visible = public and not node.name.startswith("_")
            yield visible, node
            yield from definitions(node, visible and isinstance(node, ast.ClassDef))
        else:
            yield from definitions(node, public)


@pytest.mark.parametrize("file", PYTHON, ids=name_of)
def test_files_and_functions_are_short(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) < MOST_FILE_LINES
    for _, node in definitions(ast.parse(text)):
        if not isinstance(node, ast.ClassDef):
            assert (node.end_lineno or 0) - node.lineno + 1 < MOST_FUNCTION_LINES, node.name


@pytest.mark.parametrize("file", [file for file in PYTHON if PACKAGE in file.parents], ids=name_of)
def test_public_names_are_documented(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert tree.body == [] or ast.get_docstring(tree)
    undocumented = [node.name for public, node in definitions(tree) if public and not ast.get_docstring(node)]
    assert undocumented == []


@pytest.mark.parametrize("file", [file for file in PYTHON if PACKAGE in file.parents], ids=name_of)
def test_names_say_something(file: Path) -> None:
    names = [file.stem, *(node.name for _, node in definitions(ast.parse(file.read_text(encoding="utf-8"))))]
    words = {word for name in names for word in re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")}
    assert not words & EMPTY_WORDS


def test_definitions_tell_public_from_private_ones() -> None:
    tree = ast.parse("class A:\n    def run(self):\n        def inner(): ...\n    def _own(self): ...\ndef _f(): ...\n")
    assert [(public, node.name) for public, node in definitions(tree)] == [
        (True, "A"),
        (True, "run"),
        (False, "inner"),
        (False, "_own"),
        (False, "_f"),
    ]
