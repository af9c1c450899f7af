"""The cache's inventory: what it lists, which faults it sees, and that pruning takes what it says and no more."""

from __future__ import annotations

import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.compile.sources import PLAIN_REQUEST

from cakegen.compile import cache as cache_module
from cakegen.compile import cache_folder as cache_folder_module
from cakegen.compile import cached_cubin, clear_cache, inventory
from cakegen.compile.cache_folder import MARKER_FILE
from cakegen.compile.entry import read_entry, write_entry
from cakegen.compile.inventory import Pruned, list_files, prune_cache, read_entries, remove_files
from cakegen.errors import CompileError

DAY = 86_400


@pytest.fixture
def entries(cache_folder: Path) -> list[Path]:
    """Three entries, last used now, 10 and 40 days ago."""
    found = []
    for scale, age_days in ((1, 0), (2, 10), (3, 40)):
        before = set(cache_folder.rglob("*.cubin"))
        cached_cubin(replace(PLAIN_REQUEST, constants=(("SCALE", scale),)))
        (path,) = set(cache_folder.rglob("*.cubin")) - before
        os.utime(path, (time.time(), time.time() - age_days * DAY))
        found.append(path)
    return found


def test_list_names_programs_and_orders_them_by_last_use(entries: list[Path]) -> None:
    listed = read_entries(list_files())
    assert [entry.file.path for entry in listed] == entries
    assert {(entry.name, entry.arch, entry.fault) for entry in listed} == {("plain", "sm_90a", "")}
    assert all(entry.compiler.startswith("nvrtc-") for entry in listed)
    assert [entry.file.size_bytes for entry in listed] == [path.stat().st_size for path in entries]


def test_use_makes_an_entry_the_last_used(entries: list[Path]) -> None:
    assert cached_cubin(replace(PLAIN_REQUEST, constants=(("SCALE", 3),))).cached
    assert list_files()[0].path == entries[2]


def test_empty_cache_lists_verifies_and_prunes_to_nothing() -> None:
    assert list_files() == []
    assert prune_cache(older_than_days=0) == Pruned(0, 0)


def test_damaged_entries_are_seen_and_removed(entries: list[Path]) -> None:
    entries[0].write_bytes(entries[0].read_bytes()[:-1])
    stored = read_entry(entries[1])
    assert stored is not None
    whole = cached_cubin(replace(PLAIN_REQUEST, constants=(("SCALE", 2),)))
    write_entry(entries[1], whole, replace(PLAIN_REQUEST, kernel_symbol="kernel_other"))
    write_entry(entries[2], replace(whole, cubin=b"\x7fELF\x02\x01 and no more"), PLAIN_REQUEST)
    faults = {entry.file.path: entry.fault for entry in read_entries(list_files())}
    assert faults[entries[0]] == "damaged: no plain file, or its digest is not that of its rest"
    assert faults[entries[1]] == "does not define kernel_other"
    assert "damaged cubin of 18 bytes" in faults[entries[2]]
    remove_files(read_entries(list_files()))
    assert list_files() == []


def test_prune_by_age_takes_older_entries_and_their_locks(entries: list[Path]) -> None:
    size = entries[2].stat().st_size
    assert prune_cache(older_than_days=30, dry_run=True) == Pruned(1, size)
    assert entries[2].exists()
    assert prune_cache(older_than_days=30) == Pruned(1, size)
    assert [path.exists() for path in entries] == [True, True, False]
    assert [path.with_suffix(".lock").exists() for path in entries] == [True, True, False]
    assert not cached_cubin(replace(PLAIN_REQUEST, constants=(("SCALE", 3),))).cached


def test_prune_by_size_keeps_the_last_used_that_fit(entries: list[Path]) -> None:
    sizes = [path.stat().st_size for path in entries]
    assert prune_cache(most_bytes=sum(sizes)) == Pruned(0, 0)
    assert prune_cache(most_bytes=sum(sizes[:2]), dry_run=True) == Pruned(1, sizes[2])
    assert prune_cache(most_bytes=sum(sizes[:2]) - 1) == Pruned(2, sizes[1] + sizes[2]), "no older one fills the gap"
    assert prune_cache(most_bytes=0) == Pruned(1, sizes[0])


def test_prune_takes_other_schemas_and_old_partials_only(entries: list[Path], cache_folder: Path) -> None:
    other = cache_folder / "v0" / entries[0].name
    other.parent.mkdir(mode=0o700)
    (other.parent / MARKER_FILE).touch()
    other.write_bytes(b"12345")
    fresh, left = (entries[0].with_name(f"{entries[0].stem}.{digit * 32}.partial") for digit in "ab")
    for path in (fresh, left):
        path.write_bytes(b"123")
    os.utime(left, (0, time.time() - 2 * 3600))
    assert [entry.fault for entry in read_entries(list_files())] == [""] * 4, "how v0 wrote its entries is not known"
    assert prune_cache() == Pruned(2, 8)
    assert (other.exists(), left.exists(), fresh.exists()) == (False, False, True)
    assert all(path.exists() for path in entries)


def test_prune_leaves_a_lock_that_is_held(entries: list[Path]) -> None:
    lock = entries[0].with_suffix(".lock")
    with cache_module.locked(lock):
        prune_cache(most_bytes=0)
        assert lock.exists()
    prune_cache()
    assert not lock.exists()


def test_prune_leaves_the_successor_of_a_lock_that_another_pruning_removed(
    entries: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prune at once: the slower one locks a file that is gone, and must not remove what has its name now."""
    lock = entries[0].with_suffix(".lock")
    original = inventory.try_lock

    def slow(descriptor: int) -> bool:
        if lock.exists():
            lock.unlink()
            lock.touch()
        return original(descriptor)

    monkeypatch.setattr(inventory, "try_lock", slow)
    prune_cache(most_bytes=0)
    assert lock.exists()


def test_folder_that_can_not_be_read_is_named_and_not_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service's home may be another user's."""

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cache_folder_module.os, "listdir", refuse)
    for act in (list_files, prune_cache, clear_cache):
        with pytest.raises(CompileError, match=r"cache: can't be read \(Permission denied\); set CAKEGEN_CACHE_DIR"):
            act()


def test_waiter_takes_the_successor_of_a_lock_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a waiter would hold a file that nobody else can see, and two processes would compile one program."""
    lock, try_lock = tmp_path / "x.lock", cache_module.try_lock
    asked, inside = threading.Event(), threading.Event()

    def noted(descriptor: int) -> bool:
        asked.set()
        return try_lock(descriptor)

    with cache_module.locked(lock):
        monkeypatch.setattr(cache_module, "try_lock", noted)

        def wait() -> None:
            with cache_module.locked(lock):
                assert cache_module.is_at(os.open(lock, os.O_RDONLY), lock)
                inside.set()

        waiter = threading.Thread(target=wait)
        waiter.start()
        asked.wait()
        lock.unlink()
    waiter.join()
    assert inside.is_set()
    assert lock.exists()


def test_waiter_whose_folder_was_removed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor that is closed twice may by then be another thread's file."""
    lock = tmp_path / "cache" / "x.lock"
    lock.parent.mkdir()

    def remove(descriptor: int, path: Path) -> bool:
        shutil.rmtree(lock.parent)
        return False

    monkeypatch.setattr(cache_module, "is_at", remove)
    with pytest.raises(FileNotFoundError), cache_module.locked(lock):
        pass


def test_file_that_can_not_be_removed_is_named(entries: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(CompileError, match=rf"{entries[0].name}: can't be removed \(Permission denied\)"):
        remove_files(read_entries(list_files()))
