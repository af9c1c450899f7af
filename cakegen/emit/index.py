"""The two indexes of a generated tree: the registry that the runtime reads, and the README that people read. Pure."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from cakegen.emit.literal import render_literal
from cakegen.emit.program import COMPILE_FLAGS, ProgramSpec
from cakegen.emit.reach import ReachedKey
from cakegen.emit.seal import MAX_COLUMNS
from cakegen.model import Model, to_literal
from cakegen.registry import JSON_NAMES, SCHEMA_VERSION, LaunchRecord, ProgramEntry, file_digest

_NAME_DIGITS = 6


@dataclass(frozen=True)
class TreeProgram:
    """One program of a tree: its name, the keys that it serves, and the headers that its kernel names."""

    name: str
    spec: ProgramSpec
    keys: tuple[ReachedKey, ...]
    includes: tuple[str, ...]

    @property
    def kernel_file(self) -> str:
        """File name of the device half."""
        return f"{self.name}_kernel.cu"

    @property
    def arches(self) -> tuple[str, ...]:
        """Targets that reach one of the keys."""
        return tuple(sorted({arch for entry in self.keys for arch in entry.arches}))


def render_registry(model: Model, programs: Sequence[TreeProgram], sources: Mapping[str, str]) -> str:
    """Body of the registry module, exactly as `cakegen.registry` reads it.

    Parameters
    ----------
    sources
        Generated sources by file name, for the digests.
    """
    keys = sorted((entry.key, program.name, entry.constants) for program in programs for entry in program.keys)
    tables = {name: _Table(rows) for name, rows in _table_rows(programs).items()}
    values: dict[str, Any] = {
        "SCHEMA_VERSION": SCHEMA_VERSION,
        "EXPORT": model.name,
        "MODEL": to_literal(model),
        **{name: table.rows for name, table in tables.items()},
        "FILES": {name: file_digest(text) for name, text in sorted(sources.items())},
        "MODULES": {program.name: _entry(program, tables) for program in programs},
        "KERNELS": {key: name for key, name, _ in keys},
        "SPECIALIZATIONS": {key: dict(sorted(constants)) for key, _, constants in keys if constants},
    }
    assignments = [
        f"{name} = {render_literal(value, MAX_COLUMNS, reserved=len(name) + 3)}\n" for name, value in values.items()
    ]
    return "\n".join([f"{JSON_NAMES}\n", *assignments])


class _Table:
    """Distinct values by short names that say what they are of, and that another value does not change.

    Parameters
    ----------
    named
        (name, value) of every use; a name ends in a digest of its value where it does not spell it.
    """

    def __init__(self, named: Iterable[tuple[str, Any]]) -> None:
        self._names: dict[str, str] = {}
        for name, value in named:
            text = json.dumps(value)
            self._names[text] = min(name, self._names.get(text, name))
        self.rows = {name: json.loads(text) for text, name in sorted(self._names.items(), key=lambda row: row[1])}
        assert len(self.rows) == len(self._names), "two values under one name"

    def name_of(self, value: Any) -> str:
        """The name of a value's row."""
        return self._names[json.dumps(value)]


def _table_rows(programs: Sequence[TreeProgram]) -> dict[str, Iterable[tuple[str, Any]]]:
    specs = [program.spec for program in programs]
    return {
        "FLAGS": [("default", list(COMPILE_FLAGS))],
        "ARG_PLANS": [_named(spec, _arg_plan(spec)) for spec in specs],
        "TENSOR_MAPS": [_named(spec, to_literal(spec.tensor_maps)) for spec in specs],
        "BARRIERS": [_named(spec, to_literal(spec.barriers)) for spec in specs],
        "LAUNCHES": [(_launch_name(spec.launch), to_literal(spec.launch)) for spec in specs],
    }


def _arg_plan(spec: ProgramSpec) -> Any:
    return [list(argument) for argument in spec.arg_plan]


def _named(spec: ProgramSpec, value: Any) -> tuple[str, Any]:
    digest = hashlib.sha256(json.dumps(value).encode()).hexdigest()
    return f"{spec.role}_{digest[:_NAME_DIGITS]}", value


def _launch_name(launch: LaunchRecord) -> str:
    """`t192_c2_s231424_programmatic`: threads, CTAs of a cluster, bytes of shared memory, and what is set."""
    extents = zip("tc", (launch.block, launch.cluster), strict=True)
    parts = [mark + "x".join(str(extent) for extent in _without_ones(sizes)) for mark, sizes in extents]
    switches = [name for name in ("cooperative", "programmatic", "overlap") if getattr(launch, name)]
    return "_".join([*parts, f"s{launch.dynamic_smem_bytes}", *switches])


def _without_ones(sizes: tuple[int, ...]) -> tuple[int, ...]:
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes = sizes[:-1]
    return sizes


def _entry(program: TreeProgram, tables: Mapping[str, _Table]) -> dict[str, Any]:
    spec = program.spec
    entry = ProgramEntry(
        role=spec.role,
        includes=program.includes,
        arches=program.arches,
        ffi_entry="run",
        flags=tables["FLAGS"].name_of(list(COMPILE_FLAGS)),
        arg_plan=tables["ARG_PLANS"].name_of(_arg_plan(spec)),
        tensor_maps=tables["TENSOR_MAPS"].name_of(to_literal(spec.tensor_maps)),
        barriers=tables["BARRIERS"].name_of(to_literal(spec.barriers)),
        launch=tables["LAUNCHES"].name_of(to_literal(spec.launch)),
    )
    return cast(dict[str, Any], to_literal(entry))


def render_readme(model: Model, programs: Sequence[TreeProgram]) -> str:
    """Body of the tree's README: each program with its file, and the logical keys that it serves."""
    count = sum(len(program.keys) for program in programs)
    lines = [
        f"# Generated programs of {model.name}",
        "",
        f"{len(programs)} programs serve {count} logical keys. `cakegen show KEY` explains one of them.",
    ]
    for role in sorted({program.spec.role for program in programs}):
        lines += ["", f"## {role}"]
        for program in sorted(programs, key=lambda program: program.keys[0].key):
            if program.spec.role == role:
                lines += ["", *_program_lines(program)]
    return "\n".join(lines) + "\n"


def _program_lines(program: TreeProgram) -> list[str]:
    return [
        *textwrap.wrap(f"{program.spec.summary}. Architectures: {', '.join(program.arches)}.", MAX_COLUMNS),
        "",
        *_file_lines(f"csrc/cake_{program.spec.export}", program.kernel_file),
        *(f"- key `{entry.key}`" for entry in program.keys),
    ]


def _file_lines(folder: str, file: str) -> list[str]:
    line = f"- file `{folder}/{file}`"
    return [line] if len(line) <= MAX_COLUMNS else [f"- file `{file}`", f"  in `{folder}`"]
