"""`cakegen export`: declarations -> generated trees. Imports cakegen inside functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from cakegen.emit import RenderedTree
    from cakegen.emit.reach import ReachedKey
    from cakegen.model import Model

ALL_KEYS = "*"
INSTALL_AGAIN = (
    "This tree belongs to an installed package, into which no export writes: install cakegen again (pip install "
    "--force-reinstall --no-deps), and keep a tree of your own elsewhere (`cakegen export NAME --dest DIR`)."
)
WALKS = "walks"
"""Folder in the cache, of what exports reach."""


@dataclass(frozen=True)
class Layout:
    """What of an export is written: its whole tree, or (`tvm-ffi`) the sources of some keys with a manifest."""

    name: str
    arches: tuple[str, ...]
    match: str

    def select(self, tree: RenderedTree) -> dict[str, str]:
        """The files to write below the export's folder.

        Raises
        ------
        EmitError
            The layout selects keys, and none is selected.
        """
        if self.name == "tree":
            return tree.files
        from cakegen.emit.ffi_layout import select_ffi_files

        return select_ffi_files(tree, self.arches, self.match)

    @property
    def options(self) -> str:
        """As the command line spells it."""
        if self.name == "tree":
            return ""
        from cakegen.emit.ffi_layout import spell_selection

        return f" {spell_selection(self.arches, self.match)}"

    def refuse_other(self, tree: Path) -> None:
        """Refuse a folder in which the other layout lies: writing would drop it.

        Raises
        ------
        EmitError
            It holds one.
        """
        from cakegen.emit.ffi_layout import MANIFEST_FILE
        from cakegen.errors import EmitError
        from cakegen.registry import REGISTRY_FILE

        other = MANIFEST_FILE if self.name == "tree" else REGISTRY_FILE
        if (tree / other).exists():
            raise EmitError(
                f"{tree}: holds {other}, so an export of another layout, which would be dropped; name another --dest"
            )


@click.command("export")
@click.argument("name", required=False)
@click.option("--check", is_flag=True, help="Write nothing; fail unless the tree is what the export would write.")
@click.option("--dest", type=click.Path(path_type=Path, file_okay=False), help="Folder of the trees (DEST/<export>).")
@click.option("--layout", type=click.Choice(["tree", "tvm-ffi"]), default="tree", show_default=True, help="See above.")
@click.option("--arch", "arches", multiple=True, help="tvm-ffi: only this target, e.g. sm_100a; may be repeated.")
@click.option("--match", default=ALL_KEYS, help="tvm-ffi: only keys that this pattern matches, e.g. 'tail_gemm:*'.")
def export_command(
    name: str | None, check: bool, dest: Path | None, layout: str, arches: tuple[str, ...], match: str
) -> None:
    """Write the generated tree of an export, all or nothing, and beside it the headers that all trees share.

    NAME is a folder below `exports`, or the path of an export file; without it, every export is written. The layout
    `tvm-ffi` is what an engine needs that compiles with nvcc and loads through TVM-FFI: bindings, kernels, what they
    include, and a manifest.
    """
    if layout == "tree" and (arches or match != ALL_KEYS):
        raise click.UsageError("--arch and --match select keys of the layout tvm-ffi; a tree always holds all keys")
    if layout != "tree" and dest is None:
        raise click.UsageError(f"the layout {layout} has no folder of its own; name one with --dest DIR")
    wanted = Layout(layout, arches, match)
    root = _trees_root(check, dest)
    files = export_files(name)
    trees = [_rendered(file, wanted, root, check) for file in files]
    if check:
        _check(trees, files, wanted, root, name, dest, click.echo)
    else:
        _write(trees, wanted, root)


def check_trees(say: Callable[[str], None]) -> None:
    """Compare the generated tree of every export with what its declaration and the templates give now.

    Parameters
    ----------
    say
        Called with a line for each tree that is as it should be.

    Raises
    ------
    SealError
        A generated file differs.
    """
    from cakegen import paths

    layout, root, files = Layout("tree", (), ALL_KEYS), paths.generated_root(), export_files(None)
    _check([_rendered(file, layout, root, check=True) for file in files], files, layout, root, None, None, say)


def export_files(name: str | None) -> list[Path]:
    """The export files that a name stands for.

    Raises
    ------
    SpecError
        No such export.
    """
    from cakegen import paths
    from cakegen.errors import SpecError

    known = sorted(paths.exports_root().glob("*/export.toml"))
    if name is None:
        return known
    if name.endswith(".toml"):
        return [Path(name)]
    found = [file for file in known if file.parent.name == name]
    # small ones for tests, and those that are declared and refused with what is missing: all of them leaves these out
    aside = (file for folder in ("small", "planned") for file in (paths.exports_root() / folder).glob("*.toml"))
    found = found or [file for file in aside if file.stem == name]
    if not found:
        names = ", ".join(file.parent.name for file in known) or "none"
        raise SpecError(f"no export {name!r}; there is: {names}. A path of an export file also does")
    return found


def _rendered(file: Path, layout: Layout, root: Path, check: bool) -> RenderedTree:
    from cakegen.emit import render_tree
    from cakegen.spec import parse_export

    model = parse_export(file).to_model()
    _refuse_other_name(file, model.name)
    layout.refuse_other(root / model.name)
    return render_tree(model, model.name, keys=None if check else _remembered(model))


def _write(trees: list[RenderedTree], layout: Layout, root: Path) -> None:
    from cakegen.emit import write_exports, write_tree

    if layout.name == "tree" and trees:
        for name, difference in write_exports(root, trees).items():
            click.echo(f"{name}: {difference.summary} in {root / name}")
        return
    for tree in trees:
        click.echo(
            f"{tree.export}: {write_tree(root / tree.export, layout.select(tree)).summary} in {root / tree.export}"
        )


def _check(
    trees: list[RenderedTree],
    files: list[Path],
    layout: Layout,
    root: Path,
    name: str | None,
    dest: Path | None,
    say: Callable[[str], None],
) -> None:
    from cakegen import paths
    from cakegen.emit import check_tree, shared_files
    from cakegen.errors import SealError
    from cakegen.registry import SHARED_FOLDER

    end = f"{f' --dest {dest}' if dest else ''}{layout.options}"
    given = name if name and name.endswith(".toml") else None
    folders = [(tree.export, layout.select(tree), f"cakegen export {given or tree.export}{end}") for tree in trees]
    if layout.name == "tree" and trees:
        folders.insert(
            0, (SHARED_FOLDER, shared_files(root, trees), f"cakegen export{f' {name}' if name else ''}{end}")
        )
    faults = _orphans(root, files) if name is None and dest is None else []
    remedy = None if dest is not None or paths.is_checkout() else INSTALL_AGAIN
    for folder, texts, command in folders:
        try:
            say(f"{folder}: {check_tree(root / folder, texts, command, remedy).summary}")
        except SealError as error:
            faults.append(str(error))
    if faults:
        raise SealError("\n".join(faults))


def _remembered(model: Model) -> tuple[ReachedKey, ...] | None:
    """What the model reaches, by the walk that an earlier export left in the cache; --check never trusts one."""
    from cakegen.compile import cache_root
    from cakegen.compile.cache_folder import refuse_strangers
    from cakegen.emit.walk import remembered_keys
    from cakegen.errors import CompileError

    try:
        folder = cache_root() / WALKS
        refuse_strangers(folder)
        return remembered_keys(model, folder)
    except CompileError:  # there is no folder for a cache, or others can write it
        return None


def _refuse_other_name(file: Path, name: str) -> None:
    from cakegen import paths
    from cakegen.errors import SpecError

    if file.resolve().parent.parent != paths.exports_root():
        return
    whose, needed = ("folder", file.parent.name) if file.name == "export.toml" else ("file", file.stem)
    if needed != name:
        raise SpecError(f"{file.parent.name}/{file.name}: name = {name!r}; it must be its {whose}'s name")


def _trees_root(check: bool, dest: Path | None) -> Path:
    from cakegen import paths
    from cakegen.errors import EmitError

    if dest is not None:
        return dest
    if not check and not paths.is_checkout():
        raise EmitError("cakegen is installed here, and never writes into its own folder; name one with --dest DIR")
    return paths.generated_root()


def _orphans(root: Path, files: list[Path]) -> list[str]:
    """Trees whose export is gone. What a killed export left beside a tree, under a hidden name, is none."""
    present = {file.parent.name for file in root.glob("*/cake_jit.py") if not file.parent.name.startswith(".")}
    gone = sorted(present - {file.parent.name for file in files})
    return [f"{root / name}: stale, no export declares it; remove the folder" for name in gone]
