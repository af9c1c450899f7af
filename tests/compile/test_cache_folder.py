"""The cache's folder is this user's alone, and nothing is removed from it that cakegen did not write."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from support.compile.sources import PLAIN_REQUEST

from cakegen.compile import CacheWarning, cache_root, cached_cubin, clear_cache
from cakegen.compile import cache as cache_module
from cakegen.compile import cache_folder as module
from cakegen.compile.cache_folder import CACHE_SCHEMA, MARKER_FILE, cache_files, default_root
from cakegen.compile.entry import read_entry
from cakegen.compile.inventory import Pruned, list_files, prune_cache
from cakegen.errors import CompileError

SCHEMA = f"v{CACHE_SCHEMA}"
OTHER = replace(PLAIN_REQUEST, constants=(("SCALE", 9),))
STRANGER = 12345


@pytest.fixture
def filled(cache_folder: Path) -> Path:
    """A cache of one entry; the process remembers none."""
    cached_cubin(PLAIN_REQUEST)
    return cache_folder


def refused(message: str) -> None:
    """The cache is not used, with one warning that holds the message, nor listed, pruned or cleared."""
    before = sorted(cache_root().rglob("*"))
    with pytest.warns(CacheWarning, match=message):
        assert not cached_cubin(PLAIN_REQUEST).cached
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cached_cubin(PLAIN_REQUEST).cached, "kept in memory"
    for act in (list_files, prune_cache, clear_cache):
        with pytest.raises(CompileError, match=message):
            act()
    assert sorted(cache_root().rglob("*")) == before


def test_new_folder_is_this_users_alone_and_marked(filled: Path) -> None:
    for folder in (filled, filled / SCHEMA):
        assert folder.stat().st_mode & 0o077 == 0
    assert (filled / SCHEMA / MARKER_FILE).read_text().startswith("This folder was made by cakegen")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o702])
@pytest.mark.parametrize("name", ["", SCHEMA])
def test_folder_that_others_can_write_is_refused_with_what_to_do(filled: Path, name: str, mode: int) -> None:
    (filled / name).chmod(mode)
    refused(rf"{filled / name}: other users can write it \(mode {mode:o}\).* Run `chmod go-w {filled / name}`, or set")
    (filled / name).chmod(0o755)
    assert cached_cubin(PLAIN_REQUEST).cached


@pytest.mark.parametrize("name", ["", SCHEMA])
def test_folder_of_another_user_is_refused(filled: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Without a second user at hand: the folder's owner is this process's user, who is somebody else now."""
    if os.geteuid() == 0:
        os.chown(filled / name, STRANGER, -1)
        refused(rf"{filled / name}: belongs to user {STRANGER}, .* Set CAKEGEN_CACHE_DIR to a folder of your own")
    else:
        monkeypatch.setattr(module.os, "geteuid", lambda: STRANGER)
        refused("belongs to user .* Set CAKEGEN_CACHE_DIR to a folder of your own")


