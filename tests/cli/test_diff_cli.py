"""`cakegen diff` over a repository of small trees."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.review.trees import EXPORT, commit_all, git, small_programs, write_small_tree

from cakegen import paths
from cakegen.cli.main import main


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`repository/generated`: one commit with a small tree, and a change of one program that is not committed."""
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "repository" / "generated"
    folder.mkdir(parents=True)
    git(folder.parent, "init", "-q", "-b", "main")
    write_small_tree(folder, small_programs())
    commit_all(folder.parent, "first")
    first, *others = small_programs()
    write_small_tree(folder, [replace(first, stages=8), *others])
    return folder


def diff(trees: Path, *arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["diff", "--trees", str(trees), *(str(argument) for argument in arguments)])


def test_diff_compares_head_with_the_working_tree(trees: Path) -> None:
    result = diff(trees)
    assert result.exit_code == 0, result.output
    assert "generated programs: HEAD (" in result.output
    assert "small: 1 changed, 0 added, 0 removed, 2 unchanged" in result.output
    assert "0 of 1 touched programs compile to the same machine code, byte by byte; NVRTC" in result.output


def test_diff_tells_of_its_progress_in_a_pipe(trees: Path) -> None:
    result = diff(trees)
    assert "compiled 1 of 2 programs\ncompiled 2 of 2 programs\n" in result.stderr


def test_diff_of_some_keys_compares_and_compiles_those_alone(trees: Path) -> None:
    first, second, norm = small_programs()
    write_small_tree(trees, [replace(first, stages=8), replace(second, stages=8), replace(norm, key="norm:e9")])
    result = diff(trees, "front:g2*", "norm:e0")
    assert result.exit_code == 0, result.output
    assert "-> working tree, keys front:g2* norm:e0\n" in result.output
    # the removed key, and the added one that replaces it
    assert "small: 1 changed, 1 added, 1 removed, 0 unchanged" in result.output
    assert re.search(r"\d of 3 touched programs", result.output)
    assert first.key not in result.output
    refused = diff(trees, "front:g2*", "front:h*")
    assert refused.exit_code == 1
    assert "'front:h*' matches none of the 4 keys of both sides; `cakegen list` prints them" in refused.stderr


def test_diff_after_a_commit_is_clean_and_against_the_commit_before_is_not(trees: Path) -> None:
    commit_all(trees.parent, "second")
    assert "0 changed" in diff(trees).output
    assert "1 changed" in diff(trees, "--base", "HEAD~1").output
    assert "1 changed" in diff(trees, "--base", "HEAD~1", "--merge-base").output


def test_diff_without_compiling_needs_no_compiler(trees: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAKEGEN_NVRTC", str(trees / "none.so"))
    refused = diff(trees)
    assert refused.exit_code == 1
    assert "none.so" in refused.stderr
    result = diff(trees, "--no-compile")
    assert result.exit_code == 0
    assert "nothing was compiled" in result.output


@pytest.mark.parametrize(
    ("style", "begins"), [("html", "<!doctype html>"), ("markdown", "### "), ("text", "generated")]
)
def test_diff_writes_each_format_to_a_file(trees: Path, tmp_path: Path, style: str, begins: str) -> None:
    out = tmp_path / "to" / "review"
    result = diff(trees, "--no-compile", "--format", style, "--out", out)
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert result.stderr == f"written: {out}\n"
    assert out.read_text().startswith(begins)
    assert out.read_text() == diff(trees, "--no-compile", "--format", style).output


def test_diff_limits_its_markdown(trees: Path) -> None:
    assert len(diff(trees, "--no-compile", "--format", "markdown", "--limit", "1000").output) <= 1000


def test_diff_shows_one_export_of_several(trees: Path) -> None:
    shutil.copytree(trees / EXPORT, trees / "second")
    assert "second: 0 changed, 3 added" in diff(trees, "--no-compile").output
    only = diff(trees, "--no-compile", "--export", EXPORT).output
    assert "small: " in only
    assert "second: " not in only


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--base", "nowhere"), "'nowhere' names no commit ("),
        (("--export", "large"), "no tree 'large' on either side; there is: small"),
        (("--no-compile", "--out", "/proc/none/review.html"), "/proc/none/review.html: can't be written"),
    ],
)
def test_diff_refuses_with_one_message(trees: Path, arguments: tuple[str, ...], message: str) -> None:
    result = diff(trees, *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("cakegen: ")
    assert message in result.stderr


def test_diff_of_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = diff(tmp_path / "none")
    assert result.exit_code == 1
    assert "none: no such folder" in result.stderr


def test_installed_package_has_no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "is_checkout", lambda: False)
    result = CliRunner().invoke(main, ["diff"])
    assert result.exit_code == 1
    assert "--trees DIR" in result.stderr
