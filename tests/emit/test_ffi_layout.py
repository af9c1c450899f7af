"""The layout for engines that compile with nvcc and load through TVM-FFI: what it holds, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.emit.committed_trees import committed_tree

from cakegen import paths
from cakegen.cli.main import main
from cakegen.emit.ffi_layout import MANIFEST_FILE, SCHEMA_VERSION, select_ffi_files
from cakegen.emit.seal import included_files, is_generated, is_intact
from cakegen.errors import EmitError
from cakegen.model import Model, from_literal
from cakegen.registry import SHARED_FOLDER, load_registry

TINY = "tiny_latent_moe"
HOST_HEADERS = {"cake_host_common.cuh", "cake_host_entry.cuh", "cake_host_small_maps.cuh"}


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_layout_holds_the_pairs_of_its_keys_what_they_include_and_a_manifest() -> None:
    files = select_ffi_files(committed_tree(TINY), ("sm_100a",), "decode:*_c2*")
    manifest = json.loads(files[MANIFEST_FILE])
    registry = load_registry(TINY)
    expected = {
        key for key in registry.kernels if "sm_100a" in registry.program(key).arches and key.startswith("decode:")
    }
    assert set(manifest["keys"]) == {key for key in expected if "_c2" in key} != expected
    programs = manifest["programs"]
    assert {entry["program"] for entry in manifest["keys"].values()} == set(programs)
    sources = {entry[half] for entry in programs.values() for half in ("kernel", "binding")}
    headers = {header for name in programs for header in registry.programs[name].headers}
    assert set(files) == sources | headers | HOST_HEADERS | {MANIFEST_FILE}
    for name in set(files) - {MANIFEST_FILE}:
        assert files[name] == registry.read(name)
        assert set(included_files(files[name])) <= set(files), name


def test_manifest_says_what_the_registry_says() -> None:
    manifest = json.loads(select_ffi_files(committed_tree(TINY))[MANIFEST_FILE])
    registry = load_registry(TINY)
    assert manifest["schema"] == SCHEMA_VERSION
    assert from_literal(Model, manifest["model"]) == registry.model
    assert {key: entry["program"] for key, entry in manifest["keys"].items()} == registry.kernels
    for key, entry in manifest["keys"].items():
        program, record = registry.program(key), manifest["programs"][entry["program"]]
        assert [tuple(argument) for argument in record["arg_plan"]] == list(program.arg_plan)
        assert record["launch"]["dynamic_smem_bytes"] == program.launch.dynamic_smem_bytes
        targets = [arch.removeprefix("sm_") for arch in program.arches]
        flags = [flag for name in targets for flag in ("-gencode", f"arch=compute_{name},code=sm_{name}")]
        assert entry["nvcc"] == flags + [f"-D{name}={value}" for name, value in registry.constants(key).items()]


def test_manifest_is_sealed() -> None:
    text = select_ffi_files(committed_tree(TINY), ("sm_90a",), "tail_norm:*")[MANIFEST_FILE]
    assert is_generated(text)
    assert is_intact(text)
    assert not is_intact(text.replace("-shared", "-shares"))


def test_manifest_names_the_command_that_writes_it() -> None:
    narrowed = select_ffi_files(committed_tree(TINY), ("sm_90a",), "tail_norm:*")[MANIFEST_FILE]
    whole = select_ffi_files(committed_tree(TINY))[MANIFEST_FILE]
    command = f"cakegen export {TINY} --dest DIR --layout tvm-ffi"
    assert f"{command} --arch sm_90a --match 'tail_norm:*'" in " ".join(json.loads(narrowed)["about"])
    assert f"`{command}`." in json.loads(whole)["about"][-1]


@pytest.mark.parametrize(
    ("arches", "match", "words"),
    [
        ((), "decode:nothing*", "no key matches 'decode:nothing*' for any target"),
        (("sm_100a", "sm_90"), "*", "for sm_90; the export has"),
    ],
)
def test_selection_of_nothing_is_refused(arches: tuple[str, ...], match: str, words: str) -> None:
    with pytest.raises(EmitError, match=r"`cakegen list` prints them") as caught:
        select_ffi_files(committed_tree(TINY), arches, match)
    assert words in str(caught.value)


def test_command_writes_checks_and_narrows_the_layout(tmp_path: Path) -> None:
    options = ("export", TINY, "--layout", "tvm-ffi", "--dest", tmp_path, "--arch", "sm_90a")
    assert run(*options).exit_code == 0
    whole = {path.name for path in (tmp_path / TINY).iterdir()}
    assert run(*options, "--check").exit_code == 0
    edited = tmp_path / TINY / MANIFEST_FILE
    edited.write_text(edited.read_text().replace("-shared", "-static"))
    damaged = run(*options, "--check", "--match", "tail_norm:*")
    assert damaged.exit_code == 1
    assert f"edited by hand   {MANIFEST_FILE}" in damaged.stderr
    assert f"--dest {tmp_path} --layout tvm-ffi --arch sm_90a --match 'tail_norm:*'`" in damaged.stderr
    assert run(*options, "--match", "tail_norm:*").exit_code == 0
    assert {path.name for path in (tmp_path / TINY).iterdir()} < whole


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--arch", "sm_90a"), "--arch and --match select keys of the layout tvm-ffi"),
        (("--match", "decode:*"), "--arch and --match select keys of the layout tvm-ffi"),
        (("--layout", "tvm-ffi"), "name one with --dest DIR"),
    ],
)
def test_option_that_means_nothing_is_refused(options: tuple[str, ...], words: str) -> None:
    result = run("export", TINY, *options)
    assert result.exit_code == 2
    assert words in result.stderr


def test_folder_of_the_other_layout_is_not_written_over(tmp_path: Path) -> None:
    for name in (TINY, SHARED_FOLDER):
        shutil.copytree(paths.generated_root() / name, tmp_path / name)
    into_tree = run("export", TINY, "--layout", "tvm-ffi", "--dest", tmp_path)
    assert into_tree.exit_code == 1
    assert "holds cake_jit.py, so an export of another layout" in into_tree.stderr
    assert load_registry(tmp_path / TINY).kernels
    apart = tmp_path / "apart"
    assert run("export", TINY, "--layout", "tvm-ffi", "--dest", apart, "--match", "tail_norm:*").exit_code == 0
    assert "holds manifest.json" in run("export", TINY, "--dest", apart).stderr
