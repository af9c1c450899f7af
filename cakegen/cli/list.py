"""`cakegen list`: the logical keys of a generated tree, and what serves each. Imports cakegen inside functions."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from cakegen.cli.selection import select_keys, selected_by, take_selection

if TYPE_CHECKING:
    from cakegen.registry import Registry

_COLUMNS = ("key", "role", "architectures", "program", "what it is")


@click.command("list")
@selected_by
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, one line a key.")
def list_command(export: str, as_json: bool, **selection: Any) -> None:
    """Print logical keys of an export, and what serves each: a sentence a program.

    KEY is a logical key, a program's name, or a pattern of either; without one, every key. Without a terminal: columns
    parted by tabs.
    """
    from cakegen.registry import load_registry

    registry = load_registry(export)
    keys = select_keys(registry, take_selection(selection))
    lines: Iterable[str]
    if as_json:
        lines = (json.dumps(entry) for entry in _entries(registry, keys))
    elif sys.stdout.isatty():
        lines = _by_program(registry, keys)
    else:
        rows = (
            (e["key"], e["role"], ",".join(e["arches"]), e["program"], e["sentence"]) for e in _entries(registry, keys)
        )
        lines = ("\t".join(row) for row in (_COLUMNS, *rows))
    for line in lines:
        click.echo(line)
    if not as_json:
        click.echo(_summary(registry, keys, selection["arches"]))


def sentence_of(registry: Registry, name: str) -> str:
    """What a program is, in words: what its own text says below the warning not to edit it.

    Raises
    ------
    RegistryError
        The text can't be read.
    """
    lines = registry.read(registry.programs[name].kernel_source).splitlines()
    return lines[1].removeprefix("// ") if len(lines) > 1 and lines[1].startswith("// ") else ""


def _entries(registry: Registry, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    sentences: dict[str, str] = {}
    for key in keys:
        name = registry.kernels[key]
        program = registry.programs[name]
        if name not in sentences:
            sentences[name] = sentence_of(registry, name)
        arches = list(program.arches)
        yield {"key": key, "role": program.role, "arches": arches, "program": name, "sentence": sentences[name]}


def _by_program(registry: Registry, keys: Sequence[str]) -> Iterator[str]:
    """A sentence a program, wrapped, and below it its keys: a key has a line of its own and is never cut."""
    import shutil
    import textwrap

    columns = shutil.get_terminal_size().columns
    served: dict[str, list[str]] = {}
    for key in keys:
        served.setdefault(registry.kernels[key], []).append(key)
    for name, its_keys in served.items():
        program = registry.programs[name]
        said = f"{sentence_of(registry, name) or program.role} ({', '.join(program.arches)})"
        yield from textwrap.wrap(said, columns, subsequent_indent="  ")
        yield from (f"  {key}" for key in its_keys)


def _summary(registry: Registry, keys: Sequence[str], arches: Sequence[str]) -> str:
    programs = len({registry.kernels[key] for key in keys})
    return f"{len(keys)} keys, {programs} programs{' for ' + ', '.join(arches) if arches else ''} in {registry.export}"
