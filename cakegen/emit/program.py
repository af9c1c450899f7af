"""The specification of one program: everything that its text depends on. Imports errors and the registry's records.

A program's name is a hash of its canonical specification, not of its text: a template edit renames nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from cakegen.emit.pipeline import Pipeline
from cakegen.errors import EmitError
from cakegen.model import ModelDims
from cakegen.registry import LaunchRecord, TensorMapEntry

COMPILE_FLAGS = ("-std=c++17",)
"""Compiler options of every program, beside the architecture. No fast-math: each approximation is written out. No line
information: it makes a cubin 3.7 times as large and puts the working directory into it."""

LAUNCH_BUFFERS = {"partials": "float*", "counters": "u32*", "wait_record": "u64*"}
"""The C++ type of each buffer that the runtime owns."""


def buffer_types(dims: ModelDims) -> tuple[tuple[str, str], ...]:
    """The C++ type of each buffer of a block's operands; bf16 elements are raw bits."""
    stages = dims.stages.values()
    prepared = {each.output for each in dims.sum_stage.preparations}
    written = prepared | {spec for stage in stages for spec in stage.outputs}
    return tuple(
        (spec.name, f"{'' if spec in written else 'const '}{'float' if spec.fp32 else 'u16'}*")
        for stage in stages
        for spec in stage.pointed
    )


TILE_MARKS = {
    "decode_front": (("n", "kNPad"),),
    "decode_tail": (("n", "kNPad"),),
    "front_gemm": (("m", "kBlockM"), ("n", "kBlockN")),
    "tail_gemm": (("m", "kBlockM"), ("n", "kBlockN")),
    "tail_norm": (("r", "kRowsPerCta"),),
    "tail_sum": (("r", "kRowsPerCta"),),
}
"""What a program's name says of its tile: a letter before a member of `struct Cfg`. Decode: tokens of a tile; GEMMs:
rows of tokens and of weights; the norm and the sum: rows of a CTA."""


@dataclass(frozen=True)
class Constant:
    """One member of a kernel's `struct Cfg`: its C++ name, its value, and what it means with its unit.

    A text as value names a macro that the compile line defines, so that one program serves several keys.
    """

    name: str
    value: bool | int | float | str
    comment: str


@dataclass(frozen=True)
class Header:
    """A header that a program includes: its path below `templates/`, and the numbers that its template takes."""

    template: str
    values: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Operand:
    """One argument of a program's call of its body: kernel parameters, or a C++ struct that is made of them."""

    parameters: tuple[str, ...]
    struct: str = ""


def _map_facts(entry: TensorMapEntry) -> dict[str, object]:
    """A map's part of a program's name; parts that are not there are left out, so that they rename no other program."""
    facts = asdict(entry)
    if not entry.token_parts:
        del facts["token_parts"]
    return facts


@dataclass(frozen=True)
class ProgramSpec:
    """One program of one architecture family.

    Parameters
    ----------
    export
        Name of the export; prefixes every generated file.
    role
        What the program does: `decode_front`, `decode_tail`, `tail_norm`, `tail_sum`, `front_gemm`, `tail_gemm`.
    arch_family
        Family whose targets share the text (`sm90`).
    body
        The function template that the kernel calls with its `Cfg`.
    headers
        What declares it, and what it needs beside.
    operands
        The call's arguments.
    summary
        One line for the banner.
    constants
        `struct Cfg`, in the order in which it is read.
    arg_plan, tensor_maps, launch
        As in `registry.Program`.
    pipeline
        Barriers and edges between the roles.
    buffer_types
        C++ types of operands by name (`buffer_types`).
    activation
        The functor that becomes `Cfg::Activation`; empty: the body calls none.
    """

    export: str
    role: str
    arch_family: str
    body: str
    headers: tuple[Header, ...]
    operands: tuple[Operand, ...]
    summary: str
    constants: tuple[Constant, ...]
    arg_plan: tuple[tuple[str, str], ...]
    tensor_maps: tuple[TensorMapEntry, ...]
    pipeline: Pipeline
    launch: LaunchRecord
    buffer_types: tuple[tuple[str, str], ...]
    activation: str = ""

    @property
    def barriers(self) -> tuple[tuple[str, int], ...]:
        """As in `registry.Program`."""
        return tuple((entry.name, entry.count) for entry in self.pipeline.barriers)

    @property
    def waits(self) -> bool:
        """Whether it has bounded waits, and so a record to report a stuck one in."""
        return ("buffer", "wait_record") in self.arg_plan

    @property
    def canonical(self) -> str:
        """The specification as JSON with sorted keys; comments and the summary are not part of it."""
        facts = {
            "role": self.role,
            "arch_family": self.arch_family,
            "constants": {constant.name: constant.value for constant in self.constants},
            "arg_plan": self.arg_plan,
            "tensor_maps": [_map_facts(entry) for entry in self.tensor_maps],
            "barriers": [(entry.name, entry.count, entry.arrivals) for entry in self.pipeline.barriers],
            "launch": asdict(self.launch),
        }
        if self.activation and not any(self.activation in constant.name for constant in self.constants):
            # one with constants of its own is told apart by their names
            facts["activation"] = self.activation
        return json.dumps(facts, sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """The 20 hex digits of the program's name."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()[:20]

    @property
    def program_id(self) -> int:
        """The first 32 bits of the digest: how a program names itself in the wait record."""
        return int(self.digest[:8], 16)

    @property
    def name(self) -> str:
        """`cake_<export>_<stem>_<digest>`: stem of the generated files, and `kernel_<name>` is the kernel's symbol.

        Role, family and tile are part of the name and not of a file's name alone: a profiler, an error and a cubin show
        the symbol, and the name in it finds the file.
        """
        return f"cake_{self.export}_{self.stem}_{self.digest}"

    @property
    def stem(self) -> str:
        """What a reader of a folder looks for: `decode_front_sm90_n16`."""
        values = {constant.name: constant.value for constant in self.constants}
        tile = "".join(f"{mark}{values[name]}" for mark, name in TILE_MARKS.get(self.role, ()) if name in values)
        return "_".join(part for part in (self.role, self.arch_family, tile) if part)

    @property
    def parameters(self) -> tuple[tuple[str, str], ...]:
        """(C++ type, name) of each kernel parameter: all of `arg_plan` but the grid, in its order.

        Raises
        ------
        EmitError
            A buffer without a type.
        """
        return tuple(self._parameter(kind, name) for kind, name in self.arg_plan if kind != "grid")

    def _parameter(self, kind: str, name: str) -> tuple[str, str]:
        if kind == "tma_buffer":
            return "const __grid_constant__ TensorMap", f"{name}_map"
        return ("u32" if kind == "parameter" else self.buffer_type(name)), name

    def buffer_type(self, name: str) -> str:
        """The C++ type of a buffer.

        Raises
        ------
        EmitError
            No operand of the block has that name, nor a buffer of the runtime.
        """
        types = dict(self.buffer_types) | LAUNCH_BUFFERS
        if name not in types:
            known = ", ".join(types)
            raise EmitError(
                f"{self.export}: {self.role}: buffer {name!r} has no C++ type; those with one are {known}. "
                "Name an operand of the block, or add it to LAUNCH_BUFFERS of cakegen/emit/program.py."
            )
        return types[name]
