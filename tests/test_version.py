"""The version names the commit: of a checkout, of a distribution, or as it is told."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import cakegen
from cakegen.version import VERSION, find_commit, full_version


@pytest.fixture(autouse=True)
def no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CAKEGEN_COMMIT", raising=False)


def test_version_of_a_checkout_names_its_commit(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "a").write_text("1")
    for arguments in (["init", "-q"], ["add", "a"], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *arguments], check=True)
    commit = find_commit(tmp_path)
    assert commit is not None
    assert re.fullmatch("[0-9a-f]{40}", commit)
    (tmp_path / "a").write_text("2")
    assert find_commit(tmp_path) == f"{commit}+"


@pytest.mark.parametrize("place", ["COMMIT", "cakegen/_data/COMMIT"])
def test_distribution_without_git_tells_its_commit_by_a_file(tmp_path: Path, place: str) -> None:
    assert find_commit(tmp_path) is None
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("c0ffee\n")
    assert find_commit(tmp_path) == "c0ffee"


def test_checkout_that_git_can_not_read_has_no_commit(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    assert find_commit(tmp_path) is None


@pytest.mark.parametrize(
    ("commit", "version"),
    [
        ("c0ffee0123456789", "+gc0ffee012345"),
        ("c0ffee0123456789+", "+gc0ffee012345.changed"),
        ("my branch", "+gmy.branch"),
    ],
)
def test_version_has_the_commit_as_its_local_part(monkeypatch: pytest.MonkeyPatch, commit: str, version: str) -> None:
    monkeypatch.setenv("CAKEGEN_COMMIT", commit)
    assert full_version() == VERSION + version


def test_package_has_a_version_and_no_other_late_name() -> None:
    assert cakegen.__version__.startswith(VERSION)
    with pytest.raises(AttributeError, match="module 'cakegen' has no attribute 'absent'"):
        _ = cakegen.absent  # type: ignore[attr-defined]
