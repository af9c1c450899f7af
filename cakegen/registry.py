"""Reads a generated tree's registry module. Imports leaf modules and model; never jinja2, pydantic, torch or libcuda.

A registry (`cake_jit.py`) is a Python module that can be imported, but is parsed and never executed: every value is
JSON, and one line gives JSON's `true`, `false` and `null` to Python. What many programs have in common stands once, in
a table, and a program names it.
It may be anybody's, so what reaches another program or a terminal (names, keys, compiler options) is checked here.

`SCHEMA_VERSION`
    A text; this reader refuses any other than its own, so that no field is ever guessed.
`EXPORT`
    The export's name, which is also the folder of its sources under `csrc/` with the prefix `cake_`.
`MODEL`
    `to_literal(Model)`.
`FLAGS`, `ARG_PLANS`, `TENSOR_MAPS`, `BARRIERS`, `LAUNCHES`
    Short name -> compiler options, or a field of `Program`.
`FILES`
    Source file -> sha256 of its bytes.
`MODULES`
    Program name -> `ProgramEntry`. Its sources are `<name>_kernel.cu` and `<name>_binding.cu`.
`KERNELS`
    Logical key -> program name.
`SPECIALIZATIONS`
    Logical key -> `{constant: value}`, given to the compiler as `-D<constant>=<value>`.

Headers stand once for all exports, in the folder `shared` beside the tree. Its table `headers.json` gives the sha256 of
each and what it includes, so that a header's edit changes no registry.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cakegen import paths, plain_files
from cakegen.arch import INT32_MAX
from cakegen.compiler_flags import is_macro, refused_flag
from cakegen.errors import RegistryError
from cakegen.model import Model, convert_literal, from_literal
from cakegen.program_record import LaunchRecord, Program, TensorMapEntry, closure_digest
from cakegen.registry_text import (
    FILE_NAME,
    JSON_NAMES,
    REGISTRY_FILE,
    SHARED_FILE,
    SHARED_FOLDER,
    SHARED_SCHEMA,
    SHOWN_CHARACTERS,
    TABLES,
    SharedHeader,
    check_file_name,
    checked_digest,
    file_digest,
    header_closure,
    parse_shared_table,
    parse_tables,
)
from cakegen.visible import unseen_text

__all__ = [
    "JSON_NAMES",
    "REGISTRY_FILE",
    "SCHEMA_VERSION",
    "SHARED_FILE",
    "SHARED_FOLDER",
    "SHARED_SCHEMA",
    "TABLES",
    "LaunchRecord",
    "Program",
    "ProgramEntry",
    "Registry",
    "SharedHeader",
    "TensorMapEntry",
    "closure_digest",
    "file_digest",
    "header_closure",
    "load_registry",
    "parse_shared_table",
    "parse_tables",
    "schema_version",
]

SCHEMA = 3
"""Raised by hand where the same fields mean something else; that fields differ is seen without it."""
# CUDA C++ Programming Guide, technical specifications: most threads of a CTA
_MOST_THREADS = 1024


def schema_version(*records: type) -> str:
    """`SCHEMA`, and 8 hex digits of every field's place, name and annotation in the records and those within them."""
    text = "\n".join(line for record in records for line in _fields_of(record, record.__name__))
    return f"{SCHEMA}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _fields_of(record: type, where: str) -> Iterator[str]:
    hints = typing.get_type_hints(record)
    for field in dataclasses.fields(record):
        yield f"{where}.{field.name}: {hints[field.name]}"
        for kind in _records_in(hints[field.name]):
            yield from _fields_of(kind, f"{where}.{field.name}")


def _records_in(hint: Any) -> Iterator[type]:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        yield hint
    for part in typing.get_args(hint):
        yield from _records_in(part)


