"""The `cakegen` command. Each command's module is imported only when it is asked for, so none can break another."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import click

from cakegen.cli.names import nearest

COMMANDS = {
    "new": "cakegen.cli.draft:draft_command",
    "export": "cakegen.cli.export:export_command",
    "list": "cakegen.cli.list:list_command",
    "show": "cakegen.cli.show:show_command",
    "plan": "cakegen.cli.plan:plan_command",
    "compile": "cakegen.cli.compile:compile_command",
    "diff": "cakegen.cli.diff:diff_command",
    "bundle": "cakegen.cli.bundle:bundle_command",
    "cache": "cakegen.cli.cache:cache_command",
    "emulate": "cakegen.cli.emulate:emulate_command",
    "predict": "cakegen.cli.predict:predict_command",
    "mutate": "cakegen.cli.mutate:mutate_command",
    "bench": "cakegen.cli.bench:bench_command",
    "tune": "cakegen.cli.tune:tune_command",
    "docs": "cakegen.cli.docs:docs_command",
    "doctor": "cakegen.cli.doctor:doctor_command",
    "demo": "cakegen.cli.demo:demo_command",
    "completion": "cakegen.cli.completion:completion_command",
}


class LazyGroup(click.Group):
    """A group whose commands are names of objects; errors of cakegen become one message and exit status 1."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, in the order of a first session."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; where a package is missing, a command that says so."""
        if cmd_name not in COMMANDS:
            if ctx.resilient_parsing:
                return None
            raise click.UsageError(
                f"no command {cmd_name!r}{nearest(cmd_name, COMMANDS)}; {ctx.command_path} -h lists all"
            )
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        try:
            command = getattr(import_module(module), attribute)
        except ImportError as error:
            return _unavailable(cmd_name, str(error))
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; the user sees an error's message, never its traceback."""
        from cakegen.errors import CakeError

        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # who reads our output has enough; click ends quietly
        except (CakeError, ImportError, OSError) as error:
            click.echo(f"cakegen: {_words(error)}", err=True)
            ctx.exit(1)


def _words(error: Exception) -> str:
    """An error's message; of a file, its name and what is wrong with it."""
    from cakegen.visible import visible

    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return f"this needs the package {package}, which is not installed. Install it; `cakegen doctor` looks for more."
    if isinstance(error, OSError) and error.filename and error.strerror:
        return visible(f"{os.fsdecode(error.filename)}: {error.strerror}")
    return visible(str(error), "\n\t")


def _unavailable(name: str, reason: str) -> click.Command:
    def refuse() -> None:
        raise click.ClickException(f"`cakegen {name}` can't be loaded: {reason}. Install what it needs.")

    # whatever else the line says, the reason is the answer
    lenient = {"ignore_unknown_options": True, "allow_extra_args": True}
    summary = f"(can't be loaded: {reason})"
    return click.Command(name, lenient, callback=refuse, help=summary, add_help_option=False)


def _print_version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    from cakegen import __version__

    if wanted and not ctx.resilient_parsing:
        click.echo(__version__)
        ctx.exit()


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print it and exit."
)
def main() -> None:
    """Declared shapes in; readable GPU programs, and their launches, out."""


if __name__ == "__main__":
    main(prog_name="cakegen")
