"""A bundle that is made again: while others read it, by two at once, and by a process that is killed."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from support.compile.ends import end_at_call
from support.compile.sources import PLAIN_REQUEST

from cakegen.compile import CompiledProgram, CompileRequest, cached_cubin
from cakegen.compile import bundle as bundle_module
from cakegen.compile.bundle import open_bundle, write_bundle
from cakegen.errors import CompileError

CONTEXT = multiprocessing.get_context("fork")
VERSIONS = 7


@pytest.fixture
def whole() -> CompiledProgram:
    return cached_cubin(PLAIN_REQUEST)


def request_of(version: int, program: int) -> CompileRequest:
    return replace(PLAIN_REQUEST, name=f"plain{version}", constants=(("PROGRAM", program),))


def write_version(folder: Path, version: int, whole: CompiledProgram) -> None:
    """A bundle of three programs that no other version holds; the cubin in them is one and the same."""
    made = [(request_of(version, program), replace(whole, log=f"{version} {program}"), ["a"]) for program in range(3)]
    write_bundle(folder, "small", made)


def version_of(folder: Path) -> int:
    """Which version a folder holds; all of it is read."""
    bundle = open_bundle(folder)
    held = {line.program for line in bundle.programs.values()}
    (version,) = (each for each in range(VERSIONS) if request_of(each, 0).name in held)
    logs = [bundle.program(request_of(version, program)).log for program in range(3)]
    assert logs == [f"{version} {program}" for program in range(3)]
    return version


def _write_for_ever(folder: Path, whole: CompiledProgram) -> None:
    for version in itertools.count():
        write_version(folder, version % VERSIONS, whole)


def _write_until_killed(folder: Path, whole: CompiledProgram, step: int) -> None:
    """The process kills itself at one of the calls that change what is on the disk."""
    end_at_call(step)
    _write_for_ever(folder, whole)


def test_kill_at_any_step_leaves_the_old_bundle_or_the_new_one(whole: CompiledProgram, tmp_path: Path) -> None:
    folder, halves = tmp_path / "bundle", 0
    write_version(folder, VERSIONS - 1, whole)
    for step in range(50):
        process = CONTEXT.Process(target=_write_until_killed, args=(folder, whole, step))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert version_of(folder) in range(VERSIONS)
        halves += len(list(folder.iterdir())) != 4
    assert halves > 10, "too few kills fell into a write; the test would prove nothing"
    write_version(folder, 0, whole)
    assert len(list(folder.iterdir())) == 4, "what killed writers left is gone"


def test_reader_finds_a_bundle_at_any_moment_while_two_write(whole: CompiledProgram, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    write_version(folder, 0, whole)
    writers = [CONTEXT.Process(target=_write_for_ever, args=(folder, whole)) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        found, number = set(), 0
        while number < 300 or len(found) < 4:
            found.add(next(iter(open_bundle(folder).programs.values())).sha256)
            number += 1
    finally:
        for writer in writers:
            writer.kill()
            writer.join()


def test_bundle_that_is_open_while_it_is_made_again_gives_the_new_files(whole: CompiledProgram, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    write_bundle(folder, "small", [(PLAIN_REQUEST, replace(whole, log="old"), ["a"])])
    opened = open_bundle(folder)
    write_bundle(folder, "small", [(PLAIN_REQUEST, replace(whole, log="new"), ["a"])])
    assert opened.program(PLAIN_REQUEST).log == "new"
    write_version(folder, 0, whole)
    with pytest.raises(CompileError, match="holds 3 programs for sm_90a, and not plain"):
        opened.program(PLAIN_REQUEST)


def test_what_a_killed_writer_left_of_a_first_bundle_is_taken_over(whole: CompiledProgram, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    for name in (f"program-{'0' * 64}.cubin", f"program-{'1' * 64}.{'2' * 32}.partial", f"bundle.{'3' * 32}.partial"):
        (folder / name).write_bytes(b"half")
    write_version(folder, 0, whole)
    assert version_of(folder) == 0
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("name", ["notes", f"{'0' * 64}.cubin"])
def test_folder_of_somebody_elses_files_is_refused_and_left_alone(
    name: str, whole: CompiledProgram, tmp_path: Path
) -> None:
    """The second is how the compile cache names its entries."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / name).write_bytes(b"mine")
    with pytest.raises(CompileError, match=rf"holds something that is no bundle \({name}\)"):
        write_version(folder, 0, whole)
    assert [path.name for path in folder.iterdir()] == [name]


def test_bundle_of_the_first_schema_is_refused_and_replaced_without_a_trace(
    whole: CompiledProgram, tmp_path: Path
) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "bundle.json").write_text('{"schema": 1, "export": "small", "programs": {}}')
    (folder / f"{'0' * 64}.cubin").write_bytes(b"old")
    with pytest.raises(CompileError, match=r"schema 1; this cakegen reads 3\. Make the bundle again"):
        open_bundle(folder)
    write_version(folder, 0, whole)
    assert version_of(folder) == 0
    assert len(list(folder.iterdir())) == 4


def test_first_bundle_that_can_not_be_finished_leaves_no_folder(
    whole: CompiledProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CompileError, match="No space left on device"):
        write_version(tmp_path / "new", 0, whole)
    assert not (tmp_path / "new").exists()


def test_process_forked_while_a_bundle_is_written_does_not_stop_the_next_writer(
    whole: CompiledProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that the child kept would be refused at once."""
    folder, end = tmp_path / "bundle", CONTEXT.Event()
    folder.mkdir()
    monkeypatch.setattr(bundle_module, "_LOCK_SECONDS", 0.0)
    with bundle_module._written_alone(folder):
        child = CONTEXT.Process(target=end.wait)
        child.start()
    try:
        write_version(folder, 1, whole)
    finally:
        end.set()
        child.join()


def test_writer_that_is_stopped_does_not_hold_up_the_next_one_for_ever(
    whole: CompiledProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bundle"
    write_version(folder, 1, whole)
    monkeypatch.setattr(bundle_module, "_LOCK_SECONDS", 0.1)
    with bundle_module._written_alone(folder):
        with pytest.raises(CompileError, match=r"another process has been writing this bundle for 0\.1 s"):
            write_version(folder, 2, whole)
        assert version_of(folder) == 1
