"""`cakegen docs`: every page that the package speaks of can be read without a checkout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import cakegen
from cakegen import paths
from cakegen.cli.main import main

PACKAGE = Path(cakegen.__file__).parent


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["docs", *arguments])
    return result.exit_code, result.output


def test_every_page_is_listed_with_its_heading_and_printed_as_it_is() -> None:
    files = sorted(paths.docs_root().glob("*.md"))
    code, listed = run()
    assert code == 0
    assert [line.split()[0] for line in listed.splitlines()] == [file.stem for file in files]
    assert re.search(r"^cache +The compile cache$", listed, re.MULTILINE)
    for name in ("cache", "docs/cache.md"):
        assert run(name) == (0, (paths.docs_root() / "cache.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("name", "hint"), [("serv", "did you mean serving?"), ("zzz", "`cakegen docs` lists them")])
def test_unknown_page_names_the_nearest_or_the_list(name: str, hint: str) -> None:
    code, output = run(name)
    assert code == 2
    assert f"there is no page '{name}'; {hint}" in output


def test_pages_that_the_package_names_are_there() -> None:
    texts = [file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"(?:`cakegen docs |docs/)([\w-]+)(?:`|\.md)", text)}
    assert {"emulate-launch", "mutation", "keys"} <= named
    assert [name for name in sorted(named) if not (paths.docs_root() / f"{name}.md").is_file()] == []
