"""The hook, the workflow and the documentation name commands and options that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import click
import pytest

from cakegen.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
FILES = (".pre-commit-hooks.yaml", "docs/ci/review.yml", "docs/review.md")
COMMAND = re.compile(r"^\s*(?:entry: |\$ |.*exec )?cakegen ([a-z].*?)\s*(?:#.*)?$", re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    return [(file, words) for file in FILES for words in COMMAND.findall((ROOT / file).read_text())]


@pytest.mark.parametrize(("file", "words"), commands())
def test_command_of_a_ci_file_is_understood(file: str, words: str) -> None:
    name, *arguments = words.replace('"$BASE"', "main").split()
    with click.Context(main) as context:
        command = main.get_command(context, name)
        assert command is not None
        assert command.make_context(name, arguments, parent=context).params


def test_each_ci_file_holds_a_command() -> None:
    assert {file for file, _ in commands()} == set(FILES)


def test_hook_runs_where_generated_programs_can_change() -> None:
    (pattern,) = re.findall(r"files: (\S+)", (ROOT / ".pre-commit-hooks.yaml").read_text())
    for folder in ("exports/a/export.toml", "templates/device/math.cuh", "generated/a/cake_jit.py"):
        assert re.search(pattern, folder)
        assert (ROOT / folder.split("/")[0]).is_dir()
    assert not re.search(pattern, "docs/exports/review.md")


@pytest.mark.parametrize("attribute", ["linguist-generated", "gitlab-generated"])
def test_hosts_fold_generated_files_and_no_others(attribute: str) -> None:
    def value(path: str) -> str:
        command = ["git", "-C", str(ROOT), "check-attr", attribute, "--", path]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(": ")[-1].strip()

    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    assert value("generated/tiny_latent_moe/cake_jit.py") == "true"
    assert value("cakegen/registry.py") == "unspecified"