def test_folder_of_the_administrator_serves_everybody(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs to be the administrator, whose folder it is")
    monkeypatch.setattr(module.os, "geteuid", lambda: STRANGER)
    assert cached_cubin(PLAIN_REQUEST).cached


def test_root_may_be_reached_through_a_link_and_leads_to_none(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(filled)
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", str(tmp_path / "link"))
    assert cached_cubin(PLAIN_REQUEST).cached
    (filled / SCHEMA).rename(tmp_path / "elsewhere")
    (filled / SCHEMA).symlink_to(tmp_path / "elsewhere")
    refused(f"{SCHEMA}: is a symbolic link, which the compile cache does not follow")


def entry_of(folder: Path) -> Path:
    (entry,) = (folder / SCHEMA).glob("*.cubin")
    return entry


def test_entry_that_is_a_link_is_a_miss_and_its_target_stays(filled: Path, tmp_path: Path) -> None:
    entry = entry_of(filled)
    target = tmp_path / "target"
    entry.rename(target)
    entry.symlink_to(target)
    assert read_entry(entry) is None
    whole = target.read_bytes()
    assert not cached_cubin(PLAIN_REQUEST).cached
    assert not entry.is_symlink()
    assert target.read_bytes() == whole


def test_entry_that_is_a_fifo_or_absurdly_large_is_a_miss(filled: Path) -> None:
    entry = entry_of(filled)
    entry.unlink()
    os.mkfifo(entry)
    assert not cached_cubin(PLAIN_REQUEST).cached
    with entry.open("r+b") as stream:
        stream.truncate(2**40)  # a hole of a terabyte
    assert read_entry(entry) is None
    assert not cached_cubin(PLAIN_REQUEST).cached
    assert cached_cubin(PLAIN_REQUEST).cached


def test_lock_that_is_a_link_or_a_fifo_is_not_opened(filled: Path, tmp_path: Path) -> None:
    (lock,) = (filled / SCHEMA).glob("*.lock")
    entry_of(filled).unlink()
    lock.unlink()
    lock.symlink_to(tmp_path / "made")
    with pytest.warns(CacheWarning, match="can't be used"):
        assert cached_cubin(PLAIN_REQUEST).cubin
    assert not (tmp_path / "made").exists()


def test_entries_of_two_requests_that_were_exchanged_are_compiled_again(filled: Path) -> None:
    """Whole files, each under the other's name: two specialisations of one program define the same kernel."""
    first = entry_of(filled)
    cached_cubin(OTHER)
    (second,) = set((filled / SCHEMA).glob("*.cubin")) - {first}
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
    for request, wanted in ((PLAIN_REQUEST, one), (OTHER, two)):
        again = cached_cubin(request)
        assert not again.cached
        assert again.cubin == wanted[-len(again.cubin) :]


def test_entry_of_another_compiler_is_compiled_again(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = entry_of(filled)
    monkeypatch.setattr(cache_module, "compiler_version", lambda nvrtc: "nvrtc-99.0.0")
    key = cache_module.cache_key(PLAIN_REQUEST, "nvrtc-99.0.0")
    entry.rename(entry.with_name(f"{key}.cubin"))
    assert not cached_cubin(PLAIN_REQUEST).cached


@pytest.fixture
def strange(cache_folder: Path) -> Path:
    """A folder of the user's own with files as a cache has them, which `CAKEGEN_CACHE_DIR` names by mistake."""
    folder = cache_folder / "v1"
    folder.mkdir(parents=True, mode=0o700)
    cache_folder.chmod(0o700)
    for name in ("package.lock", "video.partial", f"{'0' * 64}.lock", f"{'0' * 64}.{'1' * 32}.partial"):
        (folder / name).write_text("the user's own")
        os.utime(folder / name, (0, 0))
    return cache_folder


def test_nothing_is_removed_from_a_folder_without_the_marker(strange: Path) -> None:
    before = sorted(strange.rglob("*"))
    for act in (prune_cache, clear_cache, list_files):
        with pytest.raises(CompileError, match=rf"v1: holds no {MARKER_FILE}, so cakegen did not make it"):
            act()
    assert sorted(strange.rglob("*")) == before


def test_of_a_marked_folder_files_of_other_names_stay(strange: Path) -> None:
    (strange / "v1" / MARKER_FILE).touch()
    assert prune_cache() == Pruned(1, len("the user's own"))
    assert sorted(path.name for path in (strange / "v1").iterdir()) == [MARKER_FILE, "package.lock", "video.partial"]


def test_default_folder_needs_no_marker_since_versions_before_it_wrote_there(
    strange: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CAKEGEN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(strange.parent))
    strange.rename(default_root())
    assert prune_cache() == Pruned(1, len("the user's own"))
    assert (default_root() / "v1" / "package.lock").exists()


def test_prune_goes_through_no_link(filled: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in (MARKER_FILE, f"{'0' * 64}.lock", f"{'0' * 64}.cubin"):
        (outside / name).write_text("x")
    (filled / "v1").symlink_to(outside)
    with pytest.raises(CompileError, match="v1: is a symbolic link"):
        prune_cache()
    (filled / "v1").unlink()
    (filled / SCHEMA / f"{'0' * 64}.lock").symlink_to(outside / f"{'0' * 64}.lock")
    (filled / SCHEMA / f"{'0' * 64}.cubin").symlink_to(outside / f"{'0' * 64}.cubin")
    with pytest.raises(CompileError, match=r"can't be removed \(Too many levels of symbolic links\)"):
        prune_cache(most_bytes=0)
    assert len(list(outside.iterdir())) == 3


def test_folder_of_the_users_own_files_is_not_written_into(cache_folder: Path) -> None:
    (cache_folder / SCHEMA).mkdir(parents=True, mode=0o700)
    cache_folder.chmod(0o700)
    (cache_folder / SCHEMA / "thesis.txt").write_text("x")
    with pytest.warns(CacheWarning, match=f"{SCHEMA}: holds files that cakegen did not write, and no {MARKER_FILE}"):
        assert cached_cubin(PLAIN_REQUEST).cubin
    assert [path.name for path in (cache_folder / SCHEMA).iterdir()] == ["thesis.txt"]


def test_folder_whose_maker_was_killed_before_the_marker_gets_it(cache_folder: Path) -> None:
    (cache_folder / SCHEMA).mkdir(parents=True, mode=0o700)
    cache_folder.chmod(0o700)
    cached_cubin(PLAIN_REQUEST)
    assert (cache_folder / SCHEMA / MARKER_FILE).is_file()
    assert len(cache_files(".cubin")) == 1


def test_home_folder_of_the_variable_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", "~/x")
    assert cache_root() == tmp_path / "x"
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", "~nobody-of-that-name/x")
    with pytest.raises(CompileError, match="CAKEGEN_CACHE_DIR=~nobody-of-that-name/x: there is no such home folder"):
        cache_root()


def test_cache_that_is_a_file_is_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(CompileError, match=r"file: can't be read \(Not a directory\)"):
        list_files()
