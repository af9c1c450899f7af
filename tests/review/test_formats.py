"""The three formats of a review: complete, escaped, within their bounds; the page in a browser, if there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from support.compile.hostile_input import WAYS_OUT
from support.review.trees import EXPORT, HEADER, HEADER_TEXT, KERNEL, SmallProgram, small_programs, write_small_tree

from cakegen.review import Review, compare_trees, measure_costs, render_html, render_markdown, render_text
from cakegen.review.html import side_by_side
from cakegen.review.trees import read_trees

HOSTILE = "</details><script>alert(1)</script>"
BROWSER = next(
    (path for name in ("chromium", "google-chrome", "chromium-browser") if (path := shutil.which(name))), None
)


def review_of(folder: Path, before: list[SmallProgram], after: list[SmallProgram], **options: str) -> Review:
    write_small_tree(folder, before)
    old = read_trees(folder)[EXPORT]
    write_small_tree(folder, after, **options)
    new = read_trees(folder)[EXPORT]
    compared = compare_trees(old, new)
    return Review("HEAD (1234567)", (compared,), {EXPORT: measure_costs(compared, old, new)}, "NVRTC 13.0")


@pytest.fixture
def review(trees: Path) -> Review:
    """A changed decision, an added key, a changed header, a hostile text, and a program that does not compile."""
    first, second, norm = small_programs()
    hostile = KERNEL.replace("threadIdx.x ^ 1]", f"threadIdx.x ^ 2] /* {HOSTILE} ``` | */")
    after = [
        replace(first, stages=6, text=hostile),
        replace(second, key="front:g2_r9@sm_90a", text=f"{KERNEL}int broken = ;\n"),
        norm,
    ]
    return review_of(trees, small_programs(), after, header=HEADER_TEXT.replace("2.0f", "4.0f"))


@pytest.mark.parametrize("render", [render_text, render_markdown, render_html])
def test_every_format_holds_what_differs(review: Review, render: object) -> None:
    text = re.sub(r"</?(?:mark|code|td|tr)[^>]*>|`", "", render(review))  # type: ignore[operator]
    text = text.replace("→", "->").replace("&lt;", "<").replace("&gt;", ">")
    for wanted in (
        "HEAD (1234567)",
        "2 changed",
        "front:g2_r9@sm_90a",
        "replaces front:g2_r4@sm_90a",
        "kNumStages",
        HEADER,
        "cake::twice(staged[threadIdx.x ^ 2]",
        "does not compile",
        "expected an expression",
        "NVRTC 13.0",
        "registers",
    ):
        assert wanted in text
    assert re.search(r"kNumStages\W+4 -> 6|kNumStages 4 -> 6", text)


def test_keys_that_differ_in_a_header_alone_are_counted_and_named_once(trees: Path) -> None:
    first, *_ = small_programs()
    programs = [replace(first, key=f"front:g{number}_r4@sm_90a") for number in range(1, 6)]
    after = [replace(programs[0], stages=8), *programs[1:]]
    review = review_of(trees, programs, after, header=HEADER_TEXT.replace("2.0f", "2.00f"))
    text, markdown = render_text(review), render_markdown(review)
    assert "  changed  4 more keys  (a header alone)" in text
    assert "| changed | 4 more keys | a header alone; listed with it |" in markdown
    for shown in (text, markdown):
        assert shown.count(programs[0].key) >= 2
        assert shown.count(programs[3].key) == 1, "with the header's difference"


def test_text_names_no_program_that_compiles_to_the_same(trees: Path) -> None:
    first, second, norm = small_programs()
    commented = replace(second, text=f"// a comment\n{KERNEL}")
    review = review_of(trees, [first, second, norm], [replace(first, stages=9), commented, norm])
    text = render_text(review)
    assert "1 of 2 touched programs compile to the same machine code, byte by byte; NVRTC 13.0" in text
    (row,) = (line for line in text.splitlines() if line.split()[:1] == ["sm_90a"])
    assert row.split()[-1] == first.key
    assert "differs" in row


def test_clean_review_is_three_lines(trees: Path) -> None:
    review = review_of(trees, small_programs(), small_programs())
    assert review.clean
    assert render_text(review).splitlines()[2:] == ["small: 0 changed, 0 added, 0 removed, 3 unchanged"]
    assert "Nothing differs." in render_html(review)
    assert "<details" not in render_markdown(review)


def test_review_without_compiling_says_so(review: Review) -> None:
    assert "nothing was compiled" in render_text(replace(review, costs=None))


def test_markdown_fence_is_longer_than_any_in_the_text(review: Review) -> None:
    assert "\n````diff\n" in render_markdown(review)


def test_markdown_key_is_code_so_that_it_calls_nobody(review: Review) -> None:
    outside = re.sub(r"(`+)(?:.|\n)*?\1", "", render_markdown(review))
    assert "@sm_90a" not in outside


def test_markdown_table_cells_keep_their_bars(trees: Path) -> None:
    first, second, norm = small_programs()
    barred = replace(first, key="front:a|b@sm_90a")
    text = render_markdown(review_of(trees, [barred, second, norm], [replace(barred, stages=7), second, norm]))
    (row,) = (line for line in text.splitlines() if line.startswith("| changed"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 4


def hostile_review(folder: Path, name: str) -> Review:
    """A name in every place that a tree has for one: keys, roles, targets, fields, files, the tree's own folder."""
    first, second, norm = small_programs()
    write_small_tree(folder, [replace(first, key=f"{name} gone"), second, norm])
    old = read_trees(folder)[EXPORT]
    write_small_tree(folder, [replace(first, key=name, stages=9, role=name), replace(second, stages=9), norm])
    new = read_trees(folder)[EXPORT]
    record = {**new.record(second.key), "role": name, "arches": [name], name: name}
    modules = {**new.modules, second.name: record, replace(second, stages=9).name: record}
    new = replace(new, export=name, modules=modules, model={name: name}, texts={**new.texts, name: name})
    compared = compare_trees(replace(old, export=name), new)
    return Review("HEAD (1234567)", (compared,), {name: measure_costs(compared, old, new)}, "NVRTC 13.0", (name,))


