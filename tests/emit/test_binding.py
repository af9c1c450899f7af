"""The C++ half of the generated programs: it compiles with the toolkit's own compiler, and exports its entry."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from binding_build import binding_examples, build_from_manifest, find_nvcc, include_flags

from cakegen import paths
from cakegen.emit.ffi_layout import MANIFEST_FILE, select_ffi_files
from cakegen.emit.write import write_tree
from cakegen.registry import Program, Registry, load_registry

EXPORTS = sorted(path.parent.name for path in paths.generated_root().glob("*/cake_jit.py"))
ROLES = {"decode_front", "decode_tail", "tail_norm", "front_gemm", "tail_gemm"}
# what TVM_FFI_DLL_EXPORT_TYPED_FUNC puts before the registry's `ffi_entry`
PREFIX = "__tvm_ffi_"


def write_layout(registry: Registry, folder: Path) -> None:
    files = (path for path in registry.root.rglob("*") if path.is_file())
    tree = {path.relative_to(registry.root).as_posix(): path.read_text() for path in files}
    write_tree(folder, select_ffi_files(tree, registry.export))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_binding_of_each_role_and_argument_plan_compiles(tmp_path: Path, arch: str) -> None:
    """For all the targets of its program: one of sm_100a is compiled for sm_103a too. From the layout tvm-ffi alone."""
    find_nvcc()
    include_flags()
    examples = binding_examples((load_registry(name) for name in EXPORTS), arch)
    assert {registry.program(key).role for registry, key in examples} == ROLES
    for name in EXPORTS:
        write_layout(load_registry(name), tmp_path / name)
    jobs = [(tmp_path / registry.export / MANIFEST_FILE, key, tmp_path) for registry, key in examples]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        libraries = list(pool.map(lambda job: build_from_manifest(*job), jobs))
    for (registry, key), library in zip(examples, libraries, strict=True):
        command = ["nm", "-D", "--defined-only", str(library)]
        symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert symbols.count(PREFIX + registry.program(key).ffi_entry) == 1, key


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_blackwell_prefill_binding_compiles(tmp_path: Path) -> None:
    """Every key of the published export, for both architectures."""
    find_nvcc()
    include_flags()
    registry = load_registry("kimi_k3_latent_moe")
    write_layout(registry, tmp_path / registry.export)
    keys = [key for key in registry.kernels if "sm_100a" in registry.program(key).arches and "decode" not in key]
    assert {registry.program(key).role for key in keys} == ROLES - {"decode_front", "decode_tail"}
    manifest = tmp_path / registry.export / MANIFEST_FILE
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda key: build_from_manifest(manifest, key, tmp_path), keys))


def declared_parameters(program: Program) -> list[list[str]]:
    """What the entry's parameters must be: a tensor that a map tiles has a suffix of its own."""
    kinds = {"tma_buffer": ("TensorView", "_tiles"), "buffer": ("TensorView", "")}
    pairs = ((*kinds.get(kind, ("int64_t", "")), name) for kind, name in program.arg_plan)
    return [[cpp_type, name + suffix] for cpp_type, suffix, name in pairs]


@pytest.mark.parametrize("export", EXPORTS)
def test_binding_takes_the_argument_plan_in_its_order(export: str) -> None:
    registry = load_registry(export)
    for program in registry.programs.values():
        text = registry.read(program.binding_source)
        declared = text[text.index("void run(") + len("void run(") : text.index(") {")]
        parameters = [parameter.split() for parameter in declared.split(",")]
        assert parameters == declared_parameters(program), program.name
