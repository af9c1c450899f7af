"""`cakegen export`: declarations -> generated trees. Imports cakegen inside functions."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("export")
@click.argument("name", required=False)
@click.option("--check", is_flag=True, help="Write nothing; fail unless the tree is what the export would write.")
@click.option("--dest", type=click.Path(path_type=Path, file_okay=False), help="Folder of the trees (DEST/<export>).")
def export_command(name: str | None, check: bool, dest: Path | None) -> None:
    """Write the generated tree of an export, all or nothing.

    NAME is a folder below `exports`, or the path of an export file; without it, every export is written.
    """
    from cakegen.errors import SealError

    root = _trees_root(check, dest)
    files = export_files(name)
    faults = _orphans(root, files) if check and name is None and dest is None else []
    for file in files:
        try:
            click.echo(_export_one(file, root, check, name, dest))
        except SealError as error:
            faults.append(str(error))
    if faults:
        raise SealError("\n".join(faults))


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
    if not found:
        names = ", ".join(file.parent.name for file in known) or "none"
        raise SpecError(f"no export {name!r}; there is: {names}. A path of an export file also does")
    return found


def _export_one(file: Path, root: Path, check: bool, name: str | None, dest: Path | None) -> str:
    from cakegen.emit import check_tree, render_tree, write_tree
    from cakegen.spec import parse_export

    model = parse_export(file).to_model()
    _refuse_other_name(file, model.name)
    files = render_tree(model, model.name)
    tree = root / model.name
    if check:
        argument = name if name and name.endswith(".toml") else model.name
        command = f"cakegen export {argument}{f' --dest {dest}' if dest else ''}"
        return f"{model.name}: {check_tree(tree, files, command).summary}"
    return f"{model.name}: {write_tree(tree, files).summary} in {tree}"


def _refuse_other_name(file: Path, name: str) -> None:
    from cakegen import paths
    from cakegen.errors import SpecError

    if file.parent.parent == paths.exports_root() and file.parent.name != name:
        raise SpecError(f"{file.parent.name}/{file.name}: name = {name!r}; it must be its folder's name")


def _trees_root(check: bool, dest: Path | None) -> Path:
    from cakegen import paths
    from cakegen.errors import EmitError

    if dest is not None:
        return dest
    if not check and not paths.is_checkout():
        raise EmitError("cakegen is installed here, and never writes into its own folder; name one with --dest DIR")
    return paths.generated_root()


def _orphans(root: Path, files: list[Path]) -> list[str]:
    """Trees whose export is gone."""
    present = sorted(path.name for path in root.glob("*/cake_jit.py") for path in (path.parent,))
    gone = sorted(set(present) - {file.parent.name for file in files})
    return [f"{root / name}: stale, no export declares it; remove the folder" for name in gone]
