"""Cubins on disk, keyed by everything they depend on; compiled once however many processes ask. Imports this package.

An entry's time of change is that of its last use. Where the folder can't be written, or others can, programs are
compiled once a process and kept in memory, with one warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from cakegen.compile.cache_folder import (
    CACHE_SCHEMA,
    CACHE_VARIABLE,
    ENTRY_SUFFIX,
    LOCK_SUFFIX,
    PARTIAL_SUFFIX,
    cache_files,
    make_schema_folder,
    refuse_strangers,
    schema_folder,
)
from cakegen.compile.entry import program_of, write_entry
from cakegen.compile.nvrtc import load_nvrtc
from cakegen.compile.program import CompiledProgram, compile_cubin, compiler_version
from cakegen.compile.requests import CompileRequest
from cakegen.errors import CompileError

# A compilation takes about a second; who waits longer than this for another's (a stopped process, a dead file server)
# compiles for itself, which is safe since entries appear by rename.
_LOCK_SECONDS = 120.0
_LOCK_POLL_SECONDS = 0.02
_LOCK_MODE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# What could not be written, by the file it would be in: a process compiles it once all the same.
_memory: dict[Path, CompiledProgram] = {}


class CacheWarning(UserWarning):
    """The cache can't be used; every process compiles its programs itself."""


def cache_key(request: CompileRequest, compiler: str) -> str:
    """The sha256 over every field of a request, the compiler's version and the cache's schema, as 64 hex digits."""
    facts = {"request": dataclasses.asdict(request), "compiler": compiler, "schema": CACHE_SCHEMA}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def cached_cubin(request: CompileRequest) -> CompiledProgram:
    """A program's cubin from the cache, or compiled and put there.

    Processes and threads that ask for one program at once compile it once.

    Raises
    ------
    CompileError
        As for `compile_cubin`. A cache that can't be used is a `CacheWarning`, not an error.
    """
    nvrtc = load_nvrtc()
    nvrtc.require(request.arch)
    compiler = compiler_version(nvrtc)
    key = cache_key(request, compiler)
    try:
        folder = schema_folder()
        refuse_strangers(folder)
    except CompileError as error:
        _warn_unusable(str(os.environ.get(CACHE_VARIABLE)), str(error))
        return _remembered(Path(key), request)
    entry = folder / f"{key}{ENTRY_SUFFIX}"
    found = _used(entry, request, compiler) or _memory.get(entry)
    if found is not None:
        return found
    try:
        made = _made_folder()
        if made is None:
            return _remembered(entry, request)
        with contextlib.ExitStack() as held:
            held.enter_context(locked(entry.with_suffix(LOCK_SUFFIX)))
            return _used(entry, request, compiler) or _compile_into(entry, request)
    except OSError as error:
        _warn_unusable(str(folder), _unusable(folder, error))
        return _remembered(entry, request)


def _made_folder() -> Path | None:
    """The folder of entries, or None with a warning where it is none of ours; what the compiler refuses is no part."""
    try:
        return make_schema_folder()
    except CompileError as error:
        _warn_unusable(str(schema_folder()), str(error))
        return None


def clear_cache() -> int:
    """Remove the entries of every schema and return their number; locks stay, since others may hold them.

    Raises
    ------
    CompileError
        As `cache_files`.
    """
    _memory.clear()
    entries = [*cache_files(ENTRY_SUFFIX), *cache_files(PARTIAL_SUFFIX)]
    for entry in entries:
        entry.unlink(missing_ok=True)
    return len(entries)


def _used(entry: Path, request: CompileRequest, compiler: str) -> CompiledProgram | None:
    """The entry's program, if it is whole and of this request; its time of change becomes that of this use."""
    found = program_of(entry, request, compiler)
    if found is not None:
        with contextlib.suppress(OSError):
            os.utime(entry, follow_symlinks=False)
    return found


def _compile_into(entry: Path, request: CompileRequest) -> CompiledProgram:
    compiled = compile_cubin(request)
    try:
        write_entry(entry, compiled, request)
    except OSError as error:
        _warn_unusable(str(entry.parent), _unusable(entry.parent, error))
        _memory[entry] = dataclasses.replace(compiled, cached=True)
    return compiled


def _remembered(entry: Path, request: CompileRequest) -> CompiledProgram:
    """The program as this process compiled it before, or compiled now and kept."""
    found = _memory.get(entry)
    if found is None:
        found = compile_cubin(request)
        _memory[entry] = dataclasses.replace(found, cached=True)
    return found


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the exclusive lock of one key, or go on without it after `_LOCK_SECONDS`.

    A lock file that was removed while this process waited for it guards nothing; its successor is taken instead.
    """
    deadline = time.monotonic() + _LOCK_SECONDS
    descriptor = os.open(path, _LOCK_MODE, 0o600)
    try:
        while time.monotonic() < deadline:
            if not try_lock(descriptor):
                time.sleep(_LOCK_POLL_SECONDS)
            elif is_at(descriptor, path):
                break
            else:
                # opened first: should that fail, the old one is closed once, below
                successor = os.open(path, _LOCK_MODE, 0o600)
                close_lock(descriptor)
                descriptor = successor
        yield
    finally:
        close_lock(descriptor)


def close_lock(descriptor: int) -> None:
    """Give a lock up, if it is held, and close its file.

    To close would not be enough: a process that was forked meanwhile has a copy, and would hold the lock as long as it
    lives.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one that its name stands for now."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def try_lock(descriptor: int) -> bool:
    """Take the exclusive lock of an open file if nobody holds it; True too where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: a program may be compiled twice, but entries still appear whole
    return True


_warned: set[str] = set()


def _unusable(folder: Path, error: OSError) -> str:
    return f"compile cache {folder} can't be used ({error}). Set {CACHE_VARIABLE} to a folder that can be written."


def _warn_unusable(folder: str, reason: str) -> None:
    """Warn once for a folder."""
    if folder in _warned:
        return
    _warned.add(folder)
    warnings.warn(f"{reason} Until then every process compiles its programs itself.", CacheWarning, stacklevel=4)
