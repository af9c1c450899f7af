"""Trees of git revisions and of folders, and what is said where one can't be read."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.review.trees import EXPORT, commit_all, git, small_programs, write_old_tree, write_small_tree
from support.small_registry import registry_text

from cakegen import plain_files
from cakegen.errors import RegistryError, ReviewError
from cakegen.registry import parse_tables
from cakegen.review import compare_trees
from cakegen.review import trees as trees_module
from cakegen.review.compare import CHANGED
from cakegen.review.git_output import parse_objects
from cakegen.review.trees import read_revision, read_trees, resolve_revision

RECORD = {"sources": ["b_kernel.cu"], "headers": [], **small_programs()[0].record()}


def test_revision_and_working_tree_are_read_alike(trees: Path) -> None:
    assert read_revision(trees, resolve_revision(trees, "HEAD")) == read_trees(trees)


def test_revision_is_not_the_working_tree(trees: Path) -> None:
    before = read_trees(trees)
    write_small_tree(trees, small_programs()[:1])
    assert read_revision(trees, resolve_revision(trees, "HEAD")) == before
    assert len(read_trees(trees)[EXPORT].kernels) == 1


def test_merge_base_leaves_out_what_the_other_branch_did_since(trees: Path) -> None:
    repository = trees.parent
    git(repository, "checkout", "-q", "-b", "topic")
    commit_all(repository, "topic's own")
    git(repository, "checkout", "-q", "main")
    write_small_tree(trees, small_programs()[:2])
    commit_all(repository, "main goes on")
    git(repository, "checkout", "-q", "topic")
    tip = read_revision(trees, resolve_revision(trees, "main"))
    parted = resolve_revision(trees, "main", merge_base=True)
    assert parted.label.startswith("merge base of main (")
    assert (len(tip[EXPORT].kernels), len(read_revision(trees, parted)[EXPORT].kernels)) == (2, 3)


def test_revision_before_the_folder_existed_holds_no_tree(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    commit_all(tmp_path, "nothing yet")
    folder = tmp_path / "generated"
    write_small_tree(folder, small_programs())
    assert read_revision(folder, resolve_revision(folder, "HEAD")) == {}


@pytest.mark.parametrize("named", ["nowhere", "--upload-pack=x", ""])
def test_unknown_revision_is_refused_with_gits_words(trees: Path, named: str) -> None:
    with pytest.raises(
        ReviewError, match=r"names no commit \(.*git rev-parse failed: .*Name a branch, a tag or a commit"
    ):
        resolve_revision(trees, named)


def test_folder_outside_a_repository_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    folder = tmp_path / "alone"
    folder.mkdir()
    with pytest.raises(ReviewError, match=r"alone: git rev-parse failed: .*not a git repository"):
        resolve_revision(folder, "HEAD")


def test_histories_without_a_common_commit_name_the_remedy(trees: Path) -> None:
    git(trees.parent, "checkout", "-q", "--orphan", "other")
    commit_all(trees.parent, "unrelated")
    with pytest.raises(ReviewError, match=r"main and HEAD have no common commit .*git fetch --unshallow"):
        resolve_revision(trees, "main", merge_base=True)


def test_missing_git_is_said(trees: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(trees))
    with pytest.raises(ReviewError, match="git can't be run"):
        resolve_revision(trees, "HEAD")


def test_object_that_git_does_not_have_is_said(trees: Path) -> None:
    with pytest.raises(ReviewError, match=f"object {'0' * 40} can't be read"):
        trees_module._read_blobs(trees, ["0" * 40])


def test_unreadable_file_is_named(trees: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(plain_files, "read_below", refuse)
    with pytest.raises(ReviewError, match=r"\.cuh: Permission denied"):
        read_trees(trees)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("KERNELS = [\n", "small/cake_jit.py: not a registry"),
        ("EXPORT = 'small'\n", "lacks SCHEMA_VERSION, MODEL"),
        (
            "SCHEMA_VERSION, EXPORT = 1, ''\nSCHEMA_VERSION = 1\nEXPORT = ''\nMODEL = []\nMODULES = {}\nKERNELS = {}\n"
            "SPECIALIZATIONS = {}\n",
            "must be dicts",
        ),
        (
            "SCHEMA_VERSION = 1\nEXPORT = ''\nMODEL = {}\nMODULES = {}\nKERNELS = {'a': 'b'}\nSPECIALIZATIONS = {}\n",
            "no record for the program of 'a'",
        ),
    ],
)
def test_damaged_registry_of_a_revision_is_named_with_the_revision(trees: Path, text: str, message: str) -> None:
    (trees / EXPORT / "cake_jit.py").write_text(text)
    commit_all(trees.parent, "damaged")
    with pytest.raises(RegistryError, match=message) as caught:
        read_revision(trees, resolve_revision(trees, "HEAD"))
    assert str(caught.value).startswith("HEAD (")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("KERNELS", {"a": {"b": 1}}, "MODULES holds no record for the program of 'a'"),
        ("MODULES", {"b": {**RECORD, "arches": "sm_90a"}}, "b: arches must be a list of texts; got 'sm_90a'"),
        ("MODULES", {"b": {**RECORD, "launch": {}}}, "b: launch must be a dict with dynamic_smem_bytes; got {}"),
        ("SPECIALIZATIONS", {"a": {"SCALE": "3"}}, "SPECIALIZATIONS of 'a' must be a dict of ints"),
    ],
)
def test_record_that_no_comparison_can_use_is_named(trees: Path, name: str, value: object, message: str) -> None:
    values = {"SCHEMA_VERSION": 1, "EXPORT": "", "MODEL": {}, "MODULES": {"b": RECORD}, "KERNELS": {"a": "b"}}
    values |= {"SPECIALIZATIONS": {}} | {name: value}
    (trees / EXPORT / "cake_jit.py").write_text("\n".join(f"{key} = {value!r}" for key, value in values.items()))
    with pytest.raises(RegistryError) as caught:
        read_trees(trees)
    assert f"small/cake_jit.py: {message}" in str(caught.value)


def test_tree_of_schema_2_is_paired_with_the_present_layout_by_its_keys(trees: Path) -> None:
    """No decision differs: only the names of headers do, and where they stand."""
    new = read_trees(trees)[EXPORT]
    write_old_tree(trees, small_programs())
    old = read_trees(trees)[EXPORT]
    assert old.kernels == new.kernels
    review = compare_trees(old, new)
    assert {(entry.status, entry.parts, entry.fields) for entry in review.keys} == {(CHANGED, ("kernel", "header"), ())}
    hunks = [line for change in review.texts if change.part == "kernel" for line in change.unified()]
    assert [line for line in hunks if line[0] in "+-"] == [
        '-#include "cake_small_device_common.cuh"',
        '+#include "cake_device_common.cuh"',
    ]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MODULES", {"b": 3}, "damaged MODULES (AttributeError"),
        ("MODULES", {"b": {}}, "damaged MODULES (KeyError: 'includes')"),
        ("LAUNCHES", {}, "damaged MODULES (KeyError"),
    ],
)
def test_tables_that_can_not_be_joined_are_refused(trees: Path, name: str, value: object, message: str) -> None:
    file = trees / EXPORT / "cake_jit.py"
    file.write_text(registry_text(parse_tables(file.read_text(), "x") | {name: value}))
    with pytest.raises(RegistryError) as caught:
        read_trees(trees)
    assert f"small/cake_jit.py: {message}" in str(caught.value)


def test_tree_without_its_table_of_headers_is_refused(trees: Path) -> None:
    (trees / "shared" / "headers.json").unlink()
    with pytest.raises(RegistryError, match=r"shared/headers\.json: damaged table of headers"):
        read_trees(trees)


def test_a_file_with_a_strange_name_survives_the_way_through_git(trees: Path) -> None:
    strange = trees / EXPORT / "csrc" / "cake_small" / 'a "b"\tü\n.cuh'
    strange.write_text("x")
    commit_all(trees.parent, "strange")
    subprocess.run(["git", "-C", str(trees), "config", "core.quotepath", "true"], check=True)
    assert strange.name in read_revision(trees, resolve_revision(trees, "HEAD"))[EXPORT].texts


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file that is none of the repository's."""
    file = tmp_path / "outside.txt"
    file.write_text("what only this user may read\n")
    return file


