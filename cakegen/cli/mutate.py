"""`cakegen mutate`: programs broken on purpose, and what the emulator notices. Imports cakegen inside functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cakegen.cli.names import ARCH, EXPORT, KEY
from cakegen.cli.options import refuse_ignored
from cakegen.cli.selection import Selection, request_options, select_keys

if TYPE_CHECKING:
    from cakegen.emulator.mutation.sequences import SequenceTarget

_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)
_FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)
_OF_REQUESTS = ("stage", "tp", "tokens")
_OF_FILES = ("ptx", "cuda", "launch", "entry", "include", "nvrtc_options")


@click.command("mutate")
@click.argument("keys", nargs=-1, metavar="[KEY]...", type=KEY)
@request_options
@click.option(
    *("--model", "--export", "export"),
    default="tiny_latent_moe",
    show_default=True,
    is_eager=True,
    type=EXPORT,
    help="Export, or a tree's folder.",
)
@click.option("--arch", default="sm_90a", show_default=True, type=ARCH, help="Target of the programs.")
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(min=0), help="Random schedules a mutant.")
@click.option(
    "--attempts",
    default=4,
    show_default=True,
    type=click.IntRange(min=1),
    help="Mutants of a site under all schedules.",
)
@click.option("--operator", "operators", multiple=True, metavar="NAME", help="Only this operator; may be repeated.")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(min=1), help="Processes.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default="build/mutation/results.jsonl",
    show_default=True,
    help="Results, a line a mutant; a run goes on where the file ends.",
)
@click.option(
    "--explained", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="JSON: why survivors survive."
)
@click.option(
    "--programs", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="File of keys, one a line."
)
@click.option("--choose", is_flag=True, help="Print a few keys whose runs reach every site of all programs, and end.")
@click.option("--survivors", type=click.Path(path_type=Path, dir_okay=False), help="Write them here, a line each.")
@click.option("--cuda", multiple=True, type=_FILE, help="A CUDA file whose kernel is mutated; not with KEY.")
@click.option("--ptx", multiple=True, type=_FILE, help="The same of a PTX file.")
@click.option("--launch", multiple=True, type=_FILE, help="What to launch (`cakegen docs emulate-launch`), one a file.")
@click.option("--entry", help="The kernel that is mutated.  [default: that of the first launch]")
@click.option("--include", multiple=True, type=_FOLDER, help="Folder for --cuda's includes.")
@click.option("--option", "nvrtc_options", multiple=True, help="NVRTC option for --cuda, such as --option=-DN=4.")
@click.option("--table", "only_table", is_flag=True, help="Run nothing; show what the results hold.")
def mutate_command(
    keys: tuple[str, ...],
    stage: str | None,
    tp: int | None,
    tokens: str | None,
    export: str,
    arch: str,
    seeds: int,
    attempts: int,
    operators: tuple[str, ...],
    jobs: int,
    out: Path,
    explained: Path | None,
    programs: Path | None,
    choose: bool,
    survivors: Path | None,
    only_table: bool,
    **files: Any,
) -> None:
    """Run mutants of KEYs (or of --programs) under several schedules until one shows that they are broken.

    A mutant is a program whose PTX has one thing wrong: a fence, wait or arrival dropped, a count, parity, descriptor
    field or scope changed, an access moved in front of its wait. Prints a table of what was noticed, and the survivors.

    With --cuda or --ptx, and --launch: anybody's kernels; right is what the unmutated kernel writes, bit for bit.
    """
    from cakegen.emulator.mutation.campaign import Campaign, choose_keys, run_campaign
    from cakegen.emulator.mutation.operators import OPERATORS

    _refuse_unused(choose, only_table, any(files[name] for name in ("ptx", "cuda", "launch")))
    if choose:
        with _progress("programs") as advance:
            chosen = choose_keys(export, arch, jobs, lambda done, total: advance(done, total, ""))
        click.echo("\n".join(chosen))
        return
    if not only_table:
        names = {operator.name for operator in OPERATORS} | {"hoist"}
        if unknown := set(operators) - names:
            raise click.UsageError(f"no operator {', '.join(sorted(unknown))}; there is: {', '.join(sorted(names))}")
        if any(files[name] for name in ("ptx", "cuda", "launch")):
            sequences = _sequences(keys, programs, arch, **files)
            export, keys = "", tuple(each.name for each in sequences)
        else:
            selection = Selection(keys, stage, tp, tokens, (arch,))
            sequences, keys = (), _keys(export, selection, programs)
        campaign = Campaign(export, arch, keys, seeds, operators, attempts, sequences)
        with _progress("sites") as advance:
            run_campaign(campaign, out, jobs, lambda done, total, entry: advance(done, total, _last(entry)))
    show_results(out, explained, survivors)


def _refuse_unused(choose: bool, only_table: bool, of_files: bool) -> None:
    """Refuse options that the way in which the command runs leaves without an effect."""
    of_a_run = ("keys", *_OF_REQUESTS, "seeds", "attempts", "operators", *_OF_FILES)
    if choose:
        why = "is of a run; --choose runs no mutants"
        refuse_ignored(why, "out", "explained", "programs", "survivors", "only_table", *of_a_run)
    elif only_table:
        refuse_ignored("is of a run; --table runs nothing", *of_a_run)
    elif of_files:
        refuse_ignored("is of KEYs; --launch says what to run", "export", *_OF_REQUESTS)
    else:
        refuse_ignored("is of --launch, which is not there", *_OF_FILES)


def _sequences(
    keys: tuple[str, ...],
    programs: Path | None,
    arch: str,
    *,
    ptx: tuple[Path, ...],
    cuda: tuple[Path, ...],
    launch: tuple[Path, ...],
    entry: str | None,
    **compiling: Any,
) -> tuple[SequenceTarget, ...]:
    from cakegen.cli.emulate_files import FileRequest
    from cakegen.cli.mutate_files import sequence_targets

    if keys or programs or (ptx and cuda) or len(launch) != len(ptx or cuda):
        raise click.UsageError("give either KEYs or --programs; or --cuda or --ptx files, and as many --launch files")
    requests = [
        FileRequest(
            ptx=None if cuda else source,
            cuda=source if cuda else None,
            launch=file,
            entry=entry,
            out=None,
            arch=arch,
            **compiling,
        )
        for source, file in zip(cuda or ptx, launch, strict=True)
    ]
    return sequence_targets(requests)


def _keys(export: str, selection: Selection, programs: Path | None) -> tuple[str, ...]:
    """Keys that the line chooses, and those that a file lists."""
    from cakegen.registry import load_registry

    listed = _listed(programs) if programs is not None else []
    if selection.patterns or selection.of_requests:
        return (*select_keys(load_registry(export), selection), *listed)
    if not listed:
        raise click.UsageError("give KEYs or --programs; `cakegen mutate --choose` prints a good set")
    return tuple(listed)


def _listed(programs: Path) -> list[str]:
    try:
        return programs.read_text(encoding="utf-8").split()
    except UnicodeDecodeError as error:
        raise click.UsageError(
            f"{programs}: is no text ({error}); --programs names a file of keys, one a line"
        ) from None


def _last(entry: dict[str, Any] | None) -> str:
    return "" if entry is None else f"{entry['operator']}: {entry['outcome']}"


def show_results(file: Path, explained: Path | None, kept: Path | None) -> None:
    """Print the table and the survivors of a file of results."""
    from cakegen.emulator.mutation import table
    from cakegen.emulator.mutation.campaign import read_campaign

    header, results = read_campaign(file)
    survivors = table.survivors_of(results, table.read_explanations(explained) if explained else ())
    click.echo(table.render_table(header, results, survivors))
    click.echo()
    click.echo(table.render_survivors(survivors))
    if kept is not None:
        kept.write_text(table.survivors_json(survivors), encoding="utf-8")


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on a terminal's stderr; elsewhere nothing, for the results are on disk."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total, last: progress.update(task, completed=done, total=total, description=last)
