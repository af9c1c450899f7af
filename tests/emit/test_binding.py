"""The C++ half of the generated programs: it compiles with the toolkit's own compiler, and exports its entry."""

from __future__ import annotations

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.emit.binding_build import binding_examples, build_from_manifest, find_nvcc, include_flags
from support.emit.committed_trees import committed_tree

from cakegen import paths
from cakegen.emit.ffi_layout import MANIFEST_FILE, select_ffi_files
from cakegen.emit.write import write_tree
from cakegen.registry import Registry, load_registry

EXPORTS = sorted(path.parent.name for path in paths.generated_root().glob("*/cake_jit.py"))
ROLES = {"decode_front", "decode_tail", "tail_norm", "front_gemm", "tail_gemm"}
# what TVM_FFI_DLL_EXPORT_TYPED_FUNC puts before the registry's `ffi_entry`
PREFIX = "__tvm_ffi_"


def write_layout(registry: Registry, folder: Path) -> None:
    write_tree(folder, select_ffi_files(committed_tree(registry.export)))


@pytest.mark.parametrize(
    ("arch", "is_quick"),
    [
        ("sm_90a", True),
        pytest.param("sm_90a", False, marks=pytest.mark.thorough),
        pytest.param("sm_100a", False, marks=pytest.mark.thorough),
    ],
)
def test_binding_of_each_role_and_argument_plan_compiles(tmp_path: Path, arch: str, is_quick: bool) -> None:
    """For all the targets of its program: one of sm_100a is compiled for sm_103a too. From the layout tvm-ffi alone.

    A quick run takes one argument plan of each role.
    """
    find_nvcc()
    include_flags()
    examples = binding_examples((load_registry(name) for name in EXPORTS), arch)
    if is_quick:
        examples = list({registry.program(key).role: (registry, key) for registry, key in examples}.values())
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


KINDS = {"tma_buffer": {"tiles", "token_tiles"}, "buffer": {"buffer"}, "parameter": {"parameter"}, "grid": {"grid"}}


@pytest.mark.parametrize("export", EXPORTS)
def test_table_of_a_binding_is_the_argument_plan_in_its_order(export: str) -> None:
    registry = load_registry(export)
    for program in registry.programs.values():
        text = registry.read(program.binding_source)
        rows = re.findall(r"^        cake_host::(\w+)\(\"(\w+)\"", text, re.MULTILINE)
        assert [name for _, name in rows] == [name for _, name in program.arg_plan], program.name
        for (made, _), (kind, _) in zip(rows, program.arg_plan, strict=True):
            assert made in KINDS[kind], program.name


@pytest.mark.parametrize("export", EXPORTS)
def test_table_of_a_binding_holds_boxes_launch_and_nothing_that_decides(export: str) -> None:
    registry = load_registry(export)
    for program in registry.programs.values():
        text = registry.read(program.binding_source)
        boxes = re.findall(r'cake_host::(token_)?tiles\("(\w+)", \{(true|false), (\d+), (\d+), (\d+)\}\)', text)
        assert [(name, view == "true", tuple(map(int, box)), bool(clipped)) for clipped, name, view, *box in boxes] == [
            (entry.name, entry.view == "chunks", entry.box, bool(entry.token_parts)) for entry in program.tensor_maps
        ]
        launch = program.launch
        facts = (launch.block[0], launch.cluster[0], launch.cooperative, launch.programmatic, launch.dynamic_smem_bytes)
        assert f"Attributes kLaunch{{{', '.join(str(fact).lower() for fact in facts)}}};" in text
        assert not re.search(r"\b(?:if|for|while)\b", re.sub("//.*", "", text)), program.name
        assert text.count("\n") <= 60
