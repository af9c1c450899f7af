"""`cakegen new`: a commented export to start from. Imports cakegen inside functions."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("new")
@click.argument("name")
@click.option("--dest", type=click.Path(path_type=Path, file_okay=False), help="Folder of exports (DEST/NAME).")
def draft_command(name: str, dest: Path | None) -> None:
    """Write a commented export, NAME/export.toml, whose numbers are to be edited.

    Without --dest it goes below `exports` of the checkout. A file that exists is left alone.
    """
    from cakegen import paths
    from cakegen.errors import SpecError
    from cakegen.spec.draft import draft_export

    text = draft_export(name)
    if dest is None and not paths.is_checkout():
        raise SpecError("cakegen is installed here, and never writes into its own folder; name one with --dest DIR")
    file = (dest or paths.exports_root()) / name / "export.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise SpecError(f"{file}: exists; edit it, or choose another name") from None
    argument = name if dest is None else str(file)
    click.echo(f"{file}: edit it, then `cakegen export {argument}{'' if dest is None else ' --dest DIR'}`")
