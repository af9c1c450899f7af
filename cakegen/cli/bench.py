"""`cakegen bench`: measure rows on this machine's GPU, or show what was measured. Imports cakegen inside functions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cakegen.cli.options import refuse_ignored

if TYPE_CHECKING:
    from cakegen.bench.records import Results

_TABLE_FILE = "table.txt"
_OF_A_RUN = (
    *("table", "stages", "tps", "tokens", "repeats", "rivals"),
    *("with_libraries", "libraries", "search", "chains", "host", "seed"),
)


@click.command("bench")
@click.option(
    "--rows",
    "table",
    default="main",
    show_default=True,
    type=click.Choice(["main", "full", "decode", "prefill"]),
    help="main: 60 rows; full: ragged T and TP 2, 4, 16 too; decode, prefill: main's rows on one side of the limit.",
)
@click.option("--stage", "stages", multiple=True, type=click.Choice(["front", "tail"]), help="Only this half.")
@click.option("--tp", "tps", multiple=True, type=click.IntRange(min=1), help="This degree instead; may be repeated.")
@click.option("--tokens", multiple=True, type=click.IntRange(min=1), help="This T instead; may be repeated.")
@click.option("--out", "folder", type=click.Path(path_type=Path, file_okay=False), help="Folder for results and plots.")
@click.option("--against", type=click.Path(path_type=Path, dir_okay=False), help="Earlier results to compare with.")
@click.option(
    "--from", "recorded", type=click.Path(path_type=Path, dir_okay=False), help="Show these; measure nothing."
)
@click.option("--repeats", type=click.IntRange(min=3), help="Timed calls of an arm; by default 41, 11 from T 4096 on.")
@click.option("--rivals/--no-rivals", default=True, show_default=True, help="Time stock chains beside ours.")
@click.option(
    "--libraries/--no-libraries",
    "with_libraries",
    default=True,
    show_default=True,
    help="Time stock chains with the GEMMs of installed kernel libraries too.",
)
@click.option("--library", "libraries", multiple=True, metavar="NAME", help="Only this library; may be repeated.")
@click.option("--search/--no-search", default=False, show_default=True, help="Let libraries search per shape; minutes.")
@click.option("--chains/--no-chains", default=True, show_default=True, help="Time captured chains of layers.")
@click.option("--host/--no-host", default=True, show_default=True, help="Time what calls cost the host.")
@click.option("--seed", default=0, show_default=True, help="Of the random operands.")
@click.option("--export", "export", default="kimi_k3_latent_moe", show_default=True, help="Export, or a tree's folder.")
def bench_command(
    table: str,
    stages: tuple[str, ...],
    tps: tuple[int, ...],
    tokens: tuple[int, ...],
    folder: Path | None,
    against: Path | None,
    recorded: Path | None,
    repeats: int | None,
    rivals: bool,
    with_libraries: bool,
    libraries: tuple[str, ...],
    search: bool,
    chains: bool,
    host: bool,
    seed: int,
    export: str,
) -> None:
    """Measure rows (stage, TP, T) from a clean, cold L2, beside the fastest stock chain and the measured limit.

    Writes results.jsonl (one object a row, flushed as it is measured), table.txt and plots into the folder, and prints
    the table. Rows that lose are marked. Exit status 1: a program computes something wrong.
    """
    from cakegen.bench.records import WRONG, read_results
    from cakegen.bench.rows import DECODE_TOKENS, select_rows
    from cakegen.registry import load_registry

    if recorded is not None:
        refuse_ignored("says what to measure; --from measures nothing", *_OF_A_RUN)
    elif not (with_libraries and rivals):
        why = "is of chains with a library's GEMMs, which --no-libraries and --no-rivals leave out"
        refuse_ignored(why, "libraries", "search")
    registry = load_registry(export)
    # read first: a file that can't be read should not cost a run
    before = read_results(against) if against is not None else None
    if recorded is None:
        from cakegen.bench.libraries import LIBRARIES
        from cakegen.bench.measure import Settings
        from cakegen.bench.session import Run, run_bench

        rows = select_rows(
            table, DECODE_TOKENS, stages=stages, tps=tps, tokens=tokens, served=registry.model.tp_degrees
        )
        names = (libraries or tuple(LIBRARIES)) if with_libraries else ()
        settings = Settings(repeats=repeats, rivals=rivals, libraries=names, search=search, seed=seed)
        run = Run(rows, settings, chains, host)
        folder = folder or fresh_folder("bench")
        recorded = run_bench(registry, run, folder, lambda line: click.echo(line, err=True))
    results = read_results(recorded)
    show_results(results, before, DECODE_TOKENS, folder)
    statuses = [record.status for record in results.rows]
    statuses += [str(chain.get("status")) for chain in results.others.get("chain", [])]
    if WRONG in statuses:
        raise click.exceptions.Exit(1)


def fresh_folder(kind: str) -> Path:
    """`build/<kind>/<UTC>` below the current folder."""
    from datetime import UTC, datetime

    return Path("build") / kind / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")


def show_results(results: Results, before: Results | None, decode_max_tokens: int, folder: Path | None) -> None:
    """Print results, and write the table and the plots where a folder was named."""
    report = report_of(results, before, decode_max_tokens)
    click.echo(report)
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _TABLE_FILE).write_text(f"{report}\n", encoding="utf-8")
    _plot(results, folder)
    click.echo(f"written: {folder}", err=True)


def report_of(results: Results, before: Results | None, decode_max_tokens: int) -> str:
    """Provenance, rows, means, the rest, and the changes since an earlier run, as text."""
    from cakegen.bench.compare import compare_rows, find_cliffs, means_of
    from cakegen.bench.table import render_changes, render_means, render_others, render_rows

    libraries = results.header.get("libraries") or {}
    parts = [
        "\n".join((title_of(results), *(f"library {name}: {found}" for name, found in libraries.items()))),
        render_rows(results.rows),
        render_means(means_of(results.rows, decode_max_tokens), find_cliffs(results.rows)),
        render_others(results.others),
    ]
    if before is not None:
        parts += [f"against {title_of(before)}", render_changes(compare_rows(before.rows, results.rows))]
    return "\n\n".join(part for part in parts if part)


def title_of(results: Results) -> str:
    """Device, versions, commit and date of a run."""
    head = results.header
    return (
        f"{head.get('device')}, {head.get('driver')}, torch {head.get('torch')}, "
        f"commit {str(head.get('commit'))[:12]}, {head.get('date')}"
    )


def _plot(results: Results, folder: Path) -> None:
    from cakegen.bench.plots import write_plots
    from cakegen.errors import BenchError

    try:
        write_plots(results.rows, title_of(results), folder)
    except BenchError as error:
        click.echo(f"no plots: {error}", err=True)
