"""The pages are true: their code runs and prints what they say, their commands parse, their links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from support.page_blocks import ROOT, copy_checkout, missing_lines, needs_git, read_blocks, run_blocks

from cakegen.cli.main import main

PAGES = sorted(
    page
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
    if page.is_file()
)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def runnable(page: Path) -> Any:
    """A page as a test's parameter; those that begin a repository, or change this one, need git."""
    marks = needs_git if page.parent == ROOT or "git " in page.read_text("utf-8") else ()
    return pytest.param(page, marks=marks, id=name_of(page))


# pages of commands; Python of the README and of the serving page has tests of its own
RUN = [runnable(page) for page in PAGES if any(block.language == "sh" for block in read_blocks(page))]
CODE = re.compile(r"^```.*?^```$|`[^`]+`", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\S*[>$] )?(?:\w+=\S+ )*cakegen ([a-z].*)$")


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_page_runs_and_prints_what_it_says(page: Path, tmp_path: Path) -> None:
    if page.parent != ROOT:
        run_blocks(page, tmp_path)
        return
    # the README's commands change the checkout that they are in
    copy_checkout(tmp_path)
    run_blocks(page, tmp_path, tmp_path)


def commands() -> list[tuple[str, str]]:
    """Every `cakegen …` line of a code block of a page."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```\w*[ \w]*\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            found += [(name_of(page), words[1]) for line in lines if (words := COMMAND.match(line))]
    return found


@pytest.mark.parametrize(("page", "words"), commands())
def test_command_of_a_page_is_understood(page: str, words: str) -> None:
    """Options, choices and counts of arguments; whether a file exists is the reader's."""
    group: click.Command | None = main
    context = click.Context(main)
    arguments = shlex.split(re.sub(r"\[(--[\w-]+)\]", r"\1", words), comments=True)
    while isinstance(group, click.Group):
        group = group.get_command(context, arguments.pop(0))
    assert group is not None
    try:
        group.make_context(group.name, arguments, parent=context)
    except click.BadParameter as error:
        if error.param is None or not isinstance(error.param.type, click.Path):
            raise


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    text = CODE.sub("", page.read_text("utf-8"))
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if ":" not in link]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


def test_tests_that_pages_name_are_there() -> None:
    named = {
        (name_of(page), *words)
        for page in PAGES
        for words in re.findall(r"`([\w/]+\.py)::(\w+)`", page.read_text("utf-8"))
    }
    assert len(named) > 50
    absent = []
    for page, file, test in sorted(named):
        path = ROOT / "tests" / file
        if not path.is_file() or not re.search(rf"^def {test}\(", path.read_text("utf-8"), re.MULTILINE):
            absent.append(f"{page}: {file}::{test}")
    assert absent == []


@pytest.mark.parametrize("page", [page for page in PAGES if "benchmarks" not in page.parts], ids=name_of)
def test_lines_of_a_page_fit_120_columns(page: Path) -> None:
    """Tables excepted: a row is a line."""
    lines = page.read_text("utf-8").splitlines()
    assert [number for number, line in enumerate(lines, 1) if len(line) > 120 and not line.startswith("|")] == []


def test_missing_lines_are_found_and_their_order_counts() -> None:
    assert list(missing_lines("a … c\nd\te\n", "x\na b c\n  d  e\n")) == []
    assert list(missing_lines("d\na … c\n", "a b c\nd\n")) == ["a … c"]
    assert list(missing_lines("a … c\n", "a b d\n")) == ["a … c"]
