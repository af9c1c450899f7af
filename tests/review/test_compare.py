"""Pairing by key: names are hashes and count for nothing; decisions, texts and headers do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.review.trees import EXPORT, HEADER, HEADER_TEXT, KERNEL, SmallProgram, small_programs, write_small_tree

from cakegen.renamed_keys import renamed_keys
from cakegen.review.compare import ExportReview, FieldChange, compare_trees
from cakegen.review.trees import Tree, read_trees


def tree_of(folder: Path, programs: list[SmallProgram], **options: object) -> Tree:
    write_small_tree(folder, programs, **options)  # type: ignore[arg-type]
    return read_trees(folder)[EXPORT]


def compare(tmp_path: Path, after: list[SmallProgram], **options: object) -> ExportReview:
    return compare_trees(tree_of(tmp_path, small_programs()), tree_of(tmp_path, after, **options))


def entry_of(review: ExportReview, key: str) -> object:
    return next(entry for entry in review.keys if entry.key == key)


def test_same_trees_are_unchanged(tmp_path: Path) -> None:
    review = compare(tmp_path, small_programs())
    assert review.summary == "0 changed, 0 added, 0 removed, 3 unchanged"
    assert (review.model, review.texts) == ((), ())


def test_another_name_alone_is_no_change(tmp_path: Path) -> None:
    """The name stands in the file names, the symbol, the program id, the seal and the binding."""
    renamed = [replace(program, salt="other") for program in small_programs()]
    assert {p.name for p in renamed}.isdisjoint(p.name for p in small_programs())
    assert compare(tmp_path, renamed).summary == "0 changed, 0 added, 0 removed, 3 unchanged"


def test_key_that_was_only_renamed_is_no_change(tmp_path: Path) -> None:
    old, new = next(iter(renamed_keys().items()))
    first, *rest = small_programs()
    before = tree_of(tmp_path / "before", [replace(first, key=old), *rest])
    after = tree_of(tmp_path / "after", [replace(first, key=new), *rest])
    assert compare_trees(before, after).summary == "0 changed, 0 added, 0 removed, 3 unchanged"
    assert compare_trees(before, before).summary == "0 changed, 0 added, 0 removed, 3 unchanged"
    assert entry_of(compare_trees(before, before), old)
    # the other way round the table says nothing: it does not go back
    assert compare_trees(after, before).summary == "0 changed, 1 added, 1 removed, 2 unchanged"


def test_edited_kernel_is_shown_once_for_all_keys_that_share_the_edit(tmp_path: Path) -> None:
    edited = KERNEL.replace("threadIdx.x ^ 1", "threadIdx.x ^ 2")
    first, second, norm = small_programs()
    review = compare(tmp_path, [replace(first, text=edited), replace(second, text=edited), norm])
    assert review.summary == "2 changed, 0 added, 0 removed, 1 unchanged"
    assert entry_of(review, first.key).parts == ("kernel",)
    (change,) = review.texts
    assert change.keys == (first.key, second.key)
    assert [line for line in change.unified() if line[0] in "+-"] == [
        "-    if (threadIdx.x < count) out[threadIdx.x] = cake::twice(staged[threadIdx.x ^ 1]) * Cfg::kScale;",
        "+    if (threadIdx.x < count) out[threadIdx.x] = cake::twice(staged[threadIdx.x ^ 2]) * Cfg::kScale;",
    ]


def test_one_edit_at_different_lines_is_one_difference(tmp_path: Path) -> None:
    first, second, norm = small_programs()
    longer = replace(second, text=f"// a line of its own\n{KERNEL}")
    old = tree_of(tmp_path, [first, longer, norm])
    edited = [replace(p, text=p.text.replace("^ 1", "^ 2")) for p in (first, longer)]
    review = compare_trees(old, tree_of(tmp_path, [*edited, norm]))
    assert [change.keys for change in review.texts] == [(first.key, second.key)]


def test_changed_decisions_are_named_with_both_values(tmp_path: Path) -> None:
    first, second, norm = small_programs()
    after = replace(first, stages=6, smem_bytes=8192, constants={"SCALE": 4}, arches=("sm_90a", "sm_100a"))
    review = compare(tmp_path, [after, second, norm])
    entry = entry_of(review, first.key)
    assert set(entry.fields) == {
        FieldChange("kNumStages", "4", "6"),
        FieldChange("barriers.stage_full", "4", "6"),
        FieldChange("launch.dynamic_smem_bytes", "4096", "8192"),
        FieldChange("arches", "sm_90a", "sm_90a, sm_100a"),
        FieldChange("-DSCALE", "3", "4"),
    }
    assert entry.parts == ("record", "kernel")


def test_changed_header_is_shown_once_with_the_keys_that_include_it(tmp_path: Path) -> None:
    review = compare(tmp_path, small_programs(), header=HEADER_TEXT.replace("2.0f", "4.0f"))
    assert review.summary == "3 changed, 0 added, 0 removed, 0 unchanged"
    (change,) = review.texts
    assert (change.part, change.title) == ("header", HEADER)
    assert change.keys == tuple(sorted(program.key for program in small_programs()))
    assert {entry.parts for entry in review.keys} == {("header",)}


def test_added_key_is_compared_with_the_removed_one_that_is_most_like_it(tmp_path: Path) -> None:
    first, second, norm = small_programs()
    after = replace(second, key="front:g2_r5@sm_90a", stages=5)
    review = compare(tmp_path, [first, after, norm])
    assert review.summary == "0 changed, 1 added, 1 removed, 2 unchanged"
    entry = entry_of(review, after.key)
    assert (entry.status, entry.replaces) == ("added", second.key)
    assert FieldChange("kNumStages", "4", "5") in entry.fields
    assert [change.keys for change in review.texts] == [(after.key,)]


def test_key_of_another_role_replaces_nothing(tmp_path: Path) -> None:
    first, second, norm = small_programs()
    review = compare(tmp_path, [first, second, replace(norm, key="norm:e1", role="other")])
    assert entry_of(review, "norm:e1").replaces is None
    assert review.texts == ()


def test_model_fields_are_named_by_their_place(tmp_path: Path) -> None:
    model = {"dims": {"hidden": 1024}, "targets": [{"arch": "sm_90a", "sm_counts": [78, 132]}]}
    review = compare(tmp_path, small_programs(), model=model)
    assert set(review.model) == {
        FieldChange("dims.hidden", "512", "1024"),
        FieldChange("targets.sm_90a.sm_counts", "132", "78, 132"),
    }
    assert review.count("unchanged") == 3


def test_records_without_a_name_are_told_apart_by_number(tmp_path: Path) -> None:
    tiles = [{"block_n": 256, "num_stages": 4}, {"block_n": 128, "num_stages": 6}]
    old = tree_of(tmp_path, small_programs(), model={"prefill": {"tiles": tiles}})
    fewer = [tiles[0], {"block_n": 128, "num_stages": 5}]
    review = compare_trees(old, tree_of(tmp_path, small_programs(), model={"prefill": {"tiles": fewer}}))
    assert review.model == (FieldChange("prefill.tiles.1.num_stages", "6", "5"),)


def test_lists_of_named_records_keep_those_of_one_name_apart(tmp_path: Path) -> None:
    """A kernel family is declared for each family of architectures."""
    families = [{"name": "decode", "arch_family": f, "template": f"{f}.cu"} for f in ("sm90", "sm100")]
    old = tree_of(tmp_path, small_programs(), model={"families": families[:1]})
    review = compare_trees(old, tree_of(tmp_path, small_programs(), model={"families": families}))
    assert review.model == (FieldChange("families.decode.sm100.template", "-", "sm100.cu"),)


@pytest.mark.parametrize(("gone", "summary"), [(True, "0 changed, 0 added, 3 removed"), (False, "0 changed, 3 added")])
def test_export_on_one_side_only_is_all_added_or_removed(tmp_path: Path, gone: bool, summary: str) -> None:
    tree = tree_of(tmp_path, small_programs())
    review = compare_trees(tree, None) if gone else compare_trees(None, tree)
    assert review.summary.startswith(summary)


def test_tree_of_another_schema_is_compared_all_the_same(tmp_path: Path) -> None:
    review = compare(tmp_path, small_programs(), schema=99)
    assert review.summary == "0 changed, 0 added, 0 removed, 3 unchanged"
