"""`cakegen cache`: what is compiled already, whether it is whole, what can go. Imports cakegen inside functions."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from cakegen.compile.inventory import CacheEntry

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_COLUMNS = ("key", "program", "target", "compiler", "bytes", "last used", "state")
_KEY_DIGITS = 12


@click.group("cache")
def cache_command() -> None:
    """Look into the folder of compiled programs, verify it, or make it smaller."""


@cache_command.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object an entry.")
def list_command(as_json: bool) -> None:
    """Print every entry, those used last first."""
    import json

    from cakegen.compile import cache_root
    from cakegen.compile.inventory import list_files, read_entries

    entries = read_entries(list_files())
    if as_json:
        for entry in entries:
            click.echo(json.dumps(entry_literal(entry)))
        return
    for row in (_COLUMNS, *(_row(entry) for entry in entries)):
        click.echo("\t".join(row))
    total_bytes = sum(entry.file.size_bytes for entry in entries)
    click.echo(f"{len(entries)} entries, {total_bytes} bytes in {cache_root()}")


@cache_command.command("verify")
@click.option("--remove", is_flag=True, help="Remove damaged entries; they are compiled again when they are needed.")
def verify_command(remove: bool) -> None:
    """Read every entry whole. Exit status 1: some are damaged.

    A damaged entry does no harm: it is never loaded, and is compiled again at its next use.
    """
    from cakegen.compile import cache_root
    from cakegen.compile.inventory import list_files, read_entries, remove_files

    entries = read_entries(list_files())
    damaged = [entry for entry in entries if entry.fault]
    for entry in damaged:
        click.echo(f"{entry.file.path}: {entry.fault}", err=True)
    if remove:
        remove_files(damaged)
    done = " and removed" if remove and damaged else ""
    click.echo(f"{len(entries)} entries in {cache_root()}: {len(damaged)} damaged{done}")
    if damaged and not remove:
        raise click.exceptions.Exit(1)


@cache_command.command("prune")
@click.option("--older-than", "days", type=click.FloatRange(min=0), help="Remove entries not used for so many days.")
@click.option("--max-size", metavar="BYTES|K|M|G", help="Remove entries used longest ago until the rest fits.")
@click.option("--dry-run", is_flag=True, help="Remove nothing; say what would go.")
def prune_command(days: float | None, max_size: str | None, dry_run: bool) -> None:
    """Remove entries of other versions and leftovers of killed processes; by age and size too where asked."""
    from cakegen.compile import cache_root
    from cakegen.compile.inventory import prune_cache

    if days is not None and math.isnan(days):
        raise click.BadParameter("nan is no number of days", param_hint="--older-than")
    most_bytes = None if max_size is None else parse_size(max_size)
    pruned = prune_cache(older_than_days=days, most_bytes=most_bytes, dry_run=dry_run)
    verb = "would remove" if dry_run else "removed"
    click.echo(f"{verb} {pruned.files} files, {pruned.size_bytes} bytes from {cache_root()}")


def parse_size(text: str) -> int:
    """`1500000`, `512K`, `100M` or `2G` as bytes.

    Raises
    ------
    click.BadParameter
        It is none of these.
    """
    found = re.fullmatch(r"([0-9]{1,15})([KMG]?)", text.strip().upper())
    if found is None:
        raise click.BadParameter(f"{text!r} is no size; write bytes, or 512K, 100M, 2G", param_hint="--max-size")
    return int(found[1]) * _UNITS[found[2]]


def entry_literal(entry: CacheEntry) -> dict[str, object]:
    """An entry as the JSON object of `--json`."""
    return {
        "key": entry.file.key,
        "path": str(entry.file.path),
        "program": entry.name,
        "arch": entry.arch,
        "compiler": entry.compiler,
        "bytes": entry.file.size_bytes,
        "used_at": entry.file.used_at,
        "current": entry.file.current,
        "fault": entry.fault,
    }


def _row(entry: CacheEntry) -> tuple[str, ...]:
    from datetime import UTC, datetime

    used = datetime.fromtimestamp(entry.file.used_at, UTC).strftime("%Y-%m-%d %H:%M")
    state = "damaged" if entry.fault else "whole" if entry.file.current else "of another version"
    size = str(entry.file.size_bytes)
    return (
        entry.file.key[:_KEY_DIGITS],
        entry.name or "-",
        entry.arch or "-",
        entry.compiler or "-",
        size,
        used,
        state,
    )
