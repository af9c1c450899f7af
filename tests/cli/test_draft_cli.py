"""`cakegen new`: what it writes parses, explains itself, and never takes another file's place."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cakegen import paths
from cakegen.cli.main import main
from cakegen.emit.reach import reached_keys
from cakegen.spec import parse_export


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_new_export_parses_reaches_programs_and_comments_every_line(tmp_path: Path) -> None:
    result = run("new", "mine", "--dest", tmp_path)
    file = tmp_path / "mine" / "export.toml"
    assert result.exit_code == 0, result.output
    assert f"`cakegen export {file} --dest DIR`" in result.output
    model = parse_export(file).to_model()
    assert model.name == "mine"
    assert len(reached_keys(model)) > 20
    lines = file.read_text().splitlines()
    assert len(lines) <= 45
    for number, line in enumerate(lines):
        if re.match(r"\w+ = |\[", line):
            block = lines[:number][::-1]
            above = next(each for each in block if not re.match(r"\w+ = |\[", each))
            assert above.startswith("# "), f"line {number + 1} is not explained"


def test_commented_rules_of_a_new_export_are_rules(tmp_path: Path) -> None:
    run("new", "mine", "--dest", tmp_path)
    file = tmp_path / "mine" / "export.toml"
    text = file.read_text()
    tail = text[text.index("# [hopper") :]
    file.write_text(text.replace(tail, tail.replace("# ", "")))
    assert tomllib.loads(file.read_text())["hopper"] == {"decode": {"max_stages": 10}}
    assert parse_export(file).to_model().hopper.decode.max_stages == 10  # type: ignore[union-attr]


def test_existing_export_stays(tmp_path: Path) -> None:
    file = tmp_path / "mine" / "export.toml"
    file.parent.mkdir()
    file.write_text("mine\n")
    result = run("new", "mine", "--dest", tmp_path)
    assert result.exit_code == 1
    assert result.stderr == f"cakegen: {file}: exists; edit it, or choose another name\n"
    assert file.read_text() == "mine\n"


@pytest.mark.parametrize("name", ["Mine", "1mine", "my-moe", "m" * 49, ""])
def test_name_that_can_not_prefix_a_file_is_refused(tmp_path: Path, name: str) -> None:
    result = run("new", name, "--dest", tmp_path)
    assert result.exit_code == 1
    assert "an export's name is a lower-case letter, then up to 47 of a-z, 0-9 and _" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_installed_package_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "is_checkout", lambda: False)
    result = run("new", "mine")
    assert result.exit_code == 1
    assert "never writes into its own folder; name one with --dest DIR" in result.stderr
