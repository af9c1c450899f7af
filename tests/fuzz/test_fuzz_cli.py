"""Any words on the command line: usage, a message or a result, and never a traceback."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz.strategies import fuzzed, odd_texts

from cakegen import paths
from cakegen.cli.main import COMMANDS, main
from cakegen.emit import reach

# these measure, or run for minutes; their options are parsed by the same rules
SLOW = ("bench", "demo", "emulate", "tune")
NAMES = sorted(set(COMMANDS) - set(SLOW))
WORDS = (
    "tiny_latent_moe",
    "sm_90a",
    "sm_103a",
    "front",
    "tail",
    "8",
    "0",
    "-1",
    "1:4",
    "9" * 30,
    "tail_norm:e0@sm_90a",
)
# a real command line holds no NUL
words = st.one_of(st.sampled_from(WORDS), odd_texts).filter(lambda text: "\x00" not in text)


def options_of(command: click.Command) -> list[str]:
    return [name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts) if name]


@st.composite
def command_lines(draw: st.DrawFn, name: str) -> list[str]:
    """A command, some of its options, and words that may or may not be their values."""
    with click.Context(main) as context:
        command = main.get_command(context, name)
    assert command is not None
    names = [option for option in options_of(command) if option.startswith("-")]
    found = [name]
    if isinstance(command, click.Group):
        found.append(draw(st.sampled_from(sorted(command.commands))))
        names = [option for each in command.commands.values() for option in options_of(each) if option.startswith("-")]
    for _ in range(draw(st.integers(0, 4))):
        found.append(draw(st.sampled_from(names)) if names and draw(st.booleans()) else draw(words))
    return found


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder and cache, no compiler, and no checkout, into which `cakegen new tail` would write.

    Where a command looks at all plans, they are the first thousand: what it says of the others, its own tests hold.
    """
    every_plan = reach.reached_plans
    monkeypatch.setattr(reach, "reached_plans", lambda model: itertools.islice(every_plan(model), 1000))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "is_checkout", lambda: False)
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CAKEGEN_NVRTC", str(tmp_path / "none.so"))
    return tmp_path


@pytest.mark.parametrize("name", [name for name in NAMES if name != "export"])
@fuzzed
@given(drawn=st.data())
def test_any_words_end_in_a_status_and_no_traceback(drawn: st.DataObject, nowhere: Path, name: str) -> None:
    arguments = drawn.draw(command_lines(name))
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code in (0, 1, 2), arguments
    assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exception)
    assert "Traceback" not in result.output


@pytest.mark.parametrize("name", SLOW)
@fuzzed
@given(option=st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=8))
def test_unknown_option_of_a_slow_command_is_refused(nowhere: Path, name: str, option: str) -> None:
    result = CliRunner().invoke(main, [name, f"--unknown{option}"])
    assert result.exit_code == 2
    assert "No such option" in result.stderr


@fuzzed
@given(text=st.one_of(words, st.text(st.characters(exclude_characters="\x00"), max_size=12)))
def test_any_name_of_an_export_or_a_tree_is_found_or_refused(nowhere: Path, text: str) -> None:
    for arguments in (["export", text, "--check", "--dest", "trees"], ["list", "--export", text]):
        if text in os.listdir(nowhere) or (arguments[0] == "export" and text == "tiny_latent_moe"):
            continue
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code in (0, 1, 2), arguments
        assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exception)


def test_mutants_of_an_architecture_that_is_not_exported_are_refused(nowhere: Path) -> None:
    result = CliRunner().invoke(main, ["mutate", "--arch", "sm_80", "--choose"])
    assert result.exit_code == 1
    assert result.stderr == "cakegen: tiny_latent_moe is not exported for 'sm_80'; it is for sm_90a, sm_100a, sm_103a\n"
