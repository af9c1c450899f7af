"""`cakegen tune`: measure this machine's GPU and write its table. Imports cakegen inside functions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cakegen.cli.bench import fresh_folder
from cakegen.cli.options import refuse_ignored

if TYPE_CHECKING:
    from cakegen.measured import MeasuredTable
    from cakegen.registry import Registry


@click.command("tune")
@click.option(
    "--rows",
    "rows",
    default="full",
    show_default=True,
    type=click.Choice(["main", "full"]),
    help="full: ragged T and TP 1, 2, 4, 8, 16; main: 60 rows of TP 1 and 8.",
)
@click.option(
    "--from",
    "recorded",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Take these results of `cakegen bench`; measure nothing.",
)
@click.option("--out", "file", type=click.Path(path_type=Path, dir_okay=False), help="Table; default: the export's.")
@click.option("--results", "folder", type=click.Path(path_type=Path, file_okay=False), help="Folder for the results.")
@click.option(
    "--repeats",
    type=click.IntRange(min=3),
    help="Timed calls of an arm; by default 41, 11 from T 4096 on; of a tile 21 and 9.",
)
@click.option(
    "--tiles",
    "tiles",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Time each tile of Hopper's prefill instead, and write FILE.",
)
@click.option("--export", "export", default="kimi_k3_latent_moe", show_default=True, help="Export, or a tree's folder.")
def tune_command(
    rows: str,
    recorded: Path | None,
    file: Path | None,
    folder: Path | None,
    repeats: int | None,
    tiles: Path | None,
    export: str,
) -> None:
    """Measure rows on this device beside the stock chains, and write the table of the device.

    The old table stays until the new one is whole. Prints where a stock chain is faster, and what changed.

    With --tiles it times each tile of prefill at the rows that prefill serves, for the costs of
    `hopper.prefill.tiles` in exports/rules.
    """
    from cakegen.bench.records import read_results
    from cakegen.bench.tune import table_of, write_table
    from cakegen.registry import load_registry

    if recorded is not None:
        refuse_ignored("is of a run; --from measures nothing", "rows", "folder", "repeats")
    registry = load_registry(export)
    if tiles is not None:
        refuse_ignored("is of a device's table; --tiles writes none", "recorded", "file", "folder")
        _measure_tiles(registry, rows, repeats, tiles)
        return
    # before a run that takes minutes
    _check_writable(file)
    if recorded is None:
        recorded = _measure(registry, rows, repeats, folder or fresh_folder("tune"))
    results = read_results(recorded)
    _check_export(results.header.get("export"), registry.export, recorded)
    table = table_of(results, str(recorded))
    target = file or _own_file(table, registry.model.name)
    _report(table, target)
    write_table(table, target)
    click.echo(f"written: {target}", err=True)


def _measure_tiles(registry: Registry, rows: str, repeats: int | None, file: Path) -> None:
    from cakegen.bench.rows import DECODE_TOKENS, select_rows
    from cakegen.bench.tiles import measure_tiles
    from cakegen.bench.tune import write_whole
    from cakegen.errors import BenchError

    if not os.access(file.parent, os.W_OK):
        raise BenchError(f"{file}: its folder can't be written; it is written when all rows are measured. Name another")
    wanted = select_rows(rows, DECODE_TOKENS)
    write_whole(measure_tiles(registry, wanted, repeats, click.echo), file)
    click.echo(f"written: {file}", err=True)


def _check_writable(file: Path | None) -> None:
    from cakegen.errors import BenchError
    from cakegen.paths import is_checkout

    if file is None and not is_checkout():
        raise BenchError("an installed package is not written; name a file with --out, and give it to `cakegen plan`")


def _check_export(measured: object, wanted: str, recorded: Path) -> None:
    from cakegen.errors import BenchError

    if measured != wanted:
        raise BenchError(f"{recorded}: measured export {measured!r}; the table is of {wanted!r}. Name it with --export")


def _measure(registry: Registry, rows: str, repeats: int | None, folder: Path) -> Path:
    """The bench's rows with its stock chains, without its chains of layers, rotation and host costs."""
    from cakegen.bench.measure import Settings
    from cakegen.bench.rows import DECODE_TOKENS, select_rows
    from cakegen.bench.session import Run, run_bench

    run = Run(
        select_rows(rows, DECODE_TOKENS),
        Settings(repeats=repeats, rotation=False),
        chains=False,
        host=False,
    )
    return run_bench(registry, run, folder, lambda line: click.echo(line, err=True))


def _own_file(table: MeasuredTable, export: str) -> Path:
    from cakegen.measured import measured_folder

    return measured_folder(export) / table.file_name


def _report(table: MeasuredTable, target: Path) -> None:
    from cakegen.bench.tune import describe_changes, describe_table
    from cakegen.errors import BenchError
    from cakegen.measured import read_table

    click.echo(table.title)
    for line in describe_table(table):
        click.echo(line)
    if not target.exists():
        return
    try:
        before = read_table(target)
    except BenchError as error:
        click.echo(f"the old table can't be compared with: {error}", err=True)
        return
    changes = list(describe_changes(before, table))
    click.echo(f"since {before.title}: {len(changes) or 'no'} rows changed")
    for line in changes:
        click.echo(line)
