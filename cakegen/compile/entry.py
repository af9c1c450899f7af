"""One file of the compile cache or of a bundle: a cubin, what it is, and the digest of both. Imports program.

Layout: `cakegen-cubin <sha256 of the rest>`, a line of JSON, the cubin. A file is written beside, synced and renamed,
so a reader sees all of it or none; and one that is torn, damaged or empty does not match its own digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from cakegen.compile.program import CompiledProgram, CompileRequest, examine_cubin
from cakegen.errors import CompileError

_MAGIC = b"cakegen-cubin"
PARTIAL_SUFFIX = ".partial"


@dataclass(frozen=True)
class StoredCubin:
    """A whole entry. `name`, `arch` and `kernel_symbol` are empty in files of an early version."""

    name: str
    arch: str
    kernel_symbol: str
    compiler: str
    compile_ms: float
    log: str
    cubin: bytes

    def program(self, request: CompileRequest) -> CompiledProgram:
        """The entry as the program of a request.

        Raises
        ------
        CompileError
            The cubin does not define the request's kernel.
        """
        return examine_cubin(
            request, self.cubin, log=self.log, compiler=self.compiler, compile_ms=self.compile_ms, cached=True
        )


def read_entry(file: Path) -> StoredCubin | None:
    """The entry in a file, or None where there is none that is whole."""
    try:
        head, _, rest = file.read_bytes().partition(b"\n")
    except OSError:
        return None
    if head != _head_of(rest):
        return None
    facts_line, _, cubin = rest.partition(b"\n")
    try:
        facts = json.loads(facts_line)
        return StoredCubin(
            name=str(facts.get("name", "")),
            arch=str(facts.get("arch", "")),
            kernel_symbol=str(facts.get("kernel_symbol", "")),
            compiler=str(facts["compiler"]),
            compile_ms=float(facts["compile_ms"]),
            log=str(facts["log"]),
            cubin=cubin,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def write_entry(file: Path, compiled: CompiledProgram) -> None:
    """Write an entry, all or nothing.

    Raises
    ------
    OSError
        It can't be written; nothing is left behind.
    """
    replace_file(file, entry_bytes(compiled))


def entry_bytes(compiled: CompiledProgram) -> bytes:
    """What a file of a program holds."""
    facts = {
        "name": compiled.name,
        "arch": compiled.arch,
        "kernel_symbol": compiled.kernel_symbol,
        "log": compiled.log,
        "compiler": compiled.compiler,
        "compile_ms": compiled.report.compile_ms,
    }
    rest = json.dumps(facts, sort_keys=True).encode() + b"\n" + compiled.cubin
    return _head_of(rest) + b"\n" + rest


def replace_file(file: Path, content: bytes) -> None:
    """Write a file beside, sync it, and put it in place of the old one.

    Raises
    ------
    OSError
        It can't be written; the old one is as it was.
    """
    beside = file.with_name(f"{file.stem}.{uuid.uuid4().hex}{PARTIAL_SUFFIX}")
    try:
        with beside.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(beside, file)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def program_of(file: Path, request: CompileRequest) -> CompiledProgram | None:
    """The program of a request from a file, or None where there is none that is whole and defines its kernel."""
    found = read_entry(file)
    if found is None:
        return None
    try:
        return found.program(request)
    except CompileError:
        return None


def _head_of(rest: bytes) -> bytes:
    return b"%s %s" % (_MAGIC, hashlib.sha256(rest).hexdigest().encode())
