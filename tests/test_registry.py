"""Registries are parsed, never executed; a damaged or foreign one is refused with its file and the way out."""

from __future__ import annotations

import dataclasses
import pprint
import re
from pathlib import Path
from typing import Any

import pytest
from models import tiny_model

from cakegen import paths
from cakegen import registry as registry_module
from cakegen.errors import RegistryError
from cakegen.model import to_literal
from cakegen.registry import SCHEMA, SCHEMA_VERSION, load_registry, schema_version

MODULE: dict[str, Any] = {
    "role": "tail_norm",
    "sources": ["one_kernel.cu", "one_binding.cu"],
    "headers": ["shared.cuh"],
    "arches": ["sm_90a"],
    "flags": ["-std=c++17"],
    "ffi_entry": "run",
    "arg_plan": [["buffer", "out"], ["parameter", "count"]],
    "tensor_maps": [],
    "barriers": [],
    "launch": {
        "block": [128, 1, 1],
        "cluster": [1, 1, 1],
        "cooperative": False,
        "programmatic": False,
        "overlap": False,
        "dynamic_smem_bytes": 0,
    },
    "closure_digest": {"sm_90a": "0" * 64},
}


def registry_values() -> dict[str, Any]:
    return {
        "SCHEMA_VERSION": SCHEMA_VERSION,
        "EXPORT": "small",
        "MODEL": to_literal(tiny_model()),
        "MODULES": {"one": MODULE},
        "KERNELS": {"tail_norm:e0": "one"},
        "SPECIALIZATIONS": {"tail_norm:e0": {"SCALE": 2}},
    }


def write_registry(folder: Path, values: dict[str, Any], more: str = "") -> Path:
    text = "\n".join(f"{name} = {pprint.pformat(value)}" for name, value in values.items())
    (folder / "cake_jit.py").write_text(text + more)
    return folder


def test_registry_holds_what_its_literals_say(tmp_path: Path) -> None:
    registry = load_registry(write_registry(tmp_path, registry_values()))
    assert registry.model == tiny_model()
    program = registry.program("tail_norm:e0")
    assert (program.kernel_source, program.binding_source) == ("one_kernel.cu", "one_binding.cu")
    assert program.kernel_symbol == "kernel_one"
    assert program.launch.block == (128, 1, 1)
    assert registry.constants("tail_norm:e0") == {"SCALE": 2}
    assert registry.constants("tail_norm:e1") == {}
    assert registry.csrc == tmp_path / "csrc" / "cake_small"


def test_registry_is_not_executed(tmp_path: Path) -> None:
    write_registry(tmp_path, registry_values(), "\nopen('mark', 'w')\nEXTRA = [open]\n")
    with pytest.raises(RegistryError, match="not a registry"):
        load_registry(tmp_path)
    write_registry(tmp_path, registry_values(), "\nopen('mark', 'w')\n")
    load_registry(tmp_path)
    assert not Path("mark").exists()


@pytest.mark.parametrize("version", [1, 2, "2", f"{SCHEMA + 1}{SCHEMA_VERSION[1:]}", SCHEMA_VERSION[:-1]])
def test_unknown_schema_version_is_refused_before_the_rest_is_read(tmp_path: Path, version: object) -> None:
    values = dict.fromkeys(registry_values()) | {"SCHEMA_VERSION": version}
    with pytest.raises(RegistryError, match=rf"cake_jit\.py: schema version {version!r}; this cakegen reads"):
        load_registry(write_registry(tmp_path, values))


def test_schema_version_tells_every_field_of_a_record_and_of_those_within() -> None:
    def version(*fields: tuple[str, Any], **inner: Any) -> str:
        within = dataclasses.make_dataclass("Within", [("a", int), *inner.items()])
        return schema_version(dataclasses.make_dataclass("Whole", [("held", within), *fields]))

    whole = ("overlap", bool), ("sizes", tuple[int, int])
    assert version(*whole) == version(*whole)
    others = [
        version(whole[0]),
        version(*reversed(whole)),
        version(whole[0], ("sizes", tuple[int, ...])),
        version(("overlaps", bool), whole[1]),
        version(*whole, more=int),
    ]
    assert len({version(*whole), *others}) == 1 + len(others)
    assert re.fullmatch(rf"{SCHEMA}-[0-9a-f]{{8}}", SCHEMA_VERSION)


def test_tree_of_before_a_launch_could_overlap_is_refused_by_its_version(tmp_path: Path) -> None:
    """Not as damaged: nothing is wrong with it but its age."""
    launch = {name: value for name, value in MODULE["launch"].items() if name != "overlap"}
    values = registry_values() | {"SCHEMA_VERSION": 1, "MODULES": {"one": {**MODULE, "launch": launch}}}
    with pytest.raises(RegistryError, match=rf"schema version 1; this cakegen reads '{SCHEMA_VERSION}'. Export again."):
        load_registry(write_registry(tmp_path, values))


