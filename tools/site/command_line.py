"""The reference of the command line, as Markdown: what `--help` says, read from the commands themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click


def describe_commands(group: click.Group, name: str) -> str:
    """A section for each command of a group, and of its groups, in their own order."""
    context = click.Context(group, info_name=name)
    return "\n".join(line for command in _commands(group, context) for line in _section(*command))


def _commands(group: click.Group, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        own = click.Context(command, info_name=name, parent=context)
        yield command, own
        if isinstance(command, click.Group):
            yield from _commands(command, own)


def _section(command: click.Command, context: click.Context) -> Iterator[str]:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield from (f"## {context.command_path}", "", "```", usage, "```", "")
    yield from (_prose(inspect.cleandoc(command.help or "")), "")
    options = [option for option in command.params if isinstance(option, click.Option)]
    rows = [record for option in options if (record := option.get_help_record(context))]
    if rows:
        yield from ("| option | meaning |", "| --- | --- |")
        yield from (f"| <code>{_cell(names)}</code> | {_cell(meaning)} |" for names, meaning in rows)
        yield ""


def _prose(text: str) -> str:
    """Text as it stands: nothing in it is markup, but for names in backquotes."""
    pieces = text.split("`")
    pieces[::2] = (re.sub(r"([&<*_\[])", lambda match: f"&#{ord(match[0])};", piece) for piece in pieces[::2])
    return "`".join(pieces)


def _cell(text: str) -> str:
    return _prose(" ".join(text.split())).replace("|", "&#124;")
