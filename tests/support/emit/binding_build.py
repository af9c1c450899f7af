"""Builds the C++ bindings of a tree with the toolkit's compiler, for tests; every skip names what is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from cakegen.registry import Registry

FLAGS = ("-std=c++17", "-shared", "-Xcompiler", "-fPIC")
LIMIT_SECONDS = 600


def find_nvcc() -> str:
    """The toolkit's compiler: on PATH, below CUDA_HOME, or in the nvidia-cuda-nvcc wheel; skips where there is none."""
    home = os.environ.get("CUDA_HOME")
    places = [Path(home, "bin/nvcc")] if home else []
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        places += Path(folder).glob("*/bin/nvcc")
    found = shutil.which("nvcc") or next((str(place) for place in places if place.is_file()), None)
    if found is None:
        pytest.skip("needs nvcc: on PATH, below CUDA_HOME, or from the nvidia-cuda-nvcc wheel")
    return found


def include_flags() -> tuple[str, ...]:
    """Where the headers of TVM-FFI and of DLPack are; skips where the package is not installed."""
    libinfo = pytest.importorskip("tvm_ffi.libinfo", reason="needs tvm_ffi (apache-tvm-ffi): the bindings' headers")
    return tuple(dict.fromkeys((f"-I{libinfo.find_include_path()}", f"-I{libinfo.find_dlpack_include_path()}")))


def binding_examples(registries: Iterable[Registry], arch: str = "sm_90a") -> list[tuple[Registry, str]]:
    """One tree and key for every role and argument plan that runs on one architecture."""
    kinds: dict[object, tuple[Registry, str]] = {}
    for registry in registries:
        for key in registry.kernels:
            program = registry.program(key)
            if arch in program.arches:
                kinds.setdefault((program.role, program.arg_plan), (registry, key))
    return list(kinds.values())


def target_flags(registry: Registry, key: str) -> list[str]:
    """The compiler's options for every architecture that a key's program serves."""
    names = (arch.removeprefix("sm_") for arch in registry.program(key).arches)
    return [flag for name in names for flag in ("-gencode", f"arch=compute_{name},code=sm_{name}")]


def build_binding(registry: Registry, key: str, folder: Path) -> Path:
    """Compile a key's binding, its kernel included, into a shared library; fails with the compiler's words."""
    constants = [f"-D{name}={value}" for name, value in registry.constants(key).items()]
    source = registry.csrc / registry.program(key).binding_source
    return _compile(key, [*FLAGS, f"-I{registry.shared}", *target_flags(registry, key), *constants], source, folder)


def build_from_manifest(manifest: Path, key: str, folder: Path) -> Path:
    """The same with nothing but what the layout `tvm-ffi` holds: its manifest and the sources beside it."""
    said = json.loads(manifest.read_text())
    entry = said["keys"][key]
    source = manifest.parent / said["programs"][entry["program"]]["binding"]
    return _compile(key, [*said["nvcc"], *entry["nvcc"]], source, folder)


def _compile(key: str, options: list[str], source: Path, folder: Path) -> Path:
    # by key: several share one program, and differ in the compile line's constants
    library = folder / f"{re.sub(r'[^0-9A-Za-z]', '_', key)}.so"
    command = [find_nvcc(), *options, *include_flags(), str(source), "-o", str(library)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert result.returncode == 0, f"{key}: {' '.join(command)}\n{result.stdout}{result.stderr}"
    assert "warning" not in result.stderr, f"{key}: {result.stderr}"
    return library
