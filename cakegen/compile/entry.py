"""One file of the compile cache or of a bundle: a cubin, its request, and the digest of both. Imports program.

Layout: `cakegen-cubin <sha256 of the rest>`, a line of JSON, the cubin. A file is written beside, synced and renamed,
so a reader sees all of it or none; and one that is torn, damaged or empty does not match its own digest. The JSON holds
the whole request (texts as their sha256) and the compiler, and a reader compares both with what it asks for: the name
of a file, or a line that points to it, may have been exchanged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cakegen.compile.cache_folder import PARTIAL_SUFFIX
from cakegen.compile.program import CompiledProgram, examine_cubin
from cakegen.compile.requests import CompileRequest
from cakegen.errors import CompileError
from cakegen.plain_files import read_plain

_SHOWN_CHARACTERS = 120
_MAGIC = b"cakegen-cubin"
MOST_ENTRY_BYTES = 64 * 2**20
"""Largest file of a program that is read; those of the published export have 0.1 MB each."""


@dataclass(frozen=True)
class StoredCubin:
    """A whole entry; `request` is what `request_facts` gave when it was written."""

    request: Mapping[str, object]
    compiler: str
    compile_ms: float
    log: str
    cubin: bytes

    def word(self, field: str) -> str:
        """A field of the request as text, for a listing."""
        return str(self.request.get(field, ""))

    def program(self, request: CompileRequest) -> CompiledProgram:
        """The entry as the program of a request.

        Raises
        ------
        CompileError
            It was compiled from another request; or the cubin does not define the request's kernel, or spills.
        """
        wanted = request_facts(request)
        for field in wanted:
            if self.request.get(field) != wanted[field]:
                raise CompileError(
                    f"was compiled from another request: {field} {_shown(self.request.get(field))}, not "
                    f"{_shown(wanted[field])}"
                )
        return examine_cubin(
            request, self.cubin, log=self.log, compiler=self.compiler, compile_ms=self.compile_ms, cached=True
        )


def request_facts(request: CompileRequest) -> dict[str, object]:
    """Every field of a request as JSON gives it back; of a text its sha256."""
    return {
        "name": request.name,
        "arch": request.arch,
        "kernel_symbol": request.kernel_symbol,
        "flags": list(request.flags),
        "constants": [[macro, value] for macro, value in request.constants],
        "source": _sha256(request.source),
        "headers": [[name, _sha256(text)] for name, text in request.headers],
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _shown(value: object) -> str:
    return ascii(value)[:_SHOWN_CHARACTERS]


def read_entry(file: Path) -> StoredCubin | None:
    """The entry in a file, or None where there is none that is whole."""
    try:
        return parse_entry(read_plain(file, MOST_ENTRY_BYTES))
    except OSError:
        return None


def parse_entry(content: bytes) -> StoredCubin | None:
    """The entry that a file's bytes are, or None where they are not a whole one."""
    head, _, rest = content.partition(b"\n")
    if head != _head_of(rest):
        return None
    facts_line, _, cubin = rest.partition(b"\n")
    try:
        facts = json.loads(facts_line)
        return StoredCubin(
            request=dict(facts["request"]),
            compiler=str(facts["compiler"]),
            compile_ms=float(facts["compile_ms"]),
            log=str(facts["log"]),
            cubin=cubin,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def write_entry(file: Path, compiled: CompiledProgram, request: CompileRequest) -> None:
    """Write an entry, all or nothing.

    Raises
    ------
    OSError
        It can't be written; nothing is left behind.
    """
    replace_file(file, entry_bytes(compiled, request))


def entry_bytes(compiled: CompiledProgram, request: CompileRequest) -> bytes:
    """What a file of a program holds."""
    facts = {
        "request": request_facts(request),
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


def program_of(file: Path, request: CompileRequest, compiler: str) -> CompiledProgram | None:
    """The program of a request from a file, or None where there is none that is whole, of this request and compiler."""
    found = read_entry(file)
    if found is None or found.compiler != compiler:
        return None
    try:
        return found.program(request)
    except CompileError:
        return None


def _head_of(rest: bytes) -> bytes:
    return b"%s %s" % (_MAGIC, hashlib.sha256(rest).hexdigest().encode())