@dataclass(frozen=True)
class ProgramEntry:
    """A row of `MODULES`: the fields of `Program` that are its own, and the names of what stands in tables.

    `includes` lists the headers that the kernel names itself; what these include says the table beside them.
    """

    role: str
    includes: tuple[str, ...]
    arches: tuple[str, ...]
    ffi_entry: str
    flags: str
    arg_plan: str
    tensor_maps: str
    barriers: str
    launch: str


SCHEMA_VERSION = schema_version(Model, Program, ProgramEntry)


@dataclass(frozen=True)
class Registry:
    """A generated tree: what it was exported from, its programs, and which logical key each serves."""

    root: Path
    export: str
    model: Model
    programs: dict[str, Program]
    kernels: dict[str, str]
    specializations: dict[str, dict[str, int]]

    @property
    def csrc(self) -> Path:
        """Folder of the generated sources."""
        return self.root / "csrc" / f"cake_{self.export}"

    @property
    def shared(self) -> Path:
        """Folder of the headers, which the trees beside share."""
        return self.root.parent / SHARED_FOLDER

    def path(self, file_name: str) -> Path:
        """Where a source or a header lies."""
        return (self.shared if file_name.endswith(".cuh") else self.csrc) / file_name

    def program(self, key: str) -> Program:
        """The program behind a logical key.

        Raises
        ------
        RegistryError
            The export holds no such key.
        """
        try:
            return self.programs[self.kernels[key]]
        except KeyError:
            listing = f"`cakegen list --export {self.export}`"
            raise RegistryError(f"{self.root}: no program for key {key!r}; {listing} prints the keys") from None

    def constants(self, key: str) -> dict[str, int]:
        """Compile-line constants of a key (empty for most)."""
        return self.specializations.get(key, {})

    def read(self, file_name: str) -> str:
        """Text of one generated source or header.

        Raises
        ------
        RegistryError
            It can't be read.
        """
        file = self.path(file_name)
        try:
            folder = self.shared.parent if file.parent == self.shared else self.root
            return plain_files.as_text(plain_files.read_below(folder, file.relative_to(folder).as_posix()))
        except OSError as error:
            raise RegistryError(f"{file}: {error.strerror}; run `cakegen export {self.export}`") from None
        except UnicodeDecodeError as error:
            raise RegistryError(f"{file}: not UTF-8 ({error}); run `cakegen export {self.export}`") from None

    def closure(self, program: Program) -> tuple[tuple[str, str], ...]:
        """File names and texts of what a program is compiled from, the kernel first, read now.

        Raises
        ------
        RegistryError
            As `read_known`.
        """
        return tuple((name, self.read_known(program, name)) for name in (program.kernel_source, *program.headers))

    def read_known(self, program: Program, file_name: str) -> str:
        """Text of a program's source or header, read now.

        Raises
        ------
        RegistryError
            It can't be read, or is not the one that the registry was written with. The launch record and the argument
            plan would then belong to another kernel, which reads arguments that nobody passes.
        """
        text, wanted = self.read(file_name), dict(program.digests).get(file_name)
        found = file_digest(text)
        if found != wanted:
            table = f"{SHARED_FOLDER}/{SHARED_FILE}" if file_name in program.headers else REGISTRY_FILE
            raise RegistryError(
                f"{self.path(file_name)}: not the file of this registry (sha256 {found[:12]}; {table} says {wanted}). "
                "It was edited, or the tree was replaced after this process had read the registry: restart it, or run "
                f"`cakegen export {self.export}`."
            )
        return text


def load_registry(export_or_path: str | Path = "kimi_k3_latent_moe") -> Registry:
    """Read the registry of an export by its name, or of a generated tree by its folder.

    Raises
    ------
    RegistryError
        No such tree, a damaged module, or an unknown schema version.
    """
    shown = ascii(str(export_or_path)[:SHOWN_CHARACTERS])
    named = not paths.is_path(export_or_path)
    root = paths.generated_root() / export_or_path if named else Path(export_or_path)
    try:
        if not (root / REGISTRY_FILE).is_file() and not (named and FILE_NAME.fullmatch(str(export_or_path))):
            raise RegistryError(
                f"{shown}: no tree with {REGISTRY_FILE} there; name an export, or a folder DIR/<export> that `cakegen"
                " export FILE --dest DIR` wrote"
            )
        return _load(root.resolve())
    except (OSError, ValueError) as error:
        raise RegistryError(f"{shown} can't be the name of an export or a folder ({error})") from None


