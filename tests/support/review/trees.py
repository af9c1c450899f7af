"""Small generated trees in a git repository: what the review tests compare. Their kernels compile."""

from __future__ import annotations

import hashlib
import os
import pprint
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.small_registry import registry_text, registry_values, write_headers, write_sources

from cakegen.model import to_literal
from cakegen.registry import SCHEMA_VERSION, SHARED_FOLDER, LaunchRecord

EXPORT = "small"
HEADER = "cake_device_common.cuh"
HEADER_TEXT = "#pragma once\nnamespace cake { __device__ __forceinline__ float twice(float v) { return v * 2.0f; } }\n"

KERNEL = """// seal: sha256 {seal}
#include "cake_device_common.cuh"

struct Cfg {{
    static constexpr unsigned kProgramId = 0x{digest8}u;  // how this program names itself
    static constexpr int kNumStages = {stages};  // ring stages
    static constexpr int kScale = SCALE;  // of the compile line
}};

extern "C" __global__ void __launch_bounds__(128) kernel_{name}(float* out, int count) {{
    extern __shared__ float staged[];
    for (int stage = 0; stage < Cfg::kNumStages; ++stage) staged[threadIdx.x] += out[threadIdx.x + stage * count];
    __syncthreads();
    if (threadIdx.x < count) out[threadIdx.x] = cake::twice(staged[threadIdx.x ^ 1]) * Cfg::kScale;
}}
"""


@dataclass
class SmallProgram:
    """One program of a small tree; `text` and `salt` change its text and its name."""

    key: str
    stages: int = 4
    role: str = "decode_front"
    smem_bytes: int = 4096
    arches: tuple[str, ...] = ("sm_90a",)
    constants: Mapping[str, int] = field(default_factory=lambda: {"SCALE": 3})
    salt: str = ""
    text: str = KERNEL

    @property
    def name(self) -> str:
        """A name like a generated one: a hash."""
        identity = f"{self.key}{self.stages}{self.salt}".encode(errors="replace")
        return f"cake_{EXPORT}_{hashlib.sha256(identity).hexdigest()[:20]}"

    def kernel(self) -> str:
        """The device half."""
        digest8 = self.name.rpartition("_")[2][:8]
        seal = hashlib.sha256(self.name.encode()).hexdigest()
        return self.text.format(name=self.name, stages=self.stages, digest8=digest8, seal=seal)

    def binding(self) -> str:
        """The host half."""
        return f"// host half of {self.name}\n"

    def record(self) -> dict[str, Any]:
        """The registry's record."""
        return {
            "role": self.role,
            "includes": [HEADER],
            "arches": list(self.arches),
            "flags": ["-std=c++17"],
            "ffi_entry": "run",
            "arg_plan": [["buffer", "out"], ["parameter", "count"]],
            "tensor_maps": [],
            "barriers": [["stage_full", self.stages]],
            "launch": to_literal(
                LaunchRecord(
                    block=(128, 1, 1),
                    cluster=(1, 1, 1),
                    cooperative=False,
                    programmatic=False,
                    overlap=False,
                    dynamic_smem_bytes=self.smem_bytes,
                )
            ),
        }


def small_programs() -> list[SmallProgram]:
    """Two of one role, and one of another."""
    return [
        SmallProgram("front:g1_r4@sm_90a"),
        SmallProgram("front:g2_r4@sm_90a"),
        SmallProgram("norm:e0", role="norm"),
    ]


def write_small_tree(
    folder: Path,
    programs: list[SmallProgram],
    *,
    header: str = HEADER_TEXT,
    model: Mapping[str, Any] | None = None,
    schema: str | int = SCHEMA_VERSION,
) -> None:
    """Write `folder/small`, in place of what is there."""
    root = folder / EXPORT
    shutil.rmtree(root, ignore_errors=True)
    sources = {f"{program.name}_kernel.cu": program.kernel() for program in programs}
    sources |= {f"{program.name}_binding.cu": program.binding() for program in programs}
    values = registry_values(
        EXPORT,
        model or {"dims": {"hidden": 512}, "targets": [{"arch": "sm_90a", "sm_counts": [132]}]},
        {program.name: program.record() for program in programs},
        {program.key: program.name for program in programs},
        {program.key: program.constants for program in programs},
        sources,
        schema,
    )
    write_sources(root, EXPORT, sources)
    write_headers(folder, {HEADER: header})
    (root / "cake_jit.py").write_text(registry_text(values))


def write_old_tree(folder: Path, programs: list[SmallProgram]) -> None:
    """The same tree as schema 2 laid it out: whole records as Python literals, headers in the tree's own folder."""
    write_small_tree(folder, programs)
    shutil.rmtree(folder / SHARED_FOLDER)
    header = f"cake_{EXPORT}_device_common.cuh"
    csrc = folder / EXPORT / "csrc" / f"cake_{EXPORT}"
    (csrc / header).write_text(HEADER_TEXT)
    records = {}
    for program in programs:
        kernel = csrc / f"{program.name}_kernel.cu"
        kernel.write_text(kernel.read_text().replace(HEADER, header))
        record = program.record()
        del record["includes"]
        sources = {"sources": [kernel.name, f"{program.name}_binding.cu"], "headers": [header]}
        records[program.name] = {**record, **sources, "closure_digest": {"sm_90a": "0" * 64}}
    values = {
        "SCHEMA_VERSION": "2-42364d98",
        "EXPORT": EXPORT,
        "MODEL": {"dims": {"hidden": 512}, "targets": [{"arch": "sm_90a", "sm_counts": [132]}]},
        "MODULES": records,
        "KERNELS": {program.key: program.name for program in programs},
        "SPECIALIZATIONS": {program.key: dict(program.constants) for program in programs},
    }
    text = "\n".join(f"{name} = {pprint.pformat(value)}" for name, value in values.items())
    (folder / EXPORT / "cake_jit.py").write_text(text)


def git(folder: Path, *arguments: str) -> str:
    """Run git with an identity of its own and no settings of this machine."""
    names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    environment = os.environ | names | {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def commit_all(folder: Path, message: str) -> None:
    """Commit whatever is in the folder."""
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", message)
