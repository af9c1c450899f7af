"""`cakegen list`: the logical keys of a generated tree. Imports cakegen inside functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from cakegen.registry import Registry

_COLUMNS = ("key", "role", "architectures", "program")


@click.command("list")
@click.option("--export", "export", default="kimi_k3_latent_moe", show_default=True, help="Export, or a tree's folder.")
@click.option("--arch", help="Only keys that this target reaches, e.g. sm_90a.")
def list_command(export: str, arch: str | None) -> None:
    """Print every logical key of an export, and the program that serves it."""
    from cakegen.arch import architecture
    from cakegen.registry import load_registry

    registry = load_registry(export)
    if arch is not None:
        architecture(arch)
    rows = list(_rows(registry, arch))
    _show(rows)
    programs = len({row[-1] for row in rows})
    click.echo(f"{len(rows)} keys, {programs} programs{f' for {arch}' if arch else ''} in {registry.export}")


def _rows(registry: Registry, arch: str | None) -> Iterator[tuple[str, ...]]:
    for key, name in registry.kernels.items():
        program = registry.programs[name]
        if arch is None or arch in program.arches:
            yield key, program.role, ",".join(program.arches), name


def _show(rows: Sequence[tuple[str, ...]]) -> None:
    """A table on a terminal, else columns parted by tabs."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        for row in (_COLUMNS, *rows):
            click.echo("\t".join(row))
        return
    table = Table(*_COLUMNS)
    for row in rows:
        table.add_row(*row)
    console.print(table)
