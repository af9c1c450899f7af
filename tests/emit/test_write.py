"""Writing a tree is all or nothing, and a check tells an edit from a stale text."""

from __future__ import annotations

import os
import py_compile
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cakegen.emit import check_tree, compare_tree, write, write_tree
from cakegen.emit.seal import render_sealed
from cakegen.errors import EmitError, SealError

Tree = dict[str, str]


def tree_of(*bodies: tuple[str, str]) -> Tree:
    return {name: render_sealed(name.rpartition("/")[2], "tiny", "A file", body) for name, body in bodies}


OLD = tree_of(("a.cu", "old\n"), ("sub/b.cu", "same\n"), ("sub/gone.cu", "gone\n"))
NEW = tree_of(("a.cu", "new\n"), ("sub/b.cu", "same\n"), ("more/c.cu", "added\n"))


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    """Each file and folder with its number and the moment of its last change."""
    return {str(path): (path.lstat().st_ino, path.lstat().st_mtime_ns) for path in (folder, *folder.rglob("*"))}


def tree_on_disk(root: Path) -> Tree:
    return {p.relative_to(root).as_posix(): p.read_text() for p in root.rglob("*") if p.is_file()}


@pytest.fixture(params=["exchange", "two renames"])
def swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to put the new tree in place."""
    if request.param == "two renames":
        monkeypatch.setattr(write, "_exchange", lambda one, other: False)
    return str(request.param)


def test_write_replaces_adds_and_drops(tmp_path: Path, swap: str) -> None:
    root = tmp_path / "tiny"
    assert write_tree(root, OLD).summary == "3 changed, 0 same, 0 stale"
    difference = write_tree(root, NEW)
    assert difference.summary == "2 changed, 1 same, 1 stale"
    assert tree_on_disk(root) == NEW
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_write_of_an_equal_tree_touches_nothing(tmp_path: Path) -> None:
    root = tmp_path / "tiny"
    write_tree(root, OLD)
    before = root.stat().st_ino, (root / "a.cu").stat().st_mtime_ns
    assert write_tree(root, OLD).clean
    assert (root.stat().st_ino, (root / "a.cu").stat().st_mtime_ns) == before


def test_write_refuses_to_drop_a_file_of_somebody_else(tmp_path: Path) -> None:
    root = tmp_path / "tiny"
    write_tree(root, OLD)
    (root / "notes.txt").write_text("mine\n")
    with pytest.raises(EmitError, match=r"notes\.txt: no export wrote this file"):
        write_tree(root, NEW)
    assert tree_on_disk(root) == {**OLD, "notes.txt": "mine\n"}


@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_failed_write_leaves_the_old_tree(
    tmp_path: Path, swap: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    root = tmp_path / "tiny"
    write_tree(root, OLD)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "x")

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        if swap == "exchange" and name == "rename":
            patch.setattr(write, "_exchange", fail)
        with pytest.raises(EmitError, match="No space left"):
            write_tree(root, NEW)
        assert tree_on_disk(root) == OLD
    write_tree(root, NEW)
    assert tree_on_disk(root) == NEW


def _killed_at(step: int, act: Callable[[], None], patched: list[tuple[Any, str]]) -> bool:
    """Run `act` in a child that dies by SIGKILL just before the step-th call of a patched function."""
    child = os.fork()
    if child == 0:
        left = [step]
        for owner, name in patched:
            original = getattr(owner, name)

            def counted(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return _original(*args, **kwargs)

            setattr(owner, name, counted)
        try:
            act()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_kill_at_any_step_leaves_the_old_or_the_new_tree(tmp_path: Path, swap: str) -> None:
    root = tmp_path / "tiny"
    patched = [(os, "fsync"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (write, "_exchange"), (os, "open")]
    seen = set()
    for step in range(200):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        write_tree(root, OLD)
        killed = _killed_at(step, lambda: write_tree(root, NEW), patched)
        if swap == "exchange":
            assert root.is_dir(), f"no tree after a kill at step {step}"
        before = everything(tmp_path)
        difference = compare_tree(root, NEW)
        assert everything(tmp_path) == before, "a check writes nothing"
        if root.is_dir():
            found = tree_on_disk(root)
            assert found in (OLD, NEW), f"step {step}: {sorted(found)}"
            assert difference.clean == (found == NEW)
            seen.add(found == NEW)
        else:
            assert len(difference.missing) == len(NEW)
        write._recover(root)
        assert tree_on_disk(root) in (OLD, NEW)
        assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
        write_tree(root, NEW)
        assert tree_on_disk(root) == NEW
        if not killed:
            break
    assert not killed
    assert seen == {True, False}


def test_writers_at_once_leave_one_whole_tree(tmp_path: Path) -> None:
    root = tmp_path / "tiny"
    threads = [threading.Thread(target=write_tree, args=(root, tree)) for tree in (OLD, NEW) * 8]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tree_on_disk(root) in (OLD, NEW)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_check_names_each_difference_and_the_command(tmp_path: Path) -> None:
    root = tmp_path / "tiny"
    write_tree(root, OLD)
    (root / "sub/b.cu").write_text(OLD["sub/b.cu"] + "// by hand\n")
    with pytest.raises(SealError) as caught:
        check_tree(root, NEW)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{root}: 3 changed, 0 same, 1 stale"
    assert [line.split() for line in lines[1:-1]] == [
        ["edited", "by", "hand", "sub/b.cu"],
        ["changed", "a.cu"],
        ["missing", "more/c.cu"],
        ["stale", "sub/gone.cu"],
    ]
    assert "`cakegen export tiny`" in lines[-1]


def test_check_tells_a_file_that_no_export_wrote_from_a_stale_one(tmp_path: Path) -> None:
    root = tmp_path / "tiny"
    write_tree(root, OLD)
    (root / "notes.txt").write_text("mine\n")
    with pytest.raises(SealError) as caught:
        check_tree(root, NEW)
    lines = str(caught.value).splitlines()
    assert [line.split() for line in lines[-3:-1]] == [["stale", "sub/gone.cu"], ["not", "generated", "notes.txt"]]
    assert lines[-1].endswith("and away what no export wrote, first.")


def test_check_passes_over_the_bytecode_that_pip_leaves_beside_a_module(tmp_path: Path) -> None:
    root, files = tmp_path / "tiny", OLD | tree_of(("cake_jit.py", "MODULES = {}\n"))
    write_tree(root, files)
    py_compile.compile(str(root / "cake_jit.py"))
    (kept,) = root.rglob("*.pyc")
    assert check_tree(root, files).clean
    (kept.parent / "gone.cpython-311.pyc").write_bytes(kept.read_bytes())
    (kept.parent / "cake_jit.txt").write_bytes(b"")
    with pytest.raises(SealError, match="2 stale") as caught:
        check_tree(root, files)
    assert kept.name not in str(caught.value)


def test_check_passes_on_what_was_written(tmp_path: Path) -> None:
    write_tree(tmp_path / "tiny", NEW)
    assert check_tree(tmp_path / "tiny", NEW).summary == "0 changed, 3 same, 0 stale"


def test_check_of_no_tree_reports_all_missing(tmp_path: Path) -> None:
    assert compare_tree(tmp_path / "no" / "tiny", NEW).missing == tuple(sorted(NEW))


def test_check_says_what_an_interrupted_export_left_and_touches_none_of_it(tmp_path: Path) -> None:
    root = tmp_path / "tiny"
    write_tree(root, OLD)
    shutil.copytree(root, tmp_path / ".tiny.old")
    root.rename(tmp_path / ".tiny.new")
    before = everything(tmp_path)
    with pytest.raises(SealError, match=r"left beside +\.tiny\.old .*\n +left beside +\.tiny\.new \(an export was"):
        check_tree(root, NEW)
    assert everything(tmp_path) == before
    write_tree(root, NEW)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


@pytest.mark.parametrize("name", [".tiny.old", ".tiny.new"])
def test_folder_of_the_users_own_beside_the_tree_is_not_removed(tmp_path: Path, name: str) -> None:
    root = tmp_path / "tiny"
    write_tree(root, OLD)
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.txt").write_text("mine")
    with pytest.raises(EmitError, match=rf"{name}/thesis\.txt: no export wrote this file, and {name} is what an"):
        write_tree(root, NEW)
    assert tree_on_disk(root) == OLD
    assert (tmp_path / name / "thesis.txt").read_text() == "mine"


def test_torn_file_of_an_interrupted_export_is_removed(tmp_path: Path) -> None:
    root = tmp_path / "tiny"
    (tmp_path / ".tiny.new").mkdir()
    (tmp_path / ".tiny.new" / "a.cu").write_text(NEW["a.cu"][:60])
    (tmp_path / ".tiny.new" / "b.cu").write_text("")
    write_tree(root, NEW)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_write_over_a_users_file_under_a_name_of_the_tree_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "tiny"
    root.mkdir()
    (root / "a.cu").write_text("mine\n")
    with pytest.raises(EmitError, match=r"a\.cu: no export wrote this file"):
        write_tree(root, NEW)
    assert tree_on_disk(root) == {"a.cu": "mine\n"}
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


@pytest.mark.parametrize("kind", ["a file", "a link", "a dangling link"])
def test_write_over_what_is_no_folder_is_refused(tmp_path: Path, kind: str) -> None:
    root, target = tmp_path / "tiny", tmp_path / "target"
    if kind == "a file":
        root.write_text("mine\n")
    else:
        root.symlink_to(target)
        if kind == "a link":
            target.mkdir()
    before = everything(tmp_path)
    with pytest.raises(EmitError, match=r"tiny: is (no folder|a symbolic link), and a tree would take its place"):
        write_tree(root, NEW)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("name", ["a.cu", "pipe"])
def test_link_and_fifo_in_a_tree_are_nobodys_to_drop(tmp_path: Path, name: str) -> None:
    root = tmp_path / "tiny"
    write_tree(root, OLD)
    (root / name).unlink(missing_ok=True)
    os.mkfifo(root / name)
    for _ in range(2):
        assert not compare_tree(root, OLD).clean
        with pytest.raises(EmitError, match=f"{name}: no export wrote this file"):
            write_tree(root, OLD)
        (root / name).unlink()
        (root / name).symlink_to(tmp_path)
    assert (root / name).is_symlink()
