"""The site: built strictly, every public name documented, nothing loaded from elsewhere; skipped without its extra."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from support.page_blocks import ROOT

import cakegen.emulator
import cakegen.runtime
from cakegen.cli.main import COMMANDS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("site")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; `make docs` does the same."""
    pytest.importorskip("mkdocstrings", reason="needs the extra `docs`")
    pytest.importorskip("material", reason="needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_command_is_in_the_reference(site: Path) -> None:
    text = unescape((site / "reference" / "cli.html").read_text("utf-8"))
    assert [name for name in COMMANDS if f"cakegen {name}" not in text] == []
    assert "--older-than" in text


@pytest.mark.parametrize(("module", "page"), [(cakegen.runtime, "runtime"), (cakegen.emulator, "emulator")])
def test_every_public_function_and_class_is_in_the_reference(site: Path, module: object, page: str) -> None:
    """What a package exports under a name in capitals is a tuple of words, and stands with what takes them."""
    text = (site / "reference" / f"{page}.html").read_text("utf-8")
    names = [name for name in module.__all__ if not name.isupper()]  # type: ignore[attr-defined]
    documented = set(re.findall(r'id="cakegen\.[\w.]*?(\w+)"', text))
    assert [name for name in names if name not in documented] == []


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    loaded = re.compile(r'<(?:script|img|iframe|source)[^>]*\ssrc="(?:https?:)?//|<link[^>]*\shref="(?:https?:)?//')
    assert [page.name for page in pages if loaded.search(page.read_text("utf-8"))] == []


def test_links_of_the_readme_lead_to_pages_of_the_site(site: Path) -> None:
    text = (site / "index.html").read_text("utf-8")
    links = {link.partition("#")[0] for link in re.findall(r'(?:href|src)="([^"]+)"', text)}
    local = {link for link in links if link and ":" not in link}
    assert {"serving.html", "CONTRIBUTING.html", "benchmarks/h200/ratio.png"} <= local
    assert [link for link in sorted(local) if not (site / link).exists()] == []
