"""What the compile cache holds, whether it is whole, and what can go. Imports this package."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cakegen.compile.cache import close_lock, is_at, try_lock
from cakegen.compile.cache_folder import ENTRY_SUFFIX, LOCK_SUFFIX, PARTIAL_SUFFIX, cache_files, schema_folder
from cakegen.compile.cubin import CubinReader
from cakegen.compile.entry import read_entry
from cakegen.errors import CompileError

_DAY_SECONDS = 86_400.0
# A write takes milliseconds; what has lain beside an entry for so long was left by a process that was killed.
_PARTIAL_SECONDS = 3_600.0


@dataclass(frozen=True)
class CacheFile:
    """One entry's file.

    Parameters
    ----------
    size_bytes
        Of the file.
    used_at
        Seconds since the epoch: when a process last took the entry, or wrote it.
    current
        Whether it is of this version's schema; others are never read.
    """

    path: Path
    size_bytes: int
    used_at: float
    current: bool

    @property
    def key(self) -> str:
        """The 64 hex digits of its name."""
        return self.path.stem


@dataclass(frozen=True)
class CacheEntry:
    """A file with what it holds; the texts are empty where it is damaged, or of another version."""

    file: CacheFile
    name: str
    arch: str
    compiler: str
    fault: str


@dataclass(frozen=True)
class Pruned:
    """What a pruning removed (or would): files, and their bytes."""

    files: int
    size_bytes: int


def list_files() -> list[CacheFile]:
    """The entries of every schema, those used last first.

    Raises
    ------
    CompileError
        There is no folder for a cache, or it can't be read.
    """
    current = schema_folder()
    found = []
    for path in cache_files(ENTRY_SUFFIX):
        try:
            status = path.lstat()
        except OSError:
            continue  # gone since the folder was read
        found.append(CacheFile(path, status.st_size, status.st_mtime, path.parent == current))
    return sorted(found, key=lambda file: (-file.used_at, file.path))


def read_entries(files: Sequence[CacheFile]) -> list[CacheEntry]:
    """Each file with what it holds, and what is wrong with it."""
    return [_read(file) for file in files]


def _read(file: CacheFile) -> CacheEntry:
    if not file.current:
        # how another version writes an entry is not known here
        return CacheEntry(file, "", "", "", "")
    stored = read_entry(file.path)
    if stored is None:
        return CacheEntry(file, "", "", "", "damaged: no plain file, or its digest is not that of its rest")
    try:
        functions = CubinReader(stored.cubin, str(file.path)).functions
    except CompileError as error:
        return CacheEntry(file, stored.word("name"), stored.word("arch"), stored.compiler, str(error))
    kernel = stored.word("kernel_symbol")
    fault = "" if kernel in functions else f"does not define {kernel}"
    return CacheEntry(file, stored.word("name"), stored.word("arch"), stored.compiler, fault)


def prune_cache(
    *,
    older_than_days: float | None = None,
    most_bytes: int | None = None,
    dry_run: bool = False,
    now: float | None = None,
) -> Pruned:
    """Remove what no version will read again, and entries that were not used for long or do not fit.

    Entries of other schemas, what killed processes left of a write, and locks without an entry go in any case. An entry
    that a process is reading stays readable for it.

    Parameters
    ----------
    older_than_days
        Remove entries that were last used longer ago.
    most_bytes
        Remove entries, those used longest ago first, until the rest takes no more.
    dry_run
        Remove nothing.
    now
        Seconds since the epoch; for tests.

    Raises
    ------
    CompileError
        There is no folder for a cache, it can't be read, or a file can't be removed.
    """
    moment = time.time() if now is None else now
    kept: list[CacheFile] = []
    gone: list[CacheFile] = []
    total_bytes = 0
    for file in list_files():
        old = older_than_days is not None and moment - file.used_at > older_than_days * _DAY_SECONDS
        if not file.current or old:
            gone.append(file)
            continue
        # with the first that does not fit, all that were used longer ago go
        total_bytes += file.size_bytes
        (gone if most_bytes is not None and total_bytes > most_bytes else kept).append(file)
    leftovers = [path for path in cache_files(PARTIAL_SUFFIX) if _is_leftover(path, moment)]
    locks = _unused_locks({file.path.with_suffix(LOCK_SUFFIX) for file in kept})
    size_bytes = sum(file.size_bytes for file in gone) + sum(_size_bytes(path) for path in leftovers)
    if not dry_run:
        _remove([*(file.path for file in gone), *leftovers], Path.unlink)
        _remove(locks, _remove_lock)
    return Pruned(len(gone) + len(leftovers), size_bytes)


def _is_leftover(path: Path, now: float) -> bool:
    try:
        return now - path.lstat().st_mtime > _PARTIAL_SECONDS
    except OSError:
        return False


def _size_bytes(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _unused_locks(used: set[Path]) -> list[Path]:
    return [path for path in cache_files(LOCK_SUFFIX) if path not in used]


def _remove_lock(path: Path) -> None:
    """Remove a lock that nobody holds; who waits for it sees that it is gone, and takes its successor.

    Where another removed it first, its name is that of a successor, which stays.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if try_lock(descriptor) and is_at(descriptor, path):
            path.unlink()
    finally:
        close_lock(descriptor)


def remove_files(entries: Sequence[CacheEntry]) -> None:
    """Remove the files of some entries.

    Raises
    ------
    CompileError
        One can't be removed.
    """
    _remove([entry.file.path for entry in entries], Path.unlink)


def _remove(paths: Sequence[Path], remove: Callable[[Path], None]) -> None:
    for path in paths:
        try:
            remove(path)
        except FileNotFoundError:
            continue  # another process was faster
        except OSError as error:
            raise CompileError(
                f"{path}: can't be removed ({error.strerror}); the cache's folder must be one that you can write"
            ) from None
