"""One selector for every command, names that are completed and suggested, and keys that no terminal cuts."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from cakegen.cli.main import COMMANDS, main
from cakegen.cli.selection import Selection, select_keys
from cakegen.cli.table import fitted_lines
from cakegen.registry import load_registry

TINY = "tiny_latent_moe"
SELECTING = ("list", "show", "compile", "emulate", "diff", "bundle", "mutate")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def complete(*words: str) -> list[str]:
    *before, incomplete = words
    return [item.value for item in ShellComplete(main, {}, "cakegen", "_").get_completions(list(before), incomplete)]


@pytest.mark.parametrize("name", SELECTING)
def test_every_command_takes_the_selector(name: str) -> None:
    command = main.get_command(click.Context(main), name)  # type: ignore[attr-defined]
    assert command is not None
    options = {option for parameter in command.params for option in parameter.opts}
    assert {"--stage", "--tp", "--tokens", "--arch"} <= options
    assert options & {"key", "keys"}


def test_a_request_selects_the_keys_that_it_launches() -> None:
    result = run(
        "list", "--export", TINY, "--stage", "front", "--tp", "8", "--tokens", "200", "--arch", "sm_90a", "--json"
    )
    assert result.exit_code == 0, result.output
    keys = [json.loads(line)["key"] for line in result.stdout.splitlines()]
    planned = run("plan", "--export", TINY, "--stage", "front", "--tp", "8", "--tokens", "200", "--json")
    launched = [launch["key"] for launch in json.loads(planned.stdout)["launches"]]
    assert set(launched) <= set(keys)
    assert 0 < len(keys) < 10


def test_a_pattern_narrows_what_requests_select() -> None:
    registry = load_registry(TINY)
    both = select_keys(registry, Selection(("decode:tail*",), "tail", 8, "1:16", ("sm_90a",)))
    alone = select_keys(registry, Selection((), "tail", 8, "1:16", ("sm_90a",)))
    assert set(both) == {key for key in alone if key.startswith("decode:tail")}
    assert set(both) < set(alone)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lst",), "no command 'lst'; the nearest: list"),
        (("list", "--export", TINY, "front:i12x"), "no key or program matches 'front:i12x'; the nearest: front:i128"),
        (
            ("list", "--export", TINY, "--tp", "3", "--tokens", "4"),
            "launched for --tp 3 --tokens 4; it is exported for TP",
        ),
        (("list", "--export", "tiny_latent_mo"), "the nearest: tiny_latent_moe"),
        (("plan", "--stage", "tail", "--tp", "8", "--tokens", "4", "--arch", "sm_90"), "sm_90a"),
        (("show", "--export", TINY), "give KEYs, or --stage, --tp, --tokens or --arch"),
        (("diff", "--export", "tiny_latent_mo"), "the nearest: tiny_latent_moe"),
        (("export", "tiny_latent_mo"), "tiny_latent_moe"),
    ],
)
def test_a_name_that_is_not_known_is_refused_with_the_nearest(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code in (1, 2)
    assert message in result.stderr


def test_list_says_what_each_program_is() -> None:
    result = run("list", "--export", TINY, "front:i128@sm_90a")
    assert result.stdout.splitlines()[1].split("\t")[-1].startswith("front prefill GEMM: ")


def test_show_as_json_holds_rules_and_bytes() -> None:
    result = run("show", "--export", TINY, "front:i128@sm_90a", "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert shown["launch"]["dynamic_smem_bytes"] > 100_000
    assert {"field", "value", "reason"} == set(shown["rules"][0])
    assert shown["keys"].keys() == {"front:i128@sm_90a"}
    assert shown["requests"][0].startswith("front TP 8")


@pytest.mark.parametrize("name", [*COMMANDS, ""])
def test_short_help_is_help(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [name] if name else []
    # click remembers a command's help option, also of a test that ran the command outside the group
    command = main.get_command(click.Context(main), name) if name else main  # type: ignore[attr-defined]
    monkeypatch.setattr(command, "_help_option", None)
    assert run(*words, "-h").output == run(*words, "--help").output != ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_of_each_shell(shell: str) -> None:
    result = run("completion", shell)
    assert result.exit_code == 0, result.output
    assert f"_CAKEGEN_COMPLETE={shell}_complete" in result.stdout


def test_commands_keys_exports_and_targets_are_completed() -> None:
    assert complete("l") == ["list"]
    assert "front:i128@sm_90a" in complete("show", "--export", TINY, "front:i128")
    assert complete("show", "--export", TINY, "front:i128@sm_9") == ["front:i128@sm_90a"]
    assert complete("show", "--export", "./nowhere", "front") == []
    assert complete("list", "--export", "tiny") == [TINY]
    assert complete("list", "--arch", "sm_9") == ["sm_90a"]


def in_terminal(columns: int, *arguments: str) -> str:
    """What a command prints on a terminal of so many columns."""
    parent, child = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-m", "cakegen", *arguments], stdout=child, stderr=subprocess.DEVNULL, env=environment
    )
    os.close(child)
    chunks = []
    while True:
        try:
            chunk = os.read(parent, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(parent)
    assert process.wait() == 0
    return b"".join(chunks).decode().replace("\r\n", "\n")


def test_list_in_80_columns_cuts_no_key() -> None:
    registry = load_registry()
    shown = in_terminal(80, "list").splitlines()
    assert {line[2:] for line in shown if line[2:] in registry.kernels} == set(registry.kernels)
    assert all(len(line) <= 80 or line[2:] in registry.kernels for line in shown)


def test_compile_in_80_columns_cuts_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", str(tmp_path))
    key = max((key for key in load_registry(TINY).kernels if key.startswith("decode:front")), key=len)
    text = in_terminal(80, "compile", "--export", TINY, key)
    assert any(line.split()[-1:] == [key] for line in text.splitlines())
    assert "registers" in text
    table = text.splitlines()[:-1]
    assert all(len(line) <= 80 or line.strip() == key for line in table)


def test_columns_that_matter_less_go_and_the_last_cell_stands_whole() -> None:
    columns, rows = ("a", "registers", "ms", "keys"), [("1", "168", "20", "decode:key")]
    assert list(fitted_lines(columns, rows, 80, ("ms", "a"))) == [
        "a  registers  ms  keys",
        "1  168        20  decode:key",
    ]
    assert list(fitted_lines(columns, rows, 24, ("ms", "a"))) == ["a  registers  keys", "1  168        decode:key"]
    assert list(fitted_lines(columns, rows, 12, ("ms", "a"))) == ["registers", "  keys", "168", "  decode:key"]
