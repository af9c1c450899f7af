"""The compile cache: its key, its entries, and many processes at once."""

from __future__ import annotations

import threading
import warnings
from dataclasses import fields, replace
from pathlib import Path

import pytest
from support.compile.sources import HEADER, PLAIN_REQUEST

from cakegen.compile import CacheWarning, CompileRequest, cache_key, cache_root, cached_cubin, clear_cache
from cakegen.compile import cache as cache_module
from cakegen.compile.cache_folder import MARKER_FILE
from cakegen.errors import CompileError

CHANGED = {
    "name": "other",
    "arch": "sm_100a",
    "source": PLAIN_REQUEST.source + " ",
    "headers": (("scaled.cuh", HEADER + " "),),
    "flags": ("-std=c++17", "-DCAKEGEN_CHAOS"),
    "constants": (("SCALE", 4),),
    "kernel_symbol": "kernel_other",
}


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[CompileRequest]:
    """Every request that reached the compiler."""
    seen: list[CompileRequest] = []
    original = cache_module.compile_cubin

    def counted(request: CompileRequest) -> object:
        seen.append(request)
        return original(request)

    monkeypatch.setattr(cache_module, "compile_cubin", counted)
    return seen


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.cubin"))


def test_cache_root_follows_its_variable_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", "/named")
    assert cache_root() == Path("/named")
    monkeypatch.delenv("CAKEGEN_CACHE_DIR")
    assert cache_root() == Path("/xdg/cakegen")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root() == Path.home() / ".cache" / "cakegen"


@pytest.mark.parametrize("field", [f.name for f in fields(CompileRequest)])
def test_cache_key_depends_on_every_field(field: str) -> None:
    changed = replace(PLAIN_REQUEST, **{field: CHANGED[field]})
    assert cache_key(changed, "nvrtc-13.0.88") != cache_key(PLAIN_REQUEST, "nvrtc-13.0.88")


def test_cache_key_depends_on_compiler_and_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    first = cache_key(PLAIN_REQUEST, "nvrtc-13.0.88")
    assert cache_key(PLAIN_REQUEST, "nvrtc-13.0.89") != first
    monkeypatch.setattr(cache_module, "CACHE_SCHEMA", cache_module.CACHE_SCHEMA + 1)
    assert cache_key(PLAIN_REQUEST, "nvrtc-13.0.88") != first


def test_cache_key_tells_fields_from_each_other() -> None:
    """Text that moves over a boundary between two fields is another request."""
    first = replace(PLAIN_REQUEST, flags=("-DA", "-DB"), constants=())
    second = replace(PLAIN_REQUEST, flags=("-DA-DB",), constants=())
    third = replace(PLAIN_REQUEST, headers=(("a", "bc"),), flags=())
    fourth = replace(PLAIN_REQUEST, headers=(("ab", "c"),), flags=())
    assert len({cache_key(request, "n") for request in (first, second, third, fourth)}) == 4


def test_second_call_reads_the_first_ones_cubin(compiles: list[CompileRequest]) -> None:
    first, second = cached_cubin(PLAIN_REQUEST), cached_cubin(PLAIN_REQUEST)
    assert len(compiles) == 1
    assert (first.cached, second.cached) == (False, True)
    assert replace(second, cached=False) == first


def test_each_constant_has_its_own_entry(compiles: list[CompileRequest], cache_folder: Path) -> None:
    cached_cubin(PLAIN_REQUEST)
    cached_cubin(replace(PLAIN_REQUEST, constants=(("SCALE", 4),)))
    assert len(compiles) == 2
    assert len(_entries(cache_folder)) == 2


