"""Cubins made ahead of time, in a folder that is shipped: a machine that launches them needs no compiler.

Layout: `bundle.json`, and `<identity>.cubin` for each program. The identity is the digest of everything that the
program was compiled from, so a bundle of other sources, flags or constants is refused. Imports this package.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cakegen.compile.entry import program_of, write_entry
from cakegen.compile.program import CompiledProgram, CompileRequest
from cakegen.errors import CompileError

BUNDLE_VARIABLE = "CAKEGEN_BUNDLE"
MANIFEST_FILE = "bundle.json"
BUNDLE_SCHEMA = 1


@dataclass(frozen=True)
class BundledProgram:
    """One line of the manifest: whose cubin it is, and the sha256 and the size of its file."""

    program: str
    arch: str
    keys: tuple[str, ...]
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. Its files are read and verified when they are asked for.

    Parameters
    ----------
    folder
        Where it is.
    export
        The export whose programs it holds.
    compiler
        What compiled it.
    programs
        By identity.
    """

    folder: Path
    export: str
    compiler: str
    programs: Mapping[str, BundledProgram]

    def program(self, request: CompileRequest) -> CompiledProgram:
        """The program of a request, its file verified.

        Raises
        ------
        CompileError
            The bundle does not hold it, holds another version of it, or its file is damaged.
        """
        identity = request_identity(request)
        line = self.programs.get(identity)
        if line is None:
            raise CompileError(self._why_missing(request))
        file = self.folder / _file_name(identity)
        try:
            found = hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError as error:
            raise CompileError(f"{file}: {error.strerror}; make the bundle again with `cakegen bundle`") from None
        compiled = program_of(file, request) if found == line.sha256 else None
        if compiled is None:
            raise CompileError(
                f"{file}: sha256 {found}; {MANIFEST_FILE} says {line.sha256} for {request.name} ({request.arch}). "
                "The file is damaged or was exchanged: make the bundle again with `cakegen bundle`."
            )
        return compiled

    def _why_missing(self, request: CompileRequest) -> str:
        """Whether the bundle lacks a target, a program, or holds it from another text."""
        arches = sorted({line.arch for line in self.programs.values()})
        again = f"Make it again: `cakegen bundle --export {self.export} --arch {request.arch} --out {self.folder}`."
        if request.arch not in arches:
            held = ", ".join(arches) or "no target"
            return f"bundle {self.folder} is for {held}; {request.name} is needed for {request.arch}. {again}"
        if any(line.program == request.name and line.arch == request.arch for line in self.programs.values()):
            return (
                f"bundle {self.folder} holds {request.name} for {request.arch}, but compiled from another text, other "
                f"flags or constants than {' '.join(request.options)} and this installation's sources. {again}"
            )
        count = sum(line.arch == request.arch for line in self.programs.values())
        return f"bundle {self.folder} holds {count} programs for {request.arch}, and not {request.name}. {again}"


def request_identity(request: CompileRequest) -> str:
    """The sha256 over every field of a request, as 64 hex digits; the compiler is not part of it."""
    facts = {"request": dataclasses.asdict(request), "schema": BUNDLE_SCHEMA}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def write_bundle(
    folder: Path, export: str, programs: Sequence[tuple[CompileRequest, CompiledProgram, Sequence[str]]]
) -> None:
    """Write a bundle, all or nothing, in place of an older one.

    Parameters
    ----------
    programs
        Request, what it compiled to, and the logical keys that it serves.

    Raises
    ------
    CompileError
        The folder holds something that is no bundle, or can't be written.
    """
    # the folder itself, not a link to it, nor a name like `.` that no other stands beside
    folder = folder.resolve()
    if folder.exists() and not (folder / MANIFEST_FILE).is_file() and any(folder.iterdir()):
        raise CompileError(f"{folder}: holds something that is no bundle; name another folder with --out")
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    try:
        beside.mkdir(parents=True)
        lines = {}
        for request, compiled, keys in programs:
            identity = request_identity(request)
            file = beside / _file_name(identity)
            write_entry(file, compiled)
            digest, size_bytes = hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_size
            lines[identity] = BundledProgram(request.name, request.arch, tuple(keys), digest, size_bytes)
        (beside / MANIFEST_FILE).write_text(_manifest(export, [compiled for _, compiled, _ in programs], lines))
        _put_in_place(beside, folder)
    except OSError as error:
        raise CompileError(f"{folder}: can't write the bundle ({error.strerror}: {error.filename})") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _manifest(export: str, compiled: Sequence[CompiledProgram], lines: Mapping[str, BundledProgram]) -> str:
    values = {
        "schema": BUNDLE_SCHEMA,
        "export": export,
        "compiler": ", ".join(sorted({program.compiler for program in compiled})),
        "programs": {identity: dataclasses.asdict(line) for identity, line in sorted(lines.items())},
    }
    return json.dumps(values, indent=1) + "\n"


def _put_in_place(beside: Path, folder: Path) -> None:
    """A reader of the old bundle that comes between the two renames finds no manifest, and says so."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.exists():
        os.rename(folder, old)
    os.rename(beside, folder)
    shutil.rmtree(old, ignore_errors=True)


def _file_name(identity: str) -> str:
    return f"{identity}.cubin"


def open_bundle(folder: Path) -> Bundle:
    """Read a bundle's manifest.

    Raises
    ------
    CompileError
        There is none, it is damaged, or it is of a schema that this version does not know.
    """
    file = folder / MANIFEST_FILE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CompileError(f"{file}: {error.strerror}; `cakegen bundle --out {folder}` makes a bundle") from None
    except (ValueError, RecursionError) as error:
        raise CompileError(f"{file}: not a bundle's manifest ({error}); make the bundle again") from None
    schema = values.get("schema") if isinstance(values, dict) else None
    if schema != BUNDLE_SCHEMA:
        raise CompileError(f"{file}: schema {schema!r}; this cakegen reads {BUNDLE_SCHEMA}. Make the bundle again.")
    try:
        lines = {str(identity): _line(line) for identity, line in values["programs"].items()}
        return Bundle(folder, str(values["export"]), str(values["compiler"]), lines)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CompileError(
            f"{file}: damaged ({type(error).__name__}: {error}); make the bundle again with `cakegen bundle`"
        ) from None


def _line(values: dict[str, Any]) -> BundledProgram:
    keys = tuple(str(key) for key in values["keys"])
    words = (str(values["program"]), str(values["arch"]))
    return BundledProgram(*words, keys, str(values["sha256"]), int(values["size_bytes"]))


def find_bundle(export: str, named: str | os.PathLike[str] | None = None) -> Bundle | None:
    """The bundle that serves an export: the one that is named, else the first of `CAKEGEN_BUNDLE` that is of it.

    Parameters
    ----------
    named
        A bundle's folder; it must be of this export.

    Raises
    ------
    CompileError
        A folder is no bundle, or the one that is named is of another export.
    """
    if named is None:
        folders = [part for part in os.environ.get(BUNDLE_VARIABLE, "").split(os.pathsep) if part]
        return next((bundle for bundle in map(_opened, folders) if bundle.export == export), None)
    bundle = _opened(os.fspath(named))
    if bundle.export != export:
        raise CompileError(f"bundle {bundle.folder} is of export {bundle.export}; {export} is needed")
    return bundle


@functools.lru_cache(maxsize=32)
def _opened(folder: str) -> Bundle:
    return open_bundle(Path(folder))