@functools.lru_cache(maxsize=32)
def _load(root: Path) -> Registry:
    file = root / REGISTRY_FILE
    if not file.is_file():
        near = difflib.get_close_matches(
            root.name, [each.parent.name for each in root.parent.glob(f"*/{REGISTRY_FILE}")]
        )
        raise RegistryError(
            f"{file}: no registry there{'; the nearest: ' + ', '.join(near) if near else ''}; run `cakegen export"
            f" {root.name}`. A folder is written as a path: ./{root.name}"
        )
    try:
        text = plain_files.as_text(plain_files.read_below(root, REGISTRY_FILE))
        values = parse_tables(text, str(file), SCHEMA_VERSION)
    except (OSError, UnicodeDecodeError) as error:
        raise RegistryError(f"{file}: can't be read ({error}); export again") from None
    try:
        model = from_literal(Model, values["MODEL"])
        model.dims.check_block()
    except RegistryError as error:
        raise RegistryError(f"{file}: damaged MODEL ({error}); export again") from None
    try:
        _check_dicts(values)
        if unseen := unseen_text(values):
            raise RegistryError(f"needs printable texts; got {unseen[:SHOWN_CHARACTERS]!a}")
        entries = {str(name): from_literal(ProgramEntry, row) for name, row in values["MODULES"].items()}
        for where, name in [("EXPORT", values["EXPORT"]), *(("MODULES", name) for name in entries)]:
            check_file_name(where, name)
        tables = {name: _table(name, values[name]) for name in TABLES}
        kernels = {str(key): _known_program(key, name, entries) for key, name in values["KERNELS"].items()}
        specializations = {str(key): _constants(key, given) for key, given in values["SPECIALIZATIONS"].items()}
    except (AttributeError, KeyError, TypeError, ValueError, RegistryError) as error:
        raise RegistryError(f"{file}: damaged tables ({type(error).__name__}: {error}); export again") from None
    included = any(entry.includes for entry in entries.values())
    shared = read_shared_table(root.parent / SHARED_FOLDER / SHARED_FILE, values["EXPORT"]) if included else {}
    try:
        joined = _Joined(tables, values["FILES"], shared)
        programs = {name: joined.program(name, entry) for name, entry in entries.items()}
    except (KeyError, TypeError, RegistryError) as error:
        raise RegistryError(f"{file}: damaged tables ({type(error).__name__}: {error}); export again") from None
    return Registry(root, values["EXPORT"], model, programs, kernels, specializations)


def _check_dicts(values: Mapping[str, Any]) -> None:
    for name in (*TABLES, "FILES", "MODULES", "KERNELS", "SPECIALIZATIONS"):
        if not isinstance(values[name], dict):
            raise RegistryError(f"{name}: needs a dict; got {type(values[name]).__name__}")


def _known_program(key: object, name: object, entries: Mapping[str, ProgramEntry]) -> str:
    if not isinstance(name, str) or name not in entries:
        raise RegistryError(f"KERNELS: {key!r} needs a program of MODULES; got {name!r}")
    return name


def _constants(key: object, given: Any) -> dict[str, int]:
    if not isinstance(given, dict):
        raise RegistryError(f"SPECIALIZATIONS of {key!r}: needs a dict; got {type(given).__name__}")
    for name, value in given.items():
        if not isinstance(name, str) or not is_macro(name) or type(value) is not int:
            raise RegistryError(f"SPECIALIZATIONS of {key!r}: needs names with int values; got {name!r}: {value!r}")
    return dict(given)


