"""`cakegen diff`: what a change does to the generated programs. Imports cakegen inside functions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cakegen.cli.names import ARCH, EXPORT, KEY, nearest
from cakegen.cli.options import refuse_ignored
from cakegen.cli.selection import Selection, request_options, select_keys, take_selection

if TYPE_CHECKING:
    from cakegen.review import CostChange, ExportReview, Tree


@click.command("diff")
@click.argument("keys", nargs=-1, metavar="[KEY]...", type=KEY)
@request_options
@click.option("--arch", "arches", multiple=True, type=ARCH, help="Only programs of this target; may be repeated.")
@click.option("--base", default="HEAD", show_default=True, metavar="REV", help="Git revision of the old trees.")
@click.option("--merge-base", is_flag=True, help="Compare with where the histories of REV and HEAD parted.")
@click.option(
    "--format",
    "style",
    default="text",
    show_default=True,
    type=click.Choice(["text", "markdown", "html"]),
    help="html: one page, side by side, that opens offline.",
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File to write instead of stdout.")
@click.option("--export", "exports", multiple=True, type=EXPORT, help="Only this export; may be repeated.")
@click.option("--trees", type=click.Path(path_type=Path, file_okay=False), help="Folder of the trees.")
@click.option("--compile/--no-compile", "compiled", default=True, help="Compile touched programs on both sides.")
@click.option("--jobs", type=click.IntRange(min=1), help="Programs at once; by default one a processor.")
@click.option("--limit", type=click.IntRange(min=1000), help="Most characters of the markdown; by default 60000.")
def diff_command(
    keys: tuple[str, ...],
    base: str,
    merge_base: bool,
    style: str,
    out: Path | None,
    exports: tuple[str, ...],
    trees: Path | None,
    compiled: bool,
    jobs: int | None,
    limit: int | None,
    **requests: Any,
) -> None:
    """Compare the generated programs of a git revision with those of the working tree.

    Programs are paired by logical key. For each: what of the plan, the text and the machine code differs. KEY is a key
    or a pattern of keys; without one, all are compared. --stage, --tp, --tokens and --arch choose among the working
    tree's.
    """
    from cakegen import review
    from cakegen.review.trees import resolve_revision

    if style != "markdown":
        refuse_ignored("is of --format markdown; the others have no limit", "limit")
    if not compiled:
        refuse_ignored("is of a compilation, which --no-compile leaves out", "jobs")
    folder = _trees_folder(trees)
    revision = resolve_revision(folder, base, merge_base=merge_base)
    old, new = _selected(review.read_revision(folder, revision), review.read_trees(folder), exports)
    compared = [review.compare_trees(old.get(name), new.get(name)) for name in sorted({*old, *new})]
    if keys:
        compared = _narrowed(compared, keys)
    selection = take_selection({"keys": (), **requests})
    if selection != Selection():
        compared = _of_requests(compared, folder, selection)
    costs = _costs(compared, old, new, jobs) if compiled else None
    result = review.Review(
        revision.label, tuple(compared), costs, _compiler() if compiled else "", (*keys, *selection.words)
    )
    if style == "markdown":
        text = review.render_markdown(result, limit) if limit else review.render_markdown(result)
    else:
        text = review.render_html(result) if style == "html" else review.render_text(result)
    _deliver(text, out)


def _trees_folder(trees: Path | None) -> Path:
    from cakegen import paths
    from cakegen.errors import ReviewError

    folder = paths.generated_root() if trees is None else trees
    if trees is None and not paths.is_checkout():
        raise ReviewError("cakegen is installed here, without a history; name a checkout's trees with --trees DIR")
    if not folder.is_dir():
        raise ReviewError(f"{folder}: no such folder; --trees names the folder that holds the generated trees")
    return folder


def _selected(
    old: dict[str, Tree], new: dict[str, Tree], exports: tuple[str, ...]
) -> tuple[dict[str, Tree], dict[str, Tree]]:
    from cakegen.errors import ReviewError

    known = sorted({*old, *new})
    unknown = [name for name in exports if name not in known]
    if unknown:
        near = nearest(unknown[0], known)
        raise ReviewError(f"no tree {unknown[0]!r} on either side{near}; there is: {', '.join(known) or 'none'}")
    wanted = exports or known
    return {n: old[n] for n in wanted if n in old}, {n: new[n] for n in wanted if n in new}


def _narrowed(compared: list[ExportReview], keys: tuple[str, ...]) -> list[ExportReview]:
    from cakegen.errors import ReviewError
    from cakegen.review import narrow_review

    for pattern in keys:
        if not any(narrow_review(review, (pattern,)).keys for review in compared):
            count = sum(len(review.keys) for review in compared)
            near = nearest(pattern, sorted({entry.key for review in compared for entry in review.keys}))
            raise ReviewError(
                f"{pattern!r} matches none of the {count} keys of both sides{near}; `cakegen list` prints them"
            )
    return [narrowed for review in compared if (narrowed := narrow_review(review, keys)).keys]


def _of_requests(compared: list[ExportReview], folder: Path, selection: Selection) -> list[ExportReview]:
    """Of each comparison, what the registry of its new tree says that the requests launch."""
    from cakegen.registry import load_registry
    from cakegen.review import narrow_review

    chosen = {}
    refused: list[click.UsageError] = []
    for review in compared:
        if (folder / review.export).is_dir():
            try:
                chosen[review.export] = select_keys(load_registry(folder / review.export), selection)
            except click.UsageError as error:
                refused.append(error)
    if refused and not chosen:
        raise refused[0]
    narrowed = [narrow_review(review, chosen[review.export]) for review in compared if review.export in chosen]
    return [review for review in narrowed if review.keys]


def _costs(
    compared: list[ExportReview], old: dict[str, Tree], new: dict[str, Tree], jobs: int | None
) -> dict[str, list[CostChange]]:
    from cakegen.cli.progress import progress
    from cakegen.review import count_compilations, measure_costs

    total = sum(count_compilations(r, old.get(r.export), new.get(r.export)) for r in compared)
    with progress(total) as advance:
        return {r.export: measure_costs(r, old.get(r.export), new.get(r.export), jobs, advance) for r in compared}


def _compiler() -> str:
    from cakegen.compile import load_nvrtc

    major, minor = load_nvrtc().version
    return f"NVRTC {major}.{minor}"


def _deliver(text: str, out: Path | None) -> None:
    from cakegen.errors import ReviewError

    if out is None:
        click.echo(text, nl=False)
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ReviewError(f"{out}: can't be written ({error.strerror}); name another file with --out") from None
    click.echo(f"written: {out}", err=True)
