"""`cakegen completion`: what a shell needs to complete commands, options, keys, exports and targets. Imports click."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print a script that completes commands, options, keys, exports and targets.

    \b
    bash: add to ~/.bashrc            eval "$(cakegen completion bash)"
    zsh:  add to ~/.zshrc             eval "$(cakegen completion zsh)"
    fish: write to ~/.config/fish/completions/cakegen.fish
    """
    completion = get_completion_class(shell)
    assert completion is not None, "click completes these shells"
    click.echo(completion(ctx.find_root().command, {}, "cakegen", "_CAKEGEN_COMPLETE").source())
