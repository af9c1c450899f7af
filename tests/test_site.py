"""The site: built strictly, every public name documented, nothing loaded from elsewhere; skipped without its extra."""

from __future__ import annotations

import json
import os
import re
import shutil
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


MEASURE = """
<body><script>
const cut = [], wait = ms => new Promise(done => setTimeout(done, ms))
async function open(page, width) {
  const frame = document.createElement("iframe")
  frame.style.width = width + "px"; frame.style.height = "900px"
  frame.src = page
  const loaded = new Promise(done => frame.onload = done)
  document.body.append(frame)
  await loaded
  return frame
}
async function run(pages, widths) {
  for (const width of widths) for (const page of pages) {
    const frame = await open(page, width), inner = frame.contentDocument
    const parts = [inner.scrollingElement, ...inner.querySelectorAll("article pre > code, .md-typeset__scrollwrap")]
    for (const part of parts)
      if (part.scrollWidth > part.clientWidth + 1) cut.push([page, width, part.scrollWidth, part.tagName])
    frame.remove()
  }
  const frame = await open("index.html", 1400), query = frame.contentDocument.querySelector("[name=query]")
  query.focus(); query.value = "bundle"
  query.dispatchEvent(new KeyboardEvent("keyup", {key: "e", bubbles: true}))
  const results = () => [...frame.contentDocument.querySelectorAll(".md-search-result__item a")]
  for (let step = 0; step < 100 && !results().length; step++) await wait(50)
  const found = results().map(a => a.href)
  document.body.innerHTML = "<pre id=told>" + JSON.stringify({cut, found}) + "</pre>"
}
run(PAGES, WIDTHS)
</script></body>
"""
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def test_nothing_is_cut_off_at_a_desks_width_or_a_telephones_and_search_works_from_disk(site: Path) -> None:
    """In a real browser, from files: every page but those of wide measured tables, which scroll on a telephone."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("needs chromium")
    pages = sorted(page.relative_to(site).as_posix() for page in site.rglob("*.html") if page.name != "404.html")
    text = MEASURE.replace("PAGES", json.dumps(pages)).replace("WIDTHS", "[1400, 390]")
    measure = site / "measure.html"
    measure.write_text(text, encoding="utf-8")
    options = ["--no-sandbox", "--headless", "--allow-file-access-from-files", "--window-size=1500,1000"]
    command = [browser, *options, "--virtual-time-budget=120000", "--dump-dom", measure.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    measure.unlink()
    (told,) = re.findall(r'<pre id="told">(.*?)</pre>', done.stdout, re.DOTALL)
    answer = json.loads(unescape(told))
    assert answer["cut"] == []
    assert any(link.endswith("/bundle.html") or "/bundle.html" in link for link in answer["found"])


def test_first_screen_tells_what_for_whom_and_how_fast_with_the_recorded_figures() -> None:
    """The doors and the figures stand before the first heading; the figures are those of the committed run."""
    top = (ROOT / "README.md").read_text("utf-8").partition("\n## ")[0]
    assert {"docs/change-a-program.md", "docs/serving.md", "docs/operations.md"} <= set(
        re.findall(r"\]\((\S+?)\)", top)
    )
    lines = (ROOT / "benchmarks/h200/results.jsonl").read_text("utf-8").splitlines()
    chains = [record for record in map(json.loads, lines) if record.get("kind") == "chain"]
    at = {chain["tokens"]: chain for chain in chains if chain["tp"] == 8}
    words = " ".join(top.split())
    for tokens, text in ((1, "take {} us for one token where"), (64, "and {} us for 64 tokens where")):
        assert text.format(f"{at[tokens]['ours_us']:.1f}") in words
        assert f"takes {at[tokens]['rival_us']:.1f}" in words
    saved = sorted(92 * (at[tokens]["rival_us"] - at[tokens]["ours_us"]) / 1e3 for tokens in (1, 64))
    assert f"{saved[0]:.1f} to {saved[1]:.1f} ms less in every decode step" in words


def test_repository_is_linked_on_every_page(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra `docs`")
    remote = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "remote.origin.url"}
    environment = os.environ | remote | {"GIT_CONFIG_VALUE_0": "git@git.example.org:team/cakegen.git"}
    code = "import sys; sys.path.insert(0, 'tools/site'); import hooks; c = type('C', (), {'extra': {}})(); "
    code += "print(hooks.on_config(c).extra['social'][0]['link'])"
    environment |= {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "https://git.example.org/team/cakegen", done.stderr


def test_links_of_the_readme_lead_to_pages_of_the_site(site: Path) -> None:
    text = (site / "index.html").read_text("utf-8")
    links = {link.partition("#")[0] for link in re.findall(r'(?:href|src)="([^"]+)"', text)}
    local = {link for link in links if link and ":" not in link}
    assert {"serving.html", "CONTRIBUTING.html", "benchmarks/h200/ratio.png"} <= local
    assert [link for link in sorted(local) if not (site / link).exists()] == []
