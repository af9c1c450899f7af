"""Reads a generated tree's registry module. Imports leaf modules and model; never jinja2, pydantic, torch or libcuda.

A registry (`cake_jit.py`) holds literals only and is parsed, not executed. It may be anybody's, so what reaches another
program or a terminal (names, keys, compiler options) is checked here:

`SCHEMA_VERSION`
    A text; this reader refuses any other than its own, so that no field is ever guessed.
`EXPORT`
    The export's name, which is also the folder of its sources under `csrc/` with the prefix `cake_`.
`MODEL`
    `to_literal(Model)`.
`MODULES`
    Program name -> `{"role", "sources", "headers", "arches", "flags", "ffi_entry", "arg_plan", "tensor_maps",
    "barriers", "launch", "closure_digest"}`.
`KERNELS`
    Logical key -> program name.
`SPECIALIZATIONS`
    Logical key -> `{constant: value}`, given to the compiler as `-D<constant>=<value>`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cakegen import paths, plain_files
from cakegen.arch import INT32_MAX
from cakegen.compiler_flags import is_macro, refused_flag
from cakegen.errors import RegistryError
from cakegen.model import Model, from_literal, to_literal
from cakegen.visible import unseen_text

SCHEMA = 2
"""Raised by hand where the same fields mean something else; that fields differ is seen without it."""
REGISTRY_FILE = "cake_jit.py"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]*")
# CUDA C++ Programming Guide, technical specifications: most threads of a CTA
_MOST_THREADS = 1024
_SHOWN_CHARACTERS = 80
_NAMES = ("SCHEMA_VERSION", "EXPORT", "MODEL", "MODULES", "KERNELS", "SPECIALIZATIONS")


@dataclass(frozen=True)
class LaunchRecord:
    """Launch attributes as the export decided them.

    Parameters
    ----------
    block, cluster
        Threads of a CTA, CTAs of a cluster.
    cooperative
        CTAs of the whole grid wait for each other.
    programmatic
        Launched with the attribute of programmatic stream serialization: the program waits for the launch before it.
    overlap
        The program reads nothing but weights before it waits for the launch before it, so that a caller whose launches
        write no weights may have it launched programmatically too.
    dynamic_smem_bytes
        Dynamic shared memory of a CTA.
    """

    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    cooperative: bool
    programmatic: bool
    overlap: bool
    dynamic_smem_bytes: int


@dataclass(frozen=True)
class TensorMapEntry:
    """How a `tma_buffer` argument is viewed by the tensor memory accelerator.

    An operand is a row-major `[rows, cols]` bf16 matrix with a row pitch.

    `chunks`: dims (64, rows, cols / 64), strides (pitch, 128 bytes): a box is a number of K chunks.
    `columns`: dims (cols, rows, 1): a box may run over the last column, and arrives there as zeros.

    `box` is (columns, rows, chunks) in elements. All maps use the 128-byte swizzle and fill with zeros.

    `token_parts`: the rows are tokens, and a box is only as high as one of so many equal parts of a request's tokens.
    0: it always has its own height.
    """

    name: str
    operand: str
    view: str
    box: tuple[int, int, int]
    token_parts: int = 0

    def for_tokens(self, num_tokens: int) -> TensorMapEntry:
        """The entry of a request of so many tokens; its kernel derives the same box from `num_tokens`.

        Notes
        -----
        Rows of a box outside of its tensor are filled with zeros more slowly than rows are loaded. A clipped box is of
        one chunk: the next would land behind the last token, not where the kernel reads it.
        """
        columns, rows, _ = self.box
        part = -(-num_tokens // self.token_parts) if self.token_parts else rows
        return self if part >= rows else dataclasses.replace(self, box=(columns, part, 1))


@dataclass(frozen=True)
class Program:
    """One generated program. `arg_plan` lists (kind, name) in the kernel's parameter order.

    Kinds: `tma_buffer` (a 128-byte tensor map by value, made from `tensor_maps[name]`), `buffer` (a device pointer),
    `parameter` (an i32), `grid` (no kernel parameter: a grid extent of the binding's entry).
    `barriers` lists (name, count) in shared-memory order, so that a report of a stuck wait can name what it waited for.
    """

    name: str
    role: str
    sources: tuple[str, ...]
    headers: tuple[str, ...]
    arches: tuple[str, ...]
    flags: tuple[str, ...]
    ffi_entry: str
    arg_plan: tuple[tuple[str, str], ...]
    tensor_maps: tuple[TensorMapEntry, ...]
    barriers: tuple[tuple[str, int], ...]
    launch: LaunchRecord
    closure_digest: tuple[tuple[str, str], ...]

    @property
    def kernel_symbol(self) -> str:
        """The `extern "C"` name of the kernel."""
        return f"kernel_{self.name}"

    @property
    def kernel_source(self) -> str:
        """File name of the device half."""
        return self.sources[0]

    @property
    def binding_source(self) -> str:
        """File name of the host half."""
        return self.sources[1]


def closure_digest(arch: str, closure: Sequence[tuple[str, str]], flags: Sequence[str]) -> str:
    """Identity of what a compiler reads: architecture, source, included preambles in order, and flags.

    The number of texts stands in front, and each part is preceded by its length, so that no two different records give
    one stream of bytes.
    """
    parts = [str(len(closure)), arch, *(part for pair in closure for part in pair), *flags]
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode()
        digest.update(f"{len(raw)}:".encode() + raw)
    return digest.hexdigest()


def schema_version(*records: type) -> str:
    """`SCHEMA`, and 8 hex digits of every field's place, name and annotation in the records and those within them."""
    text = "\n".join(line for record in records for line in _fields_of(record, record.__name__))
    return f"{SCHEMA}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _fields_of(record: type, where: str) -> Iterator[str]:
    hints = typing.get_type_hints(record)
    for field in dataclasses.fields(record):
        yield f"{where}.{field.name}: {hints[field.name]}"
        for kind in (hints[field.name], *typing.get_args(hints[field.name])):
            if dataclasses.is_dataclass(kind) and isinstance(kind, type):
                yield from _fields_of(kind, f"{where}.{field.name}")


SCHEMA_VERSION = schema_version(Model, Program)


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
        """Text of one generated source file.

        Raises
        ------
        RegistryError
            It can't be read.
        """
        file = self.csrc / file_name
        try:
            name = file.relative_to(self.root).as_posix()
            return plain_files.as_text(plain_files.read_below(self.root, name))
        except OSError as error:
            raise RegistryError(f"{file}: {error.strerror}; run `cakegen export {self.export}`") from None
        except UnicodeDecodeError as error:
            raise RegistryError(f"{file}: not UTF-8 ({error}); run `cakegen export {self.export}`") from None

    def closure(self, program: Program, arch: str) -> tuple[tuple[str, str], ...]:
        """File names and texts of what a program is compiled from, the kernel first, read now.

        Raises
        ------
        RegistryError
            A file can't be read, or they are not those that the registry was written with. Its launch record and
            argument plan would then belong to another kernel, which reads arguments that nobody passes.
        """
        texts = tuple((name, self.read(name)) for name in (program.kernel_source, *program.headers))
        wanted = dict(program.closure_digest).get(arch)
        found = closure_digest(arch, texts, program.flags)
        if wanted != found:
            raise RegistryError(
                f"{self.csrc / program.kernel_source}: it and its headers are not those of this registry (digest "
                f"{found[:12]} for {arch}; {REGISTRY_FILE} says {wanted}). A file was edited, or the tree was replaced "
                f"after this process had read the registry: restart it, or run `cakegen export {self.export}`."
            )
        return texts


def load_registry(export_or_path: str | Path = "kimi_k3_latent_moe") -> Registry:
    """Read the registry of an export by its name, or of a generated tree by its folder.

    Raises
    ------
    RegistryError
        No such tree, a damaged module, or an unknown schema version.
    """
    shown = ascii(str(export_or_path)[:_SHOWN_CHARACTERS])
    named = not paths.is_path(export_or_path)
    root = paths.generated_root() / export_or_path if named else Path(export_or_path)
    try:
        if not (root / REGISTRY_FILE).is_file() and not (named and _FILE_NAME.fullmatch(str(export_or_path))):
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
        raise RegistryError(
            f"{file}: no registry there; run `cakegen export {root.name}`. A folder is written as a path: ./{root.name}"
        )
    try:
        values = parse_literals(plain_files.as_text(plain_files.read_below(root, REGISTRY_FILE)), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise RegistryError(f"{file}: can't be read ({error}); export again") from None
    version = values["SCHEMA_VERSION"]
    if version != SCHEMA_VERSION:
        raise RegistryError(f"{file}: schema version {version!r}; this cakegen reads {SCHEMA_VERSION!r}. Export again.")
    try:
        model = from_literal(Model, values["MODEL"])
    except RegistryError as error:
        raise RegistryError(f"{file}: damaged MODEL ({error}); export again") from None
    try:
        programs = {str(name): _program(str(name), record) for name, record in values["MODULES"].items()}
        kernels = {str(key): programs[name].name for key, name in values["KERNELS"].items()}
        specializations = {str(key): _constants(key, given) for key, given in values["SPECIALIZATIONS"].items()}
        _check_file_name("EXPORT", values["EXPORT"])
        if unseen := unseen_text(values):
            raise RegistryError(f"needs printable texts; got {unseen[:_SHOWN_CHARACTERS]!a}")
    except (AttributeError, KeyError, TypeError, ValueError, RegistryError) as error:
        where = "MODULES, KERNELS, SPECIALIZATIONS or EXPORT"
        raise RegistryError(f"{file}: damaged {where} ({type(error).__name__}: {error}); export again") from None
    return Registry(root, values["EXPORT"], model, programs, kernels, specializations)


def _check_file_name(where: str, name: object) -> None:
    """Refuse what would name a file outside of the tree."""
    if not isinstance(name, str) or _FILE_NAME.fullmatch(name) is None:
        raise RegistryError(f"{where}: needs a plain file name of letters, digits, '_' and '.'; got {name!r}")


def _constants(key: object, given: Any) -> dict[str, int]:
    for name, value in given.items():
        if not isinstance(name, str) or not is_macro(name) or type(value) is not int:
            raise RegistryError(f"SPECIALIZATIONS of {key!r}: needs names with int values; got {name!r}: {value!r}")
    return dict(given)


def _checked(program: Program) -> Program:
    """The program, if each value has its field's type and can be one; the runtime and the driver rely on it."""
    from_literal(Program, to_literal(program))
    if len(program.sources) != len(("kernel", "binding")):
        raise RegistryError(f"{program.name}: needs two sources, kernel and binding; got {list(program.sources)}")
    for name in (program.name, *program.sources, *program.headers):
        _check_file_name(program.name, name)
    if refused := refused_flag(program.flags):
        raise RegistryError(f"{program.name}: {refused}")
    if odd := sorted(set(program.arches) ^ {arch for arch, _ in program.closure_digest}):
        raise RegistryError(f"{program.name}: needs one closure_digest for each of its arches; see {odd[0]!a}")
    launch = program.launch
    if not all(1 <= extent <= _MOST_THREADS for extent in (*launch.block, *launch.cluster)):
        raise RegistryError(f"{program.name}: block {launch.block}, cluster {launch.cluster}: 1 … {_MOST_THREADS} each")
    if not 0 <= launch.dynamic_smem_bytes <= INT32_MAX:
        raise RegistryError(f"{program.name}: {launch.dynamic_smem_bytes} bytes of shared memory; 0 … {INT32_MAX}")
    return program


def parse_literals(text: str, where: str) -> dict[str, Any]:
    """The names that a registry module assigns, with their values; the module is parsed and never executed.

    Parameters
    ----------
    text
        The module.
    where
        What to call it in a message: its file, or its revision and path.

    Raises
    ------
    RegistryError
        It is not Python, assigns something that is no literal, or lacks a name.
    """
    try:
        tree = ast.parse(text)
        values = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise RegistryError(f"{where}: not a registry ({type(error).__name__}: {error}); export again") from None
    missing = [name for name in _NAMES if name not in values]
    if missing:
        raise RegistryError(f"{where}: lacks {', '.join(missing)}; export again")
    return values


def _program(name: str, record: dict[str, Any]) -> Program:
    launch = record["launch"]
    program = Program(
        name=name,
        role=record["role"],
        sources=tuple(record["sources"]),
        headers=tuple(record["headers"]),
        arches=tuple(record["arches"]),
        flags=tuple(record["flags"]),
        ffi_entry=record["ffi_entry"],
        arg_plan=tuple((kind, argument) for kind, argument in record["arg_plan"]),
        tensor_maps=tuple(
            TensorMapEntry(entry["name"], entry["operand"], entry["view"], tuple(entry["box"]), entry["token_parts"])
            for entry in record["tensor_maps"]
        ),
        barriers=tuple((barrier, count) for barrier, count in record["barriers"]),
        launch=LaunchRecord(
            block=tuple(launch["block"]),
            cluster=tuple(launch["cluster"]),
            cooperative=launch["cooperative"],
            programmatic=launch["programmatic"],
            overlap=launch["overlap"],
            dynamic_smem_bytes=launch["dynamic_smem_bytes"],
        ),
        closure_digest=tuple(sorted(record["closure_digest"].items())),
    )
    return _checked(program)