def _table(name: str, rows: Any) -> dict[str, Any]:
    """A table's rows as values of the field of `Program` that they stand for, checked once for all that name them."""
    field = {"FLAGS": "flags", "ARG_PLANS": "arg_plan", "TENSOR_MAPS": "tensor_maps", "BARRIERS": "barriers"}
    kind = typing.get_type_hints(Program)[field.get(name, "launch")]
    checked = {str(row): convert_literal(kind, value, f"{name}[{row!r}]") for row, value in rows.items()}
    for row, value in checked.items():
        if name == "LAUNCHES":
            _check_launch(f"{name}[{row!r}]", value)
        elif name == "FLAGS" and (refused := refused_flag(value)):
            raise RegistryError(f"{name}[{row!r}]: {refused}")
    return checked


def _check_launch(where: str, launch: LaunchRecord) -> None:
    """The runtime and the driver rely on it."""
    if not all(1 <= extent <= _MOST_THREADS for extent in (*launch.block, *launch.cluster)):
        raise RegistryError(f"{where}: block {launch.block}, cluster {launch.cluster}: 1 … {_MOST_THREADS} each")
    if not 0 <= launch.dynamic_smem_bytes <= INT32_MAX:
        raise RegistryError(f"{where}: {launch.dynamic_smem_bytes} bytes of shared memory; 0 … {INT32_MAX}")


@dataclass(frozen=True)
class _Joined:
    """Rows of `MODULES` with what they name."""

    tables: Mapping[str, Mapping[str, Any]]
    files: Mapping[str, object]
    shared: Mapping[str, SharedHeader]

    def program(self, name: str, entry: ProgramEntry) -> Program:
        """The program of a row.

        Raises
        ------
        RegistryError
            It names a row, a file or a header that is not there.
        """
        headers = header_closure(entry.includes, lambda header: self._header(name, header).includes)
        sources = (f"{name}_kernel.cu", f"{name}_binding.cu")
        digests = [(file, checked_digest(file, self.files.get(file))) for file in sources]
        digests += [(header, self.shared[header].sha256) for header in headers]
        return Program(
            name=name,
            role=entry.role,
            headers=headers,
            arches=entry.arches,
            flags=self._row("FLAGS", name, entry.flags),
            ffi_entry=entry.ffi_entry,
            arg_plan=self._row("ARG_PLANS", name, entry.arg_plan),
            tensor_maps=self._row("TENSOR_MAPS", name, entry.tensor_maps),
            barriers=self._row("BARRIERS", name, entry.barriers),
            launch=self._row("LAUNCHES", name, entry.launch),
            digests=tuple(digests),
        )

    def _row(self, table: str, program: str, row: str) -> Any:
        if row not in self.tables[table]:
            raise RegistryError(f"{program}: needs a row of {table}; got {row!r}")
        return self.tables[table][row]

    def _header(self, program: str, header: str) -> SharedHeader:
        if header not in self.shared:
            raise RegistryError(f"{program}: needs the header {header!r}, which the shared table does not list")
        return self.shared[header]


def read_shared_table(file: Path, export: str) -> dict[str, SharedHeader]:
    """The table of a shared folder.

    Raises
    ------
    RegistryError
        It is not there, damaged, or of another schema.
    """
    try:
        name = f"{file.parent.name}/{file.name}"
        return parse_shared_table(plain_files.as_text(plain_files.read_below(file.parent.parent, name)), str(file))
    except OSError as error:
        raise RegistryError(
            f"{file}: {error.strerror}. A tree is read with the folder {SHARED_FOLDER!r} beside it, which holds its "
            f"headers; copy both, or run `cakegen export {export}`"
        ) from None
    except UnicodeDecodeError as error:
        raise RegistryError(f"{file}: can't be read ({error}); export again") from None
