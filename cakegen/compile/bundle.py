"""Cubins made ahead of time, in a folder that is shipped: a machine that launches them needs no compiler.

Layout: `bundle.json`, and `program-<sha256 of the file>.cubin` for each program. The manifest lists them by identity,
the digest of everything that a program was compiled from, so a bundle of other sources, flags or constants is refused.
A file holds its whole request too, and is compared with it: lines of the manifest that were exchanged are seen.

The manifest makes the bundle: it is replaced in one step, after the files that it names are there and before those that
only the old one named go. At any moment the folder is the old bundle or the new one. Imports this package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cakegen.compile.cache import close_lock, try_lock
from cakegen.compile.entry import MOST_ENTRY_BYTES, entry_bytes, parse_entry, replace_file
from cakegen.compile.program import CompiledProgram
from cakegen.compile.requests import CompileRequest
from cakegen.compile.signature import sign, verify
from cakegen.errors import CompileError
from cakegen.plain_files import read_plain

BUNDLE_VARIABLE = "CAKEGEN_BUNDLE"
KEY_VARIABLE = "CAKEGEN_BUNDLE_KEY"
MANIFEST_FILE = "bundle.json"
BUNDLE_SCHEMA = 3
_MOST_MANIFEST_BYTES = 64 * 2**20
_LOCK_SECONDS = 120.0
_LOCK_POLL_SECONDS = 0.02
_SHA256 = re.compile(r"[0-9a-f]{64}")
# what a writer makes, what it leaves where it is killed, and what it made at schema 1
_OWN_NAME = re.compile(r"(?:bundle|program-[0-9a-f]{64})\.(?:[0-9a-f]{32}\.partial|json|cubin)|[0-9a-f]{64}\.cubin")


@dataclass(frozen=True)
class BundledProgram:
    """One line of the manifest: whose cubin it is, what compiled it, and the sha256 and the size of its file."""

    program: str
    arch: str
    compiler: str
    keys: tuple[str, ...]
    sha256: str
    size_bytes: int

    @property
    def file_name(self) -> str:
        """Its file in the bundle's folder."""
        return f"program-{self.sha256}.cubin"


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
    public_key
        PEM file of the key that must have signed it, and whatever takes its place.
    """

    folder: Path
    export: str
    compiler: str
    programs: Mapping[str, BundledProgram]
    public_key: Path | None = None

    def program(self, request: CompileRequest) -> CompiledProgram:
        """The program of a request, its file verified.

        Raises
        ------
        CompileError
            The bundle does not hold it, holds another version of it, or its file is damaged.
        """
        line = self.programs.get(request_identity(request))
        if line is None:
            latest = self._made_again()
            if latest is not None:
                return latest.program(request)
            raise CompileError(self._why_missing(request))
        file = self.folder / line.file_name
        try:
            content = read_plain(file, MOST_ENTRY_BYTES)
        except OSError as error:
            latest = self._made_again()
            if latest is not None:
                return latest.program(request)
            raise CompileError(f"{file}: {error.strerror}; make the bundle again with `cakegen bundle`") from None
        return self._verified(file, content, line, request)

    def _verified(self, file: Path, content: bytes, line: BundledProgram, request: CompileRequest) -> CompiledProgram:
        """The program in a file's bytes, which are what the manifest says, and of this request."""
        again = "make the bundle again with `cakegen bundle`"
        found = hashlib.sha256(content).hexdigest()
        stored = parse_entry(content) if found == line.sha256 else None
        if stored is None:
            raise CompileError(
                f"{file}: sha256 {found}; {MANIFEST_FILE} says {line.sha256} for {request.name} ({request.arch}). "
                f"The file is damaged or was exchanged: {again}."
            )
        if stored.compiler != line.compiler:
            raise CompileError(
                f"{file}: compiled by {stored.compiler[:80]!a}; {MANIFEST_FILE} says {line.compiler[:80]!a}. One was "
                f"exchanged: {again}."
            )
        try:
            return stored.program(request)
        except CompileError as error:
            raise CompileError(
                f"{file}: {error}. {MANIFEST_FILE} names it for {request.name} ({request.arch}), so its lines were "
                f"exchanged, or it was made by other rules: {again}."
            ) from None

    def _made_again(self) -> Bundle | None:
        """What the folder holds now, where that is another bundle than when this one was opened."""
        latest = open_bundle(self.folder, self.public_key)
        return None if latest.programs == self.programs else latest

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
    folder: Path,
    export: str,
    programs: Sequence[tuple[CompileRequest, CompiledProgram, Sequence[str]]],
    private_key: Path | None = None,
) -> None:
    """Write a bundle, all or nothing, in place of an older one.

    Parameters
    ----------
    programs
        Request, what it compiled to, and the logical keys that it serves.
    private_key
        Sign the manifest with the Ed25519 key in this PEM file.

    Raises
    ------
    CompileError
        The key can't be used; the folder holds something that is no bundle, can't be written, or another process does
        not finish with it.
    """
    if private_key is not None:
        sign(b"", private_key)  # refused before anything is made
    folder = folder.resolve()
    made = not os.path.exists(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _written_alone(folder):
            _refuse_strangers(folder)
            try:
                _fill(folder, export, programs, private_key)
            finally:
                _remove_unlisted(folder)
    except OSError as error:
        raise CompileError(f"{folder}: can't write the bundle ({error.strerror}: {error.filename})") from None
    finally:
        if made and not os.path.exists(folder / MANIFEST_FILE):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _refuse_strangers(folder: Path) -> None:
    """A folder without a manifest may hold what a killed writer has left, and nothing else."""
    names = sorted(path.name for path in folder.iterdir())
    own = [name for name in names if name.startswith(("program-", "bundle.")) and _OWN_NAME.fullmatch(name)]
    if MANIFEST_FILE not in names and own != names:
        strange = next(name for name in names if name not in own)
        raise CompileError(f"{folder}: holds something that is no bundle ({strange}); name another folder with --out")


def _fill(
    folder: Path,
    export: str,
    programs: Sequence[tuple[CompileRequest, CompiledProgram, Sequence[str]]],
    private_key: Path | None,
) -> None:
    lines = {}
    for request, compiled, keys in programs:
        content = entry_bytes(compiled, request)
        digest = hashlib.sha256(content).hexdigest()
        line = BundledProgram(request.name, request.arch, compiled.compiler, tuple(keys), digest, len(content))
        replace_file(folder / line.file_name, content)
        lines[request_identity(request)] = line
    values = _manifest(export, [compiled for _, compiled, _ in programs], lines)
    if private_key is not None:
        values["signature"] = sign(_signed_bytes(values), private_key)
    replace_file(folder / MANIFEST_FILE, (json.dumps(values, indent=1) + "\n").encode())


@contextlib.contextmanager
def _written_alone(folder: Path) -> Iterator[None]:
    """One writer at a time, where the file system has locks for folders.

    Raises
    ------
    CompileError
        Another writer takes longer than `_LOCK_SECONDS`. Two at once would remove each other's files.
    """
    deadline = time.monotonic() + _LOCK_SECONDS
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        while not try_lock(descriptor):
            if time.monotonic() > deadline:
                raise CompileError(
                    f"{folder}: another process has been writing this bundle for {_LOCK_SECONDS:g} s; a writer takes "
                    "seconds, so it may be stopped. End it, or name another folder with --out."
                )
            time.sleep(_LOCK_POLL_SECONDS)
        yield
    finally:
        close_lock(descriptor)


def _remove_unlisted(folder: Path) -> None:
    """Files of the older bundle, or of one that could not be finished; none where the manifest can't be read."""
    listed = {MANIFEST_FILE}
    if (folder / MANIFEST_FILE).exists():
        try:
            listed |= {line.file_name for line in open_bundle(folder).programs.values()}
        except CompileError:
            return
    for path in folder.iterdir():
        if path.name not in listed and _OWN_NAME.fullmatch(path.name):
            with contextlib.suppress(OSError):
                path.unlink()


def _manifest(
    export: str, compiled: Sequence[CompiledProgram], lines: Mapping[str, BundledProgram]
) -> dict[str, object]:
    return {
        "schema": BUNDLE_SCHEMA,
        "export": export,
        "compiler": ", ".join(sorted({program.compiler for program in compiled})),
        "programs": {identity: dataclasses.asdict(line) for identity, line in sorted(lines.items())},
    }


def _signed_bytes(values: Mapping[str, object]) -> bytes:
    """What a signature is of: all that a reader takes from the manifest, in one spelling.

    The digests of the programs' files are part of it, so that a signed manifest vouches for every cubin.
    """
    return json.dumps({name: each for name, each in values.items() if name != "signature"}, sort_keys=True).encode()


def open_bundle(folder: Path, public_key: Path | None = None) -> Bundle:
    """Read a bundle's manifest.

    Parameters
    ----------
    public_key
        Refuse a manifest that the Ed25519 key in this PEM file did not sign; None: the key that `CAKEGEN_BUNDLE_KEY`
        names, and any manifest where it is not set.

    Raises
    ------
    CompileError
        There is none, it is damaged, not signed by the key, or of a schema that this version does not know.
    """
    file = folder / MANIFEST_FILE
    try:
        values = json.loads(read_plain(file, _MOST_MANIFEST_BYTES))
    except OSError as error:
        raise CompileError(f"{file}: {error.strerror}; `cakegen bundle --out {folder}` makes a bundle") from None
    except (ValueError, RecursionError) as error:
        raise CompileError(f"{file}: not a bundle's manifest ({error}); make the bundle again") from None
    schema = values.get("schema") if isinstance(values, dict) else None
    if schema != BUNDLE_SCHEMA:
        raise CompileError(f"{file}: schema {schema!r}; this cakegen reads {BUNDLE_SCHEMA}. Make the bundle again.")
    key = public_key or Path(os.environ.get(KEY_VARIABLE, ""))
    if key.name:
        _refuse_unsigned(file, values, key)
    try:
        lines = {str(identity): _line(line) for identity, line in values["programs"].items()}
        return Bundle(folder, str(values["export"]), str(values["compiler"]), lines, public_key)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CompileError(
            f"{file}: damaged ({type(error).__name__}: {error}); make the bundle again with `cakegen bundle`"
        ) from None


def _refuse_unsigned(file: Path, values: Mapping[str, object], public_key: Path) -> None:
    signature = values.get("signature")
    if signature is None:
        raise CompileError(
            f"{file}: not signed, and {public_key} must have signed it; `cakegen bundle --sign KEY` signs"
        )
    if not isinstance(signature, str) or not verify(_signed_bytes(values), signature, public_key):
        raise CompileError(
            f"{file}: the signature is not that of {public_key} over what the manifest says. It was changed, or "
            "another key signed it: take the bundle from who made it again."
        )


def _line(values: dict[str, Any]) -> BundledProgram:
    keys = tuple(str(key) for key in values["keys"])
    words = (str(values["program"]), str(values["arch"]), str(values["compiler"]))
    if _SHA256.fullmatch(values["sha256"]) is None:
        raise ValueError(f"sha256 must be 64 hex digits, not {values['sha256']!r}")
    size = values["size_bytes"]
    if type(size) is not int or size < 0:
        # JSON as Python reads it knows Infinity, and 1e9999
        raise ValueError(f"size_bytes must be a whole number, not {size!r}")
    return BundledProgram(*words, keys, values["sha256"], size)


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