@pytest.mark.parametrize("name", WAYS_OUT)
def test_names_are_text_in_every_format(trees: Path, name: str) -> None:
    review = hostile_review(trees, name)
    for render in (render_text, render_markdown, render_html):
        text = render(review)
        assert text.encode()
        assert text.replace("\n", "").replace("\t", "").isprintable()
    assert repr(name)[1:-1].replace("\\\\", "\\") in render_text(review)
    page = _Page()
    page.feed(render_html(review))
    assert page.open == []
    assert "img" not in [tag for tag, _ in page.tags]


@pytest.mark.parametrize("name", WAYS_OUT)
def test_markdown_shows_names_as_code_alone(trees: Path, name: str) -> None:
    """As a parser of CommonMark with tables reads it: no link, no picture, nobody called, whatever a name holds."""
    text = render_markdown(hostile_review(trees, name))
    outside, in_code = [], False
    for block in MarkdownIt("commonmark", {"html": True}).enable("table").parse(text):
        if block.type == "html_block":
            outside.append(re.sub(r"<code>[^<]*</code>", "", block.content))
        for token in block.children or ():
            assert token.type not in ("link_open", "image"), token
            if token.type == "html_inline":
                assert token.content in ("<code>", "</code>", "<br>"), token
                in_code = token.content == "<code>"
            elif token.type == "text" and not in_code:
                outside.append(token.content)
    assert not re.search(r"[`@\[\]]|https:|<img|front:", " ".join(outside))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {4, 5, 9}


@pytest.mark.parametrize("limit", [1000, 3000, 60_000])
def test_markdown_keeps_its_limit_and_counts_what_it_leaves_out(review: Review, limit: int) -> None:
    whole = render_markdown(review, 10**6)
    text = render_markdown(review, limit)
    assert len(text) <= limit
    assert text.count("<details") == text.count("\n</details>")
    left_out = int(found[1]) if (found := re.search(r"(\d+) of \d+ parts are left out", text)) else 0
    assert left_out == whole.count("<details") - text.count("<details")
    assert (left_out > 0) == (len(whole) > limit)


def test_markdown_leaves_out_listings_before_the_edit(trees: Path) -> None:
    """One line of a header that 400 keys include: what was edited is the last thing to go."""
    (first, *_) = small_programs()
    programs = [replace(first, key=f"front:g{number}_r4@sm_90a", salt=str(number)) for number in range(400)]
    write_small_tree(trees, programs)
    old = read_trees(trees)[EXPORT]
    write_small_tree(trees, programs[1:], header=HEADER_TEXT.replace("2.0f", "2.5f"))
    compared = compare_trees(old, read_trees(trees)[EXPORT])
    text = render_markdown(Review("HEAD (1234567)", (compared,), None), 4000)
    assert "return v * 2.5f;" in text
    assert "* and 379 more" in text
    assert len(text) <= 4000


class _Page(HTMLParser):
    """Collects tags and refuses unbalanced ones."""

    VOID = ("meta", "input", "col", "br", "link", "img")

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_whole_balanced_and_loads_nothing(review: Review) -> None:
    page = _Page()
    page.feed(render_html(review))
    assert page.open == []
    names = [tag for tag, _ in page.tags]
    assert names.count("script") == 1, "the text's own script is escaped"
    assert "link" not in names
    assert not [attributes for _, attributes in page.tags if {"src", "href", "srcset"} & set(attributes)]
    assert "@import" not in render_html(review)
    assert "url(" not in render_html(review)


def test_sides_pair_lines_and_mark_what_differs_inside_them(review: Review) -> None:
    change = next(change for change in review.exports[0].texts if change.part == "header")
    (row,) = (row for row in side_by_side(change) if row.kind == "replace")
    assert [piece for piece, marked in row.before.pieces if marked] == ["2"]
    assert [piece for piece, marked in row.after.pieces if marked] == ["4"]
    assert row.before.number == row.after.number == 2


def test_sides_hold_every_line_that_differs_once(review: Review) -> None:
    for change in review.exports[0].texts:
        unified = change.unified()
        rows = list(side_by_side(change))
        for sign, side in (("-", "before"), ("+", "after")):
            shown = [
                "".join(piece for piece, _ in getattr(row, side).pieces)
                for row in rows
                if row.kind in ("replace", "delete", "insert") and getattr(row, side).number
            ]
            assert shown == [line[1:] for line in unified if line[0] == sign]


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_page_works_in_a_browser_without_a_network(review: Review, tmp_path: Path) -> None:
    """A click opens all parts, the filter hides other keys, and the text's own script does not run."""
    probe = """<script>
document.getElementById("open").click();
const box = document.getElementById("filter");
box.value = "norm:e0";
box.dispatchEvent(new Event("input"));
const shown = [...document.querySelectorAll("tr[data-keys]")].filter((part) => !part.hidden);
document.title = JSON.stringify({
  closed: document.querySelectorAll("details:not([open])").length,
  shown: shown.map((part) => part.dataset.keys),
});
</script>"""
    page = tmp_path / "page.html"
    page.write_text(render_html(review).replace("</body>", f"{probe}</body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", page.as_uri()]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=900)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title, done.stderr
    assert title[1] == '{"closed":0,"shown":["norm:e0","norm:e0"]}'
