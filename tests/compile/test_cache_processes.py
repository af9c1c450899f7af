"""The cache and processes: many at once, killed ones, and a disk that is full or read-only."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.compile.ends import end_at_call
from support.compile.sources import PLAIN_REQUEST

from cakegen.compile import CacheWarning, CompileRequest, cached_cubin
from cakegen.compile import cache as cache_module
from cakegen.compile.cache_folder import CACHE_SCHEMA, MARKER_FILE
from cakegen.compile.entry import read_entry

NOBODY = 65534
CONTEXT = multiprocessing.get_context("fork")


def request_of(scale: int) -> CompileRequest:
    return replace(PLAIN_REQUEST, constants=(("SCALE", scale),))


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked process, as JSON; the test fails with the process."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        os.chmod(folder, 0o777)

        def run() -> None:
            answer.write_text(json.dumps(work()))

        process = CONTEXT.Process(target=run)
        process.start()
        process.join()
        assert process.exitcode == 0
        return json.loads(answer.read_text())


def _ask_all(scales: list[int], start: Any, report: Path) -> None:
    start.wait()
    programs = {scale: cached_cubin(request_of(scale)) for scale in scales}
    report.write_text(json.dumps({scale: [p.cached, len(p.cubin)] for scale, p in programs.items()}))


def test_sixteen_processes_on_a_cold_cache_compile_each_program_once(tmp_path: Path) -> None:
    """`cached` is false exactly where a process called the compiler. Each process asks in an order of its own."""
    scales = [3, 4, 5]
    start = CONTEXT.Barrier(16)
    reports = [tmp_path / f"{rank}.json" for rank in range(16)]
    orders = [random.Random(rank).sample(scales, 3) for rank in range(16)]
    processes = [
        CONTEXT.Process(target=_ask_all, args=(order, start, report))
        for order, report in zip(orders, reports, strict=True)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 16
    compiled: Counter[str] = Counter()
    for report in reports:
        compiled.update(scale for scale, (cached, _) in json.loads(report.read_text()).items() if not cached)
    assert compiled == {str(scale): 1 for scale in scales}


def _store_until_killed(journal: Path, step: int) -> None:
    """Ask for one program after the other; each that was returned is journalled before the next.

    The process kills itself at one of the calls that change what is on the disk.
    """
    whole = cached_cubin(PLAIN_REQUEST)
    cache_module.compile_cubin = lambda request: replace(whole, cached=False)
    end_at_call(step)
    with journal.open("a", buffering=1) as lines:
        for scale in itertools.count():
            cached_cubin(request_of(scale))
            lines.write(f"{scale}\n")


def test_kill_at_any_step_loses_no_entry_and_leaves_none_torn(cache_folder: Path, tmp_path: Path) -> None:
    """Real entries; the steps are those of about three of them."""
    journal = tmp_path / "journal"
    partials, stored = 0, 0
    for step in range(24):
        process = CONTEXT.Process(target=_store_until_killed, args=(journal, step))
        journal.write_text("")
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        partials += len(list(cache_folder.rglob("*.partial")))
        for path in cache_folder.rglob("*.cubin"):
            assert read_entry(path) is not None, f"{path} is torn"
        returned = [int(line) for line in journal.read_text().splitlines()]
        stored = max(stored, len(returned))
        assert all(cached_cubin(request_of(scale)).cached for scale in returned)
        shutil.rmtree(cache_folder)
    assert partials > 5, "too few kills fell into a write; the test would prove nothing"
    assert stored > 1


def test_lock_of_a_killed_process_is_free(cache_folder: Path) -> None:
    cached_cubin(PLAIN_REQUEST)
    (lock,) = cache_folder.rglob("*.lock")
    (entry,) = cache_folder.rglob("*.cubin")
    held = CONTEXT.Event()

    def hold() -> None:
        with cache_module.locked(lock):
            held.set()
            signal.pause()

    process = CONTEXT.Process(target=hold)
    process.start()
    held.wait()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    entry.unlink()
    descriptor = os.open(lock, os.O_RDWR)
    assert cache_module.try_lock(descriptor)
    os.close(descriptor)
    assert not cached_cubin(PLAIN_REQUEST).cached


def _twice() -> dict[str, Any]:
    """Ask twice for one program, and tell what was compiled and warned."""
    compiled: list[int] = []
    original = cache_module.compile_cubin

    def count(request: CompileRequest) -> Any:
        compiled.append(1)
        return original(request)

    cache_module.compile_cubin = count
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        programs = [cached_cubin(request_of(77)) for _ in range(2)]
    return {
        "compiled": len(compiled),
        "cached": [program.cached for program in programs],
        "same": programs[0].cubin == programs[1].cubin,
        "warnings": [str(warning.message) for warning in caught if warning.category is CacheWarning],
    }


def test_disk_that_takes_no_more_bytes_degrades_to_memory_with_one_warning(cache_folder: Path) -> None:
    """A limit on a file's size stands for a full disk: the system refuses in the middle of a write."""

    def work() -> dict[str, Any]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        return _twice()  # the answer itself is shorter than the limit

    answer = in_child(work)
    assert (answer["compiled"], answer["cached"], answer["same"]) == (1, [False, True], True)
    (warning,) = answer["warnings"]
    assert "File too large" in warning
    assert "Set CAKEGEN_CACHE_DIR" in warning
    files = [path for path in cache_folder.rglob("*") if path.is_file() and path.name != MARKER_FILE]
    assert [path.suffix for path in files] == [".lock"]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def _without_privileges(work: Callable[[], Any]) -> Any:
    def dropped() -> Any:
        if os.geteuid() == 0:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        return work()

    return in_child(dropped)


def test_read_only_cache_serves_what_it_holds_and_compiles_the_rest_in_memory(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder / "cache"
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", str(folder))
    cached_cubin(PLAIN_REQUEST)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    for path in (folder / f"v{CACHE_SCHEMA}", folder):
        path.chmod(0o555)
    try:
        held = _without_privileges(lambda: cached_cubin(PLAIN_REQUEST).cached)
        other = _without_privileges(_twice)
    finally:
        for path in (folder, folder / f"v{CACHE_SCHEMA}"):
            path.chmod(0o755)
    assert held is True
    assert (other["compiled"], other["cached"]) == (1, [False, True])
    (warning,) = other["warnings"]
    assert "Permission denied" in warning
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_user_without_a_home_keeps_programs_in_memory_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CAKEGEN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    answer = in_child(_twice)
    assert (answer["compiled"], answer["cached"]) == (1, [False, True])
    (warning,) = answer["warnings"]
    assert "has no home" in warning


def test_process_forked_while_a_lock_is_held_does_not_keep_it(tmp_path: Path) -> None:
    """A fork copies the open lock: data loaders are forked while a thread compiles, and live as long as the server."""
    lock, end = tmp_path / "x.lock", CONTEXT.Event()
    with cache_module.locked(lock):
        child = CONTEXT.Process(target=end.wait)
        child.start()
    try:
        descriptor = os.open(lock, os.O_RDWR)
        assert cache_module.try_lock(descriptor)
        os.close(descriptor)
    finally:
        end.set()
        child.join()
