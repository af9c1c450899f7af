"""`cakegen docs`: the pages, where there is no checkout to read them in. Imports cakegen inside functions."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("docs")
@click.argument("page", required=False)
def docs_command(page: str | None) -> None:
    """Print a page as Markdown; without PAGE, list them.

    PAGE is a page's name, such as `serving`.
    """
    from cakegen import paths

    root = paths.docs_root()
    pages = {file.stem: file for file in sorted(root.glob("*.md"))}
    if page is None:
        width = max(map(len, pages), default=0)
        for name, file in pages.items():
            click.echo(f"{name:{width}}  {_title(file)}")
        return
    click.echo(_find(pages, page).read_text(encoding="utf-8"), nl=False)


def _find(pages: dict[str, Path], name: str) -> Path:
    import difflib

    found = pages.get(name.removeprefix("docs/").removesuffix(".md"))
    if found is None:
        near = difflib.get_close_matches(name, pages, n=1)
        hint = f"did you mean {near[0]}?" if near else "`cakegen docs` lists them"
        raise click.BadParameter(f"there is no page {name!r}; {hint}", param_hint="PAGE")
    return found


def _title(file: Path) -> str:
    """A page's heading."""
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()