MODEL = to_literal(tiny_model())
DAMAGES: dict[str, tuple[str, object, str]] = {
    "text for a module": ("MODULES", {"one": "two"}, "damaged MODULES"),
    "module without a launch": ("MODULES", {"one": {**MODULE, "launch": {}}}, "damaged MODULES.*KeyError: 'block'"),
    "module without flags": ("MODULES", {"one": {k: MODULE[k] for k in MODULE if k != "flags"}}, "KeyError: 'flags'"),
    "list of kernels": ("KERNELS", ["tail_norm:e0"], "KERNELS"),
    "kernel without a program": ("KERNELS", {"tail_norm:e0": "two"}, "KeyError: 'two'"),
    "constants that are none": ("SPECIALIZATIONS", {"tail_norm:e0": 3}, "SPECIALIZATIONS"),
    "model without a field": ("MODEL", {k: MODEL[k] for k in MODEL if k != "dims"}, "Model: needs the fields"),
    "unknown field": ("MODEL", {**MODEL, "more": 1}, "'more'"),
    "wrong type": ("MODEL", {**MODEL, "max_tokens": True}, "Model.max_tokens: needs int; got True"),
    "flag that writes a file": (
        "MODULES",
        {"one": {**MODULE, "flags": ["-std=c++17", "--create-pch=build/x"]}},
        "one: the option '--create-pch=build/x' is none that a tree may ask for",
    ),
    "no digest": ("MODULES", {"one": {**MODULE, "closure_digest": {}}}, "one closure_digest for each .*see 'sm_90a'"),
    "digest of another target": (
        "MODULES",
        {"one": {**MODULE, "closure_digest": {"sm_90a": "0" * 64, "sm_100a": "0" * 64}}},
        "one closure_digest for each of its arches; see 'sm_100a'",
    ),
    "key with a line end": ("KERNELS", {"tail_norm:e0\n": "one"}, r"needs printable texts; got 'tail_norm:e0\\n'"),
    "key with half a pair": ("KERNELS", {"a\ud800": "one"}, r"needs printable texts; got 'a\\ud800'"),
    "key that moves the cursor": ("KERNELS", {"\x1b[2J": "one"}, r"needs printable texts; got '\\x1b\[2J'"),
    "role that moves the cursor": ("MODULES", {"one": {**MODULE, "role": "\x1b[2J"}}, "needs printable texts"),
    "constant that is no name": ("SPECIALIZATIONS", {"tail_norm:e0": {"A=1 -x": 3}}, "needs names with int values"),
    "text for a tuple": ("MODEL", {**MODEL, "targets": "all"}, "Model.targets: needs a list; got str"),
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.replace(" ", "_"))
def test_damaged_registry_is_refused_with_its_file(tmp_path: Path, damage: str) -> None:
    name, value, message = DAMAGES[damage]
    write_registry(tmp_path, registry_values() | {name: value})
    with pytest.raises(RegistryError, match=message) as caught:
        load_registry(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'cake_jit.py'}: damaged ")
    assert str(caught.value).endswith("export again")


@pytest.mark.parametrize("name", list(registry_values()))
def test_registry_that_lacks_a_name_is_refused(tmp_path: Path, name: str) -> None:
    values = registry_values()
    del values[name]
    with pytest.raises(RegistryError, match=rf"cake_jit\.py: lacks {name}; export again"):
        load_registry(write_registry(tmp_path, values))


def test_text_that_is_no_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cake_jit.py").write_text("SCHEMA_VERSION = \n")
    with pytest.raises(RegistryError, match=r"cake_jit\.py: not a registry"):
        load_registry(tmp_path)


def test_name_is_a_shipped_export_and_never_a_folder_of_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can write where a command is started would else choose what is compiled and launched."""
    (tmp_path / "tiny_latent_moe").mkdir()
    write_registry(tmp_path / "tiny_latent_moe", registry_values())
    (tmp_path / "mine").mkdir()
    write_registry(tmp_path / "mine", registry_values())
    monkeypatch.chdir(tmp_path)
    assert load_registry("tiny_latent_moe").root == paths.generated_root() / "tiny_latent_moe"
    with pytest.raises(RegistryError, match=r"no registry there; .* A folder is written as a path: \./mine"):
        load_registry("mine")
    for spelled in ("./mine", "mine/", str(tmp_path / "mine"), Path("mine")):
        assert load_registry(spelled).export == "small"


@pytest.mark.parametrize("place", ["cake_jit.py", "csrc/cake_small/one_kernel.cu", "csrc"])
def test_symbolic_link_in_a_tree_is_not_followed(tmp_path: Path, place: str) -> None:
    root, outside = tmp_path / "tree", tmp_path / "outside"
    (root / "csrc" / "cake_small").mkdir(parents=True)
    write_registry(root, registry_values())
    (root / "csrc" / "cake_small" / "one_kernel.cu").write_text("text")
    assert load_registry(root).read("one_kernel.cu") == "text"
    registry_module._load.cache_clear()
    (root / place).rename(outside)
    (root / place).symlink_to(outside)
    with pytest.raises(RegistryError, match="is a symbolic link, which is not followed"):
        load_registry(root).read("one_kernel.cu")


def test_missing_tree_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "generated_root", lambda: tmp_path)
    with pytest.raises(RegistryError, match="no registry there; run `cakegen export absent`"):
        load_registry("absent")


@pytest.mark.parametrize("folder", ["", "/etc", "some/folder"])
def test_folder_without_a_tree_is_named_and_what_a_tree_is(folder: str) -> None:
    with pytest.raises(
        RegistryError, match=rf"'{folder}': no tree with cake_jit\.py there; name an export, or a folder DIR"
    ):
        load_registry(folder)


def test_unknown_key_and_missing_source_say_what_to_run(tmp_path: Path) -> None:
    registry = load_registry(write_registry(tmp_path, registry_values()))
    with pytest.raises(RegistryError, match="no program for key 'front:i1'; `cakegen list --export small`"):
        registry.program("front:i1")
    with pytest.raises(RegistryError, match=r"one_kernel\.cu: No such file or directory; run `cakegen export small`"):
        registry.read("one_kernel.cu")
