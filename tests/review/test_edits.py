"""What a reviewer sees first: each edit once over all exports, decisions in groups, the worst costs; real trees."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.review.trees import EXPORT, HEADER_TEXT, KERNEL, small_programs, write_small_tree

from cakegen import paths
from cakegen.cli.main import main
from cakegen.review import Review, compare_trees, render_html, render_markdown, render_text
from cakegen.review.compare import ExportReview, FieldChange
from cakegen.review.cost import Cost, CostChange
from cakegen.review.edits import decision_groups, model_edits, text_edits
from cakegen.review.parts import COST, EDIT, FOLLOWING, KEYS, Part, fit_parts
from cakegen.review.report import cost_summary, worst_first
from cakegen.review.trees import Tree, read_trees

FIRST_SCREEN_LINES = 50
LIMIT = 60_000


@pytest.fixture(scope="module")
def generated() -> dict[str, Tree]:
    """The trees that are committed."""
    return read_trees(paths.generated_root())


def review_of(old: Mapping[str, Tree], new: Mapping[str, Tree]) -> Review:
    return Review("HEAD (1234567)", tuple(compare_trees(old.get(name), new.get(name)) for name in sorted(new)), None)


def small_review(trees: Path, **changes: object) -> ExportReview:
    """Two programs with more stages, one with another line; `changes` are of the tree."""
    write_small_tree(trees, small_programs())
    old = read_trees(trees)[EXPORT]
    first, second, norm = small_programs()
    after = [replace(first, stages=6), replace(second, stages=6), replace(norm, text=f"{KERNEL}// another line\n")]
    write_small_tree(trees, after, **changes)  # type: ignore[arg-type]
    return compare_trees(old, read_trees(trees)[EXPORT])


def two_exports(trees: Path) -> tuple[ExportReview, ExportReview]:
    one = small_review(trees, header=HEADER_TEXT.replace("2.0f", "4.0f"), model={"dims": {"hidden": 1024}})
    return one, replace(one, export="other")


def test_an_edit_of_two_exports_is_shown_once_with_the_keys_of_each(trees: Path) -> None:
    exports = two_exports(trees)
    for render in (render_text, render_markdown, render_html):
        text = re.sub("</?(?:mark|td)[^>]*>", "", render(Review("HEAD", exports, None)))
        assert len(re.findall(r"v \* 4\.0f", text)) == 1
        assert text.count("// another line") == 1
        assert "(3 keys of small, 3 of other)" in text
    (field, *_) = model_edits(exports)
    assert field.exports == ("small", "other")


def test_edits_come_before_what_follows_from_decisions_and_keys_last(trees: Path) -> None:
    exports = two_exports(trees)
    edits = text_edits(exports)
    assert [(edit.change.part, edit.follows) for edit in edits] == [
        ("header", False),
        ("kernel", False),
        ("kernel", True),
    ]
    for render, keys in ((render_text, "\nkeys of small"), (render_markdown, "<summary>small: 3 keys")):
        text = render(Review("HEAD", exports, None))
        words = ("dims.hidden", "v * 4.0f", "// another line", "kNumStages", "kNumStages = 6", keys)
        places = [text.index(word) for word in words]
        assert places == sorted(places)


def test_decisions_are_grouped_over_keys_and_exports(trees: Path) -> None:
    (group,) = decision_groups(two_exports(trees))
    assert group.title == "2 keys of small, 2 of other"
    assert FieldChange("kNumStages", "4", "6") in group.fields
    assert render_text(Review("HEAD", two_exports(trees), None)).count("kNumStages  ") == 1


def test_offsets_that_follow_are_counted_and_split_no_group(trees: Path) -> None:
    export = small_review(trees)
    first, *others = (entry for entry in export.keys if entry.fields)
    moved = replace(first, fields=(*first.fields, FieldChange("kRingOffset", "96", "88")))
    (group,) = decision_groups([replace(export, keys=(moved, *others))])
    assert group.title == "2 keys of small"
    assert group.remark == "1 offset and sizes follow"


def test_texts_that_follow_from_decisions_are_grouped_by_all_but_their_numbers(trees: Path) -> None:
    write_small_tree(trees, small_programs())
    old = read_trees(trees)[EXPORT]
    first, second, norm = small_programs()
    write_small_tree(trees, [replace(first, stages=6), replace(second, stages=7), norm])
    (edit,) = text_edits([compare_trees(old, read_trees(trees)[EXPORT])])
    assert edit.title == "kernel, decode_front (2 keys of small; one of 2 that differ in numbers alone)"


def test_a_role_splits_no_group(trees: Path) -> None:
    write_small_tree(trees, small_programs())
    old = read_trees(trees)[EXPORT]
    write_small_tree(trees, [replace(each, text=f"{KERNEL}// the same line\n") for each in small_programs()])
    (change,) = compare_trees(old, read_trees(trees)[EXPORT]).texts
    assert change.title == "kernel, decode_front, norm"
    assert len(change.keys) == 3


def cost(registers: int, spill_bytes: int = 0) -> Cost:
    return Cost(registers, spill_bytes, 4096, 100 + registers, 2048, bytes([registers, spill_bytes]))


def test_costs_come_worst_first(trees: Path) -> None:
    entries = [
        CostChange(("gone",), "sm_90a", cost(100), None),
        CostChange(("better",), "sm_90a", cost(100), cost(90)),
        CostChange(("same",), "sm_90a", cost(100), cost(100)),
        CostChange(("more",), "sm_90a", cost(100), cost(120)),
        CostChange(("spills",), "sm_90a", cost(100), cost(100, 8)),
        CostChange(("refused",), "sm_90a", cost(100), None, "after: an error"),
    ]
    review = Review("HEAD", (small_review(trees),), {EXPORT: entries}, "NVRTC")
    assert [entry.keys[0] for _, entry in worst_first(review, review.exports)] == [
        "refused",
        "spills",
        "more",
        "better",
        "gone",
    ]
    assert cost_summary(entries) == (
        "6 programs; at worst registers 100 -> 120, +20.0 %; spill bytes 0 -> 8; instructions 200 -> 220, +10.0 %"
    )
    assert cost_summary(entries[1:2]) == "1 program; none takes more"
    text = render_text(review)
    assert text.index("at worst registers") < text.index(" spills\n") < text.index(" more\n")


def test_further_rows_of_costs_are_counted_and_folded(trees: Path) -> None:
    entries = [CostChange((f"key{number}",), "sm_90a", cost(100), cost(150 - number)) for number in range(30)]
    review = Review("HEAD", (small_review(trees),), {EXPORT: entries}, "NVRTC")
    assert "  and 10 more, none of them worse; --format html lists them" in render_text(review)
    assert "key20" not in render_text(review)
    assert "<details><summary>compiled to other code: 10 more, none worse</summary>" in render_markdown(review)
    assert "key29" in render_html(review)


@pytest.mark.parametrize("room", range(0, 9000, 250))
def test_no_edit_goes_before_the_lists_of_keys(room: int) -> None:
    lines = "\n".join(f"+ line {number}" for number in range(200))
    parts = [
        Part(EDIT, "edit", lines, "diff"),
        Part(EDIT, "short", "+ x", "diff"),
        Part(COST, "cost", "| row |" * 20),
        Part(FOLLOWING, "follows", lines, "diff"),
        Part(KEYS, "few", "* key"),
        Part(KEYS, "many", "* key\n" * 400),
    ]
    texts = fit_parts(parts, room)
    assert sum(len(text) + 2 for text in texts if text is not None) <= room
    if any(text is not None for part, text in zip(parts, texts, strict=True) if part.rank == KEYS):
        assert texts[:4] == [part.text for part in parts[:4]]
    if room >= 2000:
        assert texts[0] is not None
        assert texts[1] == parts[1].text
    if texts[0] not in (None, parts[0].text):
        assert re.search(r"\+ line \d+\n… \d+ more lines\n```", texts[0] or "")


def assert_first_screen_shows(review: Review, *edits: str) -> None:
    text = render_markdown(review)
    assert len(text) <= LIMIT
    first = "\n".join(text.splitlines()[:FIRST_SCREEN_LINES])
    for edit in edits:
        assert edit in first
        assert text.count(edit) == 1
    assert "left out" not in text


def test_header_edit_of_all_exports_fits_with_the_edit_in_the_first_screen(generated: dict[str, Tree]) -> None:
    def edited(tree: Tree) -> Tree:
        texts = dict(tree.texts)
        for name, old, new in (
            ("cake_device_mbarrier.cuh", "namespace cake {", "namespace cake {  // edited first"),
            ("cake_kernels_norm_row.cuh", "namespace cake {", "namespace cake {  // edited second"),
        ):
            assert old in texts[name]
            texts[name] = texts[name].replace(old, new, 1)
        return replace(tree, texts=texts)

    review = review_of(generated, {name: edited(tree) for name, tree in generated.items()})
    assert_first_screen_shows(review, "+namespace cake {  // edited first", "+namespace cake {  // edited second")


def test_template_edit_of_all_programs_fits_with_the_edit_in_the_first_screen(generated: dict[str, Tree]) -> None:
    def edited(tree: Tree) -> Tree:
        texts = {
            name: text.replace("struct Cfg {\n", "struct Cfg {  // edited\n") if name.endswith("_kernel.cu") else text
            for name, text in tree.texts.items()
        }
        return replace(tree, texts=texts)

    review = review_of(generated, {name: edited(tree) for name, tree in generated.items()})
    assert sum(export.count("changed") for export in review.exports) == sum(len(t.kernels) for t in generated.values())
    assert_first_screen_shows(review, "+struct Cfg {  // edited")


def test_threshold_edit_fits_with_the_edit_in_the_first_screen(generated: dict[str, Tree], tmp_path: Path) -> None:
    export = tmp_path / "tiny_latent_moe"
    shutil.copytree(paths.exports_root() / "tiny_latent_moe", export)
    rules = export / "hopper.toml"
    rules.write_text(rules.read_text().replace("[decode]\n", "[decode]\nmax_stages = 11\n", 1))
    done = CliRunner().invoke(main, ["export", str(export / "export.toml"), "--dest", str(tmp_path / "generated")])
    assert done.exit_code == 0, done.output
    new = read_trees(tmp_path / "generated")
    review = review_of({name: generated[name] for name in new}, new)
    assert_first_screen_shows(review, "| `hopper.decode.max_stages` | `12` | `11` |")
    text = render_markdown(review)
    assert re.search(r"\| \d+ keys of tiny_latent_moe \| `kNumStages` `12` → `11`", text)