PLACES = (f"{EXPORT}/csrc/cake_small/more.cuh", f"{EXPORT}/cake_jit.py", f"{EXPORT}/csrc", EXPORT)


@pytest.mark.parametrize("place", PLACES)
def test_symbolic_link_in_a_tree_is_never_followed(trees: Path, outside: Path, place: str) -> None:
    """Of a file, of the registry, of a folder; on disk and in a commit, where it is an object of mode 120000."""
    link = trees / place
    if link.is_dir():
        link.rename(trees.parent / "moved")
        link.symlink_to(trees.parent / "moved")
    else:
        link.unlink(missing_ok=True)
        link.symlink_to(outside)
    message = rf"{place}: is a symbolic link, which is not followed"
    with pytest.raises(ReviewError, match=message):
        read_trees(trees)
    commit_all(trees.parent, "a link")
    with pytest.raises(ReviewError, match=message):
        read_revision(trees, resolve_revision(trees, "HEAD"))


def test_fifo_in_a_tree_blocks_nothing(trees: Path) -> None:
    os.mkfifo(trees / EXPORT / "csrc" / "pipe.cuh")
    with pytest.raises(ReviewError, match=r"pipe\.cuh: is no regular file"):
        read_trees(trees)


def test_file_of_an_absurd_size_is_not_read(trees: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (trees / EXPORT / "huge.cuh").write_text("x" * 5000)
    commit_all(trees.parent, "huge")
    monkeypatch.setattr(plain_files.read_below, "__defaults__", (4999,))
    monkeypatch.setattr(plain_files, "MOST_SOURCE_BYTES", 4999)
    with pytest.raises(ReviewError, match=r"huge\.cuh: has 5000 bytes; at most 4999 are read"):
        read_trees(trees)
    with pytest.raises(ReviewError, match=r"HEAD .*: small/huge\.cuh: has 5000 bytes; at most 4999 are read"):
        read_revision(trees, resolve_revision(trees, "HEAD"))


def test_trees_of_an_absurd_size_are_not_read(trees: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees_module, "_MOST_TREES_BYTES", 1000)
    with pytest.raises(ReviewError, match="its files have more than 1000 bytes; a review reads no more"):
        read_trees(trees)
    with pytest.raises(ReviewError, match="its files have more than 1000 bytes"):
        read_revision(trees, resolve_revision(trees, "HEAD"))


def test_name_that_is_no_utf8_is_read_alike(trees: Path) -> None:
    strange = os.fsencode(trees / EXPORT) + b"/\xff\x1b.cuh"
    with open(strange, "wb") as stream:
        stream.write(b"x")
    commit_all(trees.parent, "strange")
    assert read_revision(trees, resolve_revision(trees, "HEAD")) == read_trees(trees)


def test_output_of_git_that_ends_early_is_refused() -> None:
    with pytest.raises(
        ReviewError,
        match=r"has 9 bytes, and 4 came; the clone is damaged, or git was stopped\. Run `git fsck`",
    ):
        parse_objects(b"0" * 40 + b" blob 9\nhalf", ["0" * 40])
