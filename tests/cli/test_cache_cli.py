"""`cakegen cache list`, `verify` and `prune`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.compile.sources import PLAIN_REQUEST

from cakegen.cli.cache import parse_size
from cakegen.cli.main import main
from cakegen.compile import cached_cubin


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of two entries."""
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", str(tmp_path))
    for scale in (1, 2):
        cached_cubin(replace(PLAIN_REQUEST, constants=(("SCALE", scale),)))
    return tmp_path


def cache(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["cache", *arguments])


def test_list_prints_a_row_an_entry_and_the_sum(folder: Path) -> None:
    head, *rows, last = cache("list").output.splitlines()
    assert head.split("\t")[:2] == ["key", "program"]
    files = {path.stem[:12]: path for path in folder.rglob("*.cubin")}
    assert {row.split("\t")[0] for row in rows} == set(files)
    assert {tuple(row.split("\t")[i] for i in (1, 2, 6)) for row in rows} == {("plain", "sm_90a", "whole")}
    total = sum(path.stat().st_size for path in files.values())
    assert last == f"2 entries, {total} bytes in {folder}"


def test_list_as_json_is_one_object_a_line(folder: Path) -> None:
    entries = [json.loads(line) for line in cache("list", "--json").output.splitlines()]
    assert {entry["path"] for entry in entries} == {str(path) for path in folder.rglob("*.cubin")}
    assert {entry["fault"] for entry in entries} == {""}


def test_verify_fails_on_a_damaged_entry_until_it_is_removed(folder: Path) -> None:
    assert cache("verify").exit_code == 0
    damaged = next(folder.rglob("*.cubin"))
    damaged.write_bytes(b"")
    result = cache("verify")
    assert result.exit_code == 1
    assert f"{damaged}: damaged" in result.stderr
    assert "2 entries" in result.stdout
    assert "1 damaged" in result.stdout
    assert cache("verify", "--remove").exit_code == 0
    assert not damaged.exists()
    assert "1 entries" in cache("verify").stdout


def test_prune_says_and_does_what_is_asked(folder: Path) -> None:
    sizes = sum(path.stat().st_size for path in folder.rglob("*.cubin"))
    assert cache("prune", "--max-size", "0", "--dry-run").output.startswith(f"would remove 2 files, {sizes} bytes")
    assert cache("prune", "--older-than", "1").output.startswith("removed 0 files, 0 bytes")
    assert cache("prune", "--max-size", "0").output.startswith(f"removed 2 files, {sizes} bytes")
    assert list(folder.rglob("*.cubin")) == []


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("1500", 1500), ("2K", 2048), ("3m", 3 * 2**20), (" 1G ", 2**30)])
def test_size_is_read_with_its_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1.5G", "2T", "lots", "9" * 16, "½K"])
def test_size_that_is_none_is_refused(folder: Path, text: str) -> None:
    result = cache("prune", "--max-size", text)
    assert result.exit_code == 2
    assert "is no size" in result.stderr


def test_age_that_is_no_number_is_refused(folder: Path) -> None:
    result = cache("prune", "--older-than", "nan")
    assert result.exit_code == 2
    assert "nan is no number of days" in result.stderr
    assert len(list(folder.rglob("*.cubin"))) == 2


def test_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CAKEGEN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    result = cache("list")
    assert result.exit_code == 1
    assert "has no home" in result.stderr
    assert "Set CAKEGEN_CACHE_DIR" in result.stderr
