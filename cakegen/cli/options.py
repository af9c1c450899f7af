"""Refuses options that were given and would change nothing. Imports click only."""

from __future__ import annotations

import click
from click.core import ParameterSource


def refuse_ignored(why: str, *names: str) -> None:
    """Refuse options of the running command that its command line gave, though another option leaves them no effect.

    Parameters
    ----------
    why
        What the refusal says behind the option.
    names
        Parameters, as the command's function names them.

    Raises
    ------
    click.UsageError
        One of them was given.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if given and parameter.name in names:
            shown = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.make_metavar(context)
            raise click.UsageError(f"{shown} {why}")