DAMAGES = {
    "empty": lambda whole: b"",
    "head only": lambda whole: whole[: whole.index(b"\n") + 1],
    "cut short": lambda whole: whole[:-100],
    "zeros at the end": lambda whole: whole[:-4096] + bytes(4096),
    "one bit": lambda whole: whole[:-200] + bytes([whole[-200] ^ 1]) + whole[-199:],
    "appended": lambda whole: whole + b"\0",
    "bare cubin": lambda whole: whole[whole.index(b"\x7fELF") :],
    "other text": lambda whole: b"<html>",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entry_is_compiled_again(damage: str, compiles: list[CompileRequest], cache_folder: Path) -> None:
    whole = cached_cubin(PLAIN_REQUEST)
    (entry,) = _entries(cache_folder)
    entry.write_bytes(DAMAGES[damage](entry.read_bytes()))
    again = cached_cubin(PLAIN_REQUEST)
    assert len(compiles) == 2
    assert (again.cached, again.cubin) == (False, whole.cubin)
    assert cached_cubin(PLAIN_REQUEST).cached


def test_entry_of_another_kernel_under_this_key_is_compiled_again(
    compiles: list[CompileRequest], cache_folder: Path
) -> None:
    """A whole entry, digest included, that does not define the kernel asked for."""
    cached_cubin(PLAIN_REQUEST)
    (entry,) = _entries(cache_folder)
    stranger = replace(PLAIN_REQUEST, source=PLAIN_REQUEST.source.replace("kernel_plain", "kernel_odd"))
    stranger = replace(stranger, kernel_symbol="kernel_odd")
    cached_cubin(stranger)
    (other,) = set(_entries(cache_folder)) - {entry}
    entry.write_bytes(other.read_bytes())
    assert not cached_cubin(PLAIN_REQUEST).cached
    assert compiles == [PLAIN_REQUEST, stranger, PLAIN_REQUEST]


def test_refused_program_leaves_no_entry_and_is_tried_again(cache_folder: Path, compiles: list[CompileRequest]) -> None:
    for _ in range(2):
        with pytest.raises(CompileError):
            cached_cubin(replace(PLAIN_REQUEST, source="int broken = ;"))
    assert len(compiles) == 2
    assert _entries(cache_folder) == []
    assert list(cache_folder.rglob("*.partial")) == []


def test_folder_that_cannot_be_made_warns_once_and_compiles(
    compiles: list[CompileRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", str(blocked))
    with pytest.warns(CacheWarning, match="Set CAKEGEN_CACHE_DIR"):
        assert cached_cubin(PLAIN_REQUEST).cubin
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cached_cubin(PLAIN_REQUEST).cubin
    assert len(compiles) == 1, "kept in memory"


def test_full_disk_warns_and_returns_the_program_compiled_once(
    compiles: list[CompileRequest], cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module.os, "fsync", full)
    with pytest.warns(CacheWarning, match="No space left on device"):
        program = cached_cubin(PLAIN_REQUEST)
    assert program.cubin
    assert len(compiles) == 1
    assert [p.suffix for p in cache_folder.rglob("*") if p.is_file() and p.name != MARKER_FILE] == [".lock"]


def test_interrupted_write_leaves_the_old_state(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache_module.os, "replace", stopped)
        with pytest.raises(KeyboardInterrupt):
            cached_cubin(PLAIN_REQUEST)
    assert [p.suffix for p in cache_folder.rglob("*") if p.is_file() and p.name != MARKER_FILE] == [".lock"]
    assert not cached_cubin(PLAIN_REQUEST).cached


def test_stuck_lock_holder_does_not_stop_others(
    compiles: list[CompileRequest], cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_cubin(PLAIN_REQUEST)
    (lock,) = cache_folder.rglob("*.lock")
    (entry,) = _entries(cache_folder)
    entry.unlink()
    monkeypatch.setattr(cache_module, "_LOCK_SECONDS", 0.1)
    with cache_module.locked(lock):
        assert cached_cubin(PLAIN_REQUEST).cubin
    assert len(compiles) == 2


def test_clear_cache_removes_entries_of_every_schema_and_keeps_locks(cache_folder: Path) -> None:
    cached_cubin(PLAIN_REQUEST)
    older = cache_folder / "v0"
    older.mkdir(mode=0o700)
    (older / MARKER_FILE).touch()
    (older / f"{'0' * 64}.cubin").write_bytes(b"")
    assert clear_cache() == 2
    assert _entries(cache_folder) == []
    assert len(list(cache_folder.rglob("*.lock"))) == 1
    assert clear_cache() == 0


def test_cache_that_was_never_made_clears_to_nothing() -> None:
    assert clear_cache() == 0


def test_threads_on_a_cold_cache_compile_once(compiles: list[CompileRequest]) -> None:
    start = threading.Barrier(8)
    cubins: list[bytes] = []

    def ask() -> None:
        start.wait()
        cubins.append(cached_cubin(PLAIN_REQUEST).cubin)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiles) == 1
    assert len(cubins) == 8
    assert len(set(cubins)) == 1
