"""Reads a generated tree's registry module. Imports errors, model and paths; never jinja2, pydantic, torch or libcuda.

A registry (`cake_jit.py`) holds literals only and is parsed, not executed:

`SCHEMA_VERSION`
    An int; this reader refuses any other than its own.
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
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cakegen import paths
from cakegen.errors import RegistryError
from cakegen.model import Model, from_literal

SCHEMA_VERSION = 1
REGISTRY_FILE = "cake_jit.py"
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
    """

    name: str
    operand: str
    view: str
    box: tuple[int, int, int]


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
            return file.read_text(encoding="utf-8")
        except OSError as error:
            raise RegistryError(f"{file}: {error.strerror}; run `cakegen export {self.export}`") from None


def load_registry(export_or_path: str | Path = "kimi_k3_latent_moe") -> Registry:
    """Read the registry of an export by its name, or of a generated tree by its folder.

    Raises
    ------
    RegistryError
        No such tree, a damaged module, or an unknown schema version.
    """
    root = Path(export_or_path)
    if not (root / REGISTRY_FILE).is_file():
        root = paths.generated_root() / str(export_or_path)
    return _load(root.resolve())


@functools.lru_cache(maxsize=32)
def _load(root: Path) -> Registry:
    file = root / REGISTRY_FILE
    if not file.is_file():
        raise RegistryError(f"{file}: no registry there; run `cakegen export {root.name}`")
    try:
        values = parse_literals(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise RegistryError(f"{file}: can't be read ({error}); export again") from None
    version = values["SCHEMA_VERSION"]
    if version != SCHEMA_VERSION:
        raise RegistryError(f"{file}: schema version {version!r}; this cakegen reads {SCHEMA_VERSION}. Export again.")
    try:
        model = from_literal(Model, values["MODEL"])
    except RegistryError as error:
        raise RegistryError(f"{file}: damaged MODEL ({error}); export again") from None
    try:
        programs = {name: _program(name, record) for name, record in values["MODULES"].items()}
        kernels = {str(key): programs[name].name for key, name in values["KERNELS"].items()}
        specializations = {key: dict(constants) for key, constants in values["SPECIALIZATIONS"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        where = "MODULES, KERNELS or SPECIALIZATIONS"
        raise RegistryError(f"{file}: damaged {where} ({type(error).__name__}: {error}); export again") from None
    return Registry(root, values["EXPORT"], model, programs, kernels, specializations)


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
    return Program(
        name=name,
        role=record["role"],
        sources=tuple(record["sources"]),
        headers=tuple(record["headers"]),
        arches=tuple(record["arches"]),
        flags=tuple(record["flags"]),
        ffi_entry=record["ffi_entry"],
        arg_plan=tuple((kind, argument) for kind, argument in record["arg_plan"]),
        tensor_maps=tuple(
            TensorMapEntry(entry["name"], entry["operand"], entry["view"], tuple(entry["box"]))
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
