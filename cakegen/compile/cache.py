"""Cubins on disk, keyed by everything they depend on; compiled once however many processes ask. Imports this package.

Layout: `<root>/v<schema>/<key>.cubin` and `<key>.lock`. An entry is written beside, synced and renamed, and begins with
the digest of its own rest, so that a torn, damaged or empty file is a miss. Lock files are never removed: another
process may hold one. Where the folder can't be written, programs are compiled without it, with one warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

from cakegen.compile.nvrtc import load_nvrtc
from cakegen.compile.program import CompiledProgram, CompileRequest, compile_cubin, compiler_version, examine_cubin
from cakegen.errors import CompileError

CACHE_VARIABLE = "CAKEGEN_CACHE_DIR"
CACHE_SCHEMA = 1
_MAGIC = b"cakegen-cubin"
# A compilation takes about a second; who waits longer than this for another's (a stopped process, a dead file server)
# compiles for itself, which is safe since entries appear by rename.
_LOCK_SECONDS = 120.0
_LOCK_POLL_SECONDS = 0.02


class CacheWarning(UserWarning):
    """The cache can't be used; programs are compiled every time."""


def cache_root() -> Path:
    """The cache's folder: `CAKEGEN_CACHE_DIR`, else `cakegen` in the XDG cache folder (`~/.cache`)."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "cakegen"


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
    folder = cache_root() / f"v{CACHE_SCHEMA}"
    entry = folder / f"{cache_key(request, compiler_version(nvrtc))}.cubin"
    found = _read_entry(entry, request)
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            held.enter_context(_locked(entry.with_suffix(".lock")))
            return _read_entry(entry, request) or _compile_into(entry, request)
    except OSError as error:
        _warn_unusable(folder, error)
        return compile_cubin(request)


def clear_cache() -> int:
    """Remove the entries of every schema and return their number; locks stay, since others may hold them."""
    entries = [path for path in cache_root().glob("v*/*") if path.suffix in (".cubin", ".partial")]
    for entry in entries:
        entry.unlink(missing_ok=True)
    return len(entries)


def _compile_into(entry: Path, request: CompileRequest) -> CompiledProgram:
    compiled = compile_cubin(request)
    try:
        _write_entry(entry, compiled)
    except OSError as error:
        _warn_unusable(entry.parent, error)
    return compiled


def _read_entry(entry: Path, request: CompileRequest) -> CompiledProgram | None:
    """The entry's program, or None where there is none that is whole."""
    try:
        head, _, rest = entry.read_bytes().partition(b"\n")
    except OSError:
        return None
    if head != _head_of(rest):
        return None
    facts_line, _, cubin = rest.partition(b"\n")
    try:
        facts = json.loads(facts_line)
        return examine_cubin(
            request,
            cubin,
            log=facts["log"],
            compiler=facts["compiler"],
            compile_ms=facts["compile_ms"],
            cached=True,
        )
    except (ValueError, KeyError, TypeError, CompileError):
        return None


def _write_entry(entry: Path, compiled: CompiledProgram) -> None:
    facts = {"log": compiled.log, "compiler": compiled.compiler, "compile_ms": compiled.report.compile_ms}
    rest = json.dumps(facts, sort_keys=True).encode() + b"\n" + compiled.cubin
    beside = entry.with_name(f"{entry.stem}.{uuid.uuid4().hex}.partial")
    try:
        with beside.open("xb") as file:
            file.write(_head_of(rest) + b"\n" + rest)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, entry)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def _head_of(rest: bytes) -> bytes:
    return b"%s %s" % (_MAGIC, hashlib.sha256(rest).hexdigest().encode())


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the exclusive lock of one key, or go on without it after `_LOCK_SECONDS`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _try_lock(descriptor) and time.monotonic() < deadline:
            time.sleep(_LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: a program may be compiled twice, but entries still appear whole
    return True


_warned: set[Path] = set()


def _warn_unusable(folder: Path, error: OSError) -> None:
    if folder in _warned:
        return
    _warned.add(folder)
    warnings.warn(
        f"compile cache {folder} can't be used ({error}); programs are compiled every time. "
        f"Set {CACHE_VARIABLE} to a folder that can be written.",
        CacheWarning,
        stacklevel=3,
    )
