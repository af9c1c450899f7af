"""Imports go one way: the table below is the architecture's picture, and this test keeps both true."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.import_circles import circles, import_graph

import cakegen

ROOT = Path(cakegen.__file__).parent
LEAVES = {"errors", "compiler_flags", "plain_files", "toml_file", "visible"}
ALLOWED = {
    "version": set(),
    "__init__": {"version"},
    "errors": set(),
    "paths": set(),
    "compiler_flags": set(),
    "plain_files": set(),
    "toml_file": {"errors"},
    "visible": set(),
    "renamed_keys": set(),
    "arch": LEAVES,
    "functions": set(),
    "block": {"functions"},
    "block_text": {"block", "functions"},
    "known_faults": {"arch"},
    "rules": set(),
    "model": LEAVES | {"arch", "rules", "block", "operands"},
    "program_record": set(),
    "registry_text": LEAVES | {"model"},
    "operands": LEAVES | {"block", "functions"},
    "registry": LEAVES | {"arch", "model", "paths", "program_record", "registry_text"},
    "measured": LEAVES | {"paths"},
    "plan": LEAVES | {"arch", "model", "rules"},
    "compile": LEAVES | {"arch", "paths", "registry", "__init__"},
    "spec": LEAVES | {"arch", "block", "functions", "model", "paths", "plan", "rules"},
    "emit": LEAVES | {"arch", "functions", "known_faults", "model", "operands", "paths", "plan", "registry", "rules"},
    "runtime": LEAVES | {"arch", "known_faults", "model", "operands", "paths", "plan", "registry", "compile"},
    "emulator": LEAVES | {"arch", "model", "operands", "paths", "plan", "registry", "rules", "compile", "runtime"},
    "timing": LEAVES | {"arch", "model", "operands", "plan", "registry", "runtime", "emulator"},
    "compat": LEAVES | {"operands", "runtime"},
    "review": LEAVES | {"compile", "registry", "renamed_keys"},
    "doctor": LEAVES | {"arch", "known_faults", "model", "paths", "plan", "registry", "compile", "runtime", "__init__"},
    "bench": LEAVES
    | {"arch", "measured", "model", "operands", "paths", "plan", "registry", "rules"}
    | {"compile", "emit", "runtime", "version", "__init__"},
}
FORBIDDEN = {
    "plan": {"torch", "numpy", "pydantic", "jinja2", "click", "cuda", "pathlib", "os", "io"},
    "spec": {"torch", "jinja2", "click", "cuda"},
    "emit": {"torch", "pydantic", "click", "cuda"},
    "compile": {"torch", "jinja2", "pydantic", "click"},
    "runtime": {"jinja2", "pydantic", "click"},
    "compat": {"jinja2", "pydantic", "click", "flashinfer"},
    "emulator": {"jinja2", "pydantic", "click", "cuda"},
    "timing": {"jinja2", "pydantic", "click", "cuda"},
    "doctor": {"jinja2", "pydantic", "click", "cuda"},
    "bench": {"jinja2", "pydantic", "click"},
    "review": {"torch", "pydantic", "click", "cuda"},
    "registry": {"torch", "jinja2", "pydantic", "click", "cuda"},
    "model": {"torch", "pydantic"},
    "rules": {"torch", "pydantic"},
    "measured": {"torch", "numpy", "jinja2", "pydantic", "click", "cuda"},
}
MODULES = sorted(ROOT.rglob("*.py"))


def layer_of(parts: tuple[str, ...]) -> str:
    """`cakegen.plan.route` -> `plan`; the package itself -> `__init__`."""
    return parts[1] if len(parts) > 1 else "__init__"


def imported(tree: ast.AST, at_start: bool = False) -> Iterator[tuple[str, ...]]:
    """Dotted names that imports name.

    Parameters
    ----------
    at_start
        Only those that run when the module is loaded; else also those in functions, and those for type checkers.
    """
    for node in ast.iter_child_nodes(tree):
        if at_start and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            base = tuple((node.module or "").split("."))
            # `from cakegen import paths` names the module paths
            yield from ((*base, alias.name) if base == ("cakegen",) else base for alias in node.names)
        elif not (at_start and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            yield from imported(node, at_start)


def layers_imported(file: Path, at_start: bool = False) -> set[str]:
    names = imported(ast.parse(file.read_text()), at_start)
    layers = {layer_of(name) for name in names if name[0] == "cakegen"}
    return {layer if (ROOT / layer).exists() or (ROOT / f"{layer}.py").exists() else "__init__" for layer in layers}


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_module_imports_only_what_its_layer_may(file: Path) -> None:
    layer = layer_of(("cakegen", *file.relative_to(ROOT).with_suffix("").parts))
    if layer in ("cli", "__main__"):
        assert layers_imported(file, at_start=True) <= {"cli"}, "a command imports cakegen inside functions"
        return
    assert layers_imported(file) - {layer} <= ALLOWED[layer]
    packages = {name[0] for name in imported(ast.parse(file.read_text()))}
    assert not packages & FORBIDDEN.get(layer, set())


def test_table_has_no_cycle() -> None:
    done: set[str] = set()
    while len(done) < len(ALLOWED):
        ready = {layer for layer, needs in ALLOWED.items() if layer not in done and needs <= done}
        assert ready, f"a cycle among {sorted(set(ALLOWED) - done)}"
        done |= ready


def test_import_that_breaks_the_table_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from cakegen.emit import render_tree\n    from cakegen import paths, __version__\n")
    assert layers_imported(file) == {"emit", "paths", "__init__"}
    assert layers_imported(file, at_start=True) == set()


def test_package_has_no_import_circle() -> None:
    assert circles(import_graph(ROOT)) == []


def test_import_circle_behind_type_checking_is_found(tmp_path: Path) -> None:
    package = tmp_path / "cakegen"
    (package / "inner").mkdir(parents=True)
    (package / "a.py").write_text("if TYPE_CHECKING:\n    from cakegen.inner import b\n")
    (package / "inner" / "b.py").write_text("def f():\n    from cakegen.c import x\n")
    (package / "c.py").write_text("import cakegen.a\nfrom cakegen.d import y\n")
    (package / "d.py").write_text("import json\n")
    assert circles(import_graph(package)) == [["cakegen.a", "cakegen.c", "cakegen.inner.b"]]


def test_runtime_has_one_door_to_the_emulator() -> None:
    mentions = [
        (file.relative_to(ROOT).as_posix(), node.value)
        for file in MODULES
        if layer_of(("cakegen", *file.relative_to(ROOT).with_suffix("").parts)) not in ("emulator", "cli")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cakegen.emulator")
    ]
    assert mentions == [("runtime/emulation.py", "cakegen.emulator")]
