"""The two indexes of a generated tree: the registry that the runtime reads, and the README that people read. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cakegen.emit.literal import render_literal
from cakegen.emit.program import COMPILE_FLAGS, ProgramSpec
from cakegen.emit.reach import ReachedKey
from cakegen.emit.seal import MAX_COLUMNS
from cakegen.model import Model, to_literal
from cakegen.registry import SCHEMA_VERSION, closure_digest


@dataclass(frozen=True)
class TreeProgram:
    """One program of a tree: its name, the keys that it serves, and the preambles that its kernel includes."""

    name: str
    spec: ProgramSpec
    keys: tuple[ReachedKey, ...]
    headers: tuple[str, ...]

    @property
    def kernel_file(self) -> str:
        """File name of the device half."""
        return f"{self.name}_kernel.cu"

    @property
    def binding_file(self) -> str:
        """File name of the host half."""
        return f"{self.name}_binding.cu"

    @property
    def arches(self) -> tuple[str, ...]:
        """Targets that reach one of the keys."""
        return tuple(sorted({arch for entry in self.keys for arch in entry.arches}))


def render_registry(model: Model, programs: Sequence[TreeProgram], texts: Mapping[str, str]) -> str:
    """Body of the registry module, exactly as `cakegen.registry` reads it.

    Parameters
    ----------
    texts
        Generated sources and preambles by file name, for the digests.
    """
    keys = sorted((entry.key, program.name, entry.constants) for program in programs for entry in program.keys)
    values: dict[str, Any] = {
        "SCHEMA_VERSION": SCHEMA_VERSION,
        "EXPORT": model.name,
        "MODEL": to_literal(model),
        "MODULES": {program.name: _record(program, texts) for program in programs},
        "KERNELS": {key: name for key, name, _ in keys},
        "SPECIALIZATIONS": {key: dict(sorted(constants)) for key, _, constants in keys if constants},
    }
    return "\n".join(
        f"{name} = {render_literal(value, MAX_COLUMNS, reserved=len(name) + 3)}\n" for name, value in values.items()
    )


def _record(program: TreeProgram, texts: Mapping[str, str]) -> dict[str, Any]:
    spec = program.spec
    closure = [(name, texts[name]) for name in (program.kernel_file, *program.headers)]
    return {
        "role": spec.role,
        "sources": [program.kernel_file, program.binding_file],
        "headers": list(program.headers),
        "arches": list(program.arches),
        "flags": list(COMPILE_FLAGS),
        "ffi_entry": "run",
        "arg_plan": [list(argument) for argument in spec.arg_plan],
        "tensor_maps": [asdict(entry) for entry in spec.tensor_maps],
        "barriers": [list(barrier) for barrier in spec.barriers],
        "launch": asdict(spec.launch),
        "closure_digest": {arch: closure_digest(arch, closure, COMPILE_FLAGS) for arch in program.arches},
    }


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
        f"- file `csrc/cake_{program.spec.export}/{program.kernel_file}`",
        *(f"- key `{entry.key}`" for entry in program.keys),
    ]
