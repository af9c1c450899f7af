"""Registries are parsed, never executed; a damaged or foreign one is refused with its file and the way out."""

from __future__ import annotations

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from support.models import tiny_model
from support.small_registry import NO_DIGEST, registry_text, registry_values, small_record, write_sources

from cakegen import paths
from cakegen import registry as registry_module
from cakegen.compile.bundle import BUNDLE_SCHEMA
from cakegen.compile.cache_folder import CACHE_SCHEMA
from cakegen.errors import RegistryError
from cakegen.model import to_literal
from cakegen.registry import SCHEMA, SCHEMA_VERSION, TABLES, load_registry, parse_tables, schema_version
from cakegen.registry_text import WRITERS, written_by

RECORD = small_record()


def values_of(record: dict[str, Any] = RECORD) -> dict[str, Any]:
    return registry_values(
        "small", to_literal(tiny_model()), {"one": record}, {"tail_norm:e0": "one"}, {"tail_norm:e0": {"SCALE": 2}}
    )


def write_registry(folder: Path, values: dict[str, Any], more: str = "") -> Path:
    (folder / "cake_jit.py").write_text(registry_text(values) + more)
    return folder


def test_registry_holds_what_its_literals_say(tmp_path: Path) -> None:
    registry = load_registry(write_registry(tmp_path, values_of()))
    assert registry.model == tiny_model()
    program = registry.program("tail_norm:e0")
    assert (program.kernel_source, program.binding_source) == ("one_kernel.cu", "one_binding.cu")
    assert program.kernel_symbol == "kernel_one"
    assert program.launch.block == (128, 1, 1)
    assert registry.constants("tail_norm:e0") == {"SCALE": 2}
    assert registry.constants("tail_norm:e1") == {}
    assert registry.csrc == tmp_path / "csrc" / "cake_small"


def test_registry_is_not_executed(tmp_path: Path) -> None:
    for more in ("open('mark', 'w')\n", "EXTRA = [open]\n", "EXTRA = [1]; open('mark', 'w')\n", "import os\n"):
        write_registry(tmp_path, values_of(), more)
        with pytest.raises(RegistryError, match="not a registry"):
            load_registry(tmp_path)
        assert not Path("mark").exists()


@pytest.mark.parametrize("version", [1, 2, "2", f"{SCHEMA + 1}{SCHEMA_VERSION[1:]}", SCHEMA_VERSION[:-1]])
def test_unknown_schema_version_is_refused_before_the_rest_is_read(tmp_path: Path, version: object) -> None:
    values = {"SCHEMA_VERSION": version}
    with pytest.raises(RegistryError, match=rf"cake_jit\.py: schema version {version!r}, .*; this cakegen reads"):
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


def test_tree_of_whole_records_is_refused_by_its_version(tmp_path: Path) -> None:
    """Not as damaged: nothing is wrong with it but its age."""
    (tmp_path / "cake_jit.py").write_text("SCHEMA_VERSION = \"2-42364d98\"\nEXPORT = 'small'\nMODEL = {'a': True,}\n")
    with pytest.raises(
        RegistryError,
        match=rf"schema version '2-42364d98', written by cakegen before 0.1.0; this cakegen reads '{SCHEMA_VERSION}'. "
        "Export again, or read it with the cakegen that wrote it",
    ):
        load_registry(tmp_path)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("1", "written by cakegen before 0.1.0"),
        ("3-00000000", "written by cakegen 0.1.0"),
        ("99-00000000", "written by a later cakegen"),
        (3, "which no release of cakegen wrote"),
        ("x", "which no release of cakegen wrote"),
    ],
)
def test_a_schema_tells_the_release_that_wrote_it(version: object, words: str) -> None:
    assert written_by(version) == words


def test_the_present_schema_has_a_release_that_the_changes_name() -> None:
    release = WRITERS[str(SCHEMA)]
    changes = (Path(__file__).parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    section = changes.partition(f"## {release}")[2]
    assert f"Registry schema {SCHEMA}, bundle schema {BUNDLE_SCHEMA}, cache schema {CACHE_SCHEMA}" in section


def module(**fields: Any) -> dict[str, Any]:
    return {"one": {**values_of()["MODULES"]["one"], **fields}}


def launch(**fields: Any) -> dict[str, Any]:
    return {"launch_0": {**RECORD["launch"], **fields}}


MODEL = to_literal(tiny_model())
BLOCK = MODEL["dims"]["block"]


def with_block(path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """The small model with another value somewhere in its block."""
    model = copy.deepcopy(MODEL)
    at = model["dims"]["block"]
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    return model


DAMAGES: dict[str, tuple[str, object, str]] = {
    "text for a module": ("MODULES", {"one": "two"}, "ProgramEntry: needs the fields"),
    "launch without a field": ("LAUNCHES", {"launch_0": {}}, r"LAUNCHES\['launch_0'\]: needs the fields"),
    "launch of no threads": (
        "LAUNCHES",
        launch(block=[0, 1, 1]),
        r"block \(0, 1, 1\), .*: 1 … 1024 each",
    ),
    "launch of two extents": ("LAUNCHES", launch(block=[128, 1]), "needs 3 items; got 2"),
    "launch of too much memory": ("LAUNCHES", launch(dynamic_smem_bytes=2**31), "2147483648 bytes of shared memory"),
    "number for a switch": ("LAUNCHES", launch(overlap=1), "overlap: needs bool; got 1"),
    "module without flags": (
        "MODULES",
        {"one": {name: row for name, row in module()["one"].items() if name != "flags"}},
        "needs the fields",
    ),
    "flags that are no list": ("FLAGS", {"flags_0": "-std=c++17"}, "needs a list; got str"),
    "row that is not there": ("MODULES", module(launch="t0"), "one: needs a row of LAUNCHES; got 't0'"),
    "argument of one word": ("ARG_PLANS", {"arg_plan_0": [["buffer"]]}, "needs 2 items; got 1"),
    "barrier without a count": ("BARRIERS", {"barriers_0": [["full", "4"]]}, "needs int; got '4'"),
    "tensor map of other fields": ("TENSOR_MAPS", {"tensor_maps_0": [{"name": "x"}]}, "needs the fields"),
    "table that is a list": ("TENSOR_MAPS", [], "TENSOR_MAPS: needs a dict; got list"),
    "kernel's digest missing": ("FILES", {"one_binding.cu": NO_DIGEST}, "'one_kernel.cu' needs a sha256 of 64 hex"),
    "binding's digest missing": ("FILES", {"one_kernel.cu": NO_DIGEST}, "'one_binding.cu' needs a sha256 of 64 hex"),
    "digest that is none": (
        "FILES",
        {"one_kernel.cu": NO_DIGEST[:-1] + "g", "one_binding.cu": NO_DIGEST},
        "needs a sha256 of 64 hex digits",
    ),
    "program outside of the tree": ("MODULES", {"../one": module()["one"]}, "MODULES: needs a plain file name"),
    "list of kernels": ("KERNELS", ["tail_norm:e0"], "KERNELS: needs a dict; got list"),
    "kernel without a program": ("KERNELS", {"tail_norm:e0": "two"}, "needs a program of MODULES; got 'two'"),
    "kernel of a list": ("KERNELS", {"tail_norm:e0": ["one"]}, r"needs a program of MODULES; got \['one'\]"),
    "constants that are none": (
        "SPECIALIZATIONS",
        {"tail_norm:e0": 3},
        "SPECIALIZATIONS of 'tail_norm:e0': needs a dict; got int",
    ),
    "model without a field": ("MODEL", {k: MODEL[k] for k in MODEL if k != "dims"}, "Model: needs the fields"),
    "unknown field": ("MODEL", {**MODEL, "more": 1}, "'more'"),
    "wrong type": ("MODEL", {**MODEL, "max_tokens": True}, "Model.max_tokens: needs int; got True"),
    "flag that writes a file": (
        "FLAGS",
        {"flags_0": ["-std=c++17", "--create-pch=build/x"]},
        r"FLAGS\['flags_0'\]: the option '--create-pch=build/x' is none that a tree may ask for",
    ),
    "key with a line end": ("KERNELS", {"tail_norm:e0\n": "one"}, r"needs printable texts; got 'tail_norm:e0\\n'"),
    "key with half a pair": ("KERNELS", {"a\ud800": "one"}, r"needs printable texts; got 'a\\ud800'"),
    "key that moves the cursor": ("KERNELS", {"\x1b[2J": "one"}, r"needs printable texts; got '\\x1b\[2J'"),
    "role that moves the cursor": ("MODULES", module(role="\x1b[2J"), "needs printable texts"),
    "constant that is no name": ("SPECIALIZATIONS", {"tail_norm:e0": {"A=1 -x": 3}}, "needs names with int values"),
    "stage of another form": (
        "MODEL",
        with_block(("stages", 0, "form"), "columns"),
        "needs a record whose form is one",
    ),
    "stage of no form": ("MODEL", with_block(("stages", 0), ["rows"]), "needs a record whose form is one"),
    "another dtype": (
        "MODEL",
        with_block(("stages", 0, "products", 0, "dtype"), "fp8"),
        r"dtype: needs one of \['bf16', 'fp32'\]; got 'fp8'",
    ),
    "one stage": ("MODEL", with_block(("stages",), BLOCK["stages"][:1]), "needs a stage of rows, then one of sum"),
    "two stages of a name": ("MODEL", with_block(("stages", 1, "name"), "front"), "needs stages of two names, and one"),
    "one segment": (
        "MODEL",
        with_block(("stages", 1, "segments"), BLOCK["stages"][1]["segments"][:1]),
        "needs a segment of a prepared sum, and one of others; got 1 segments",
    ),
    "an activation of another name": (
        "MODEL",
        with_block(("stages", 0, "products", 2, "activation"), "selu"),
        "needs one of the activations situ, .*; got 'selu'",
    ),
    "an operand that is no name": (
        "MODEL",
        with_block(("stages", 0, "products", 0, "weight"), "x) -> ()"),
        r"needs names of a-z, 0-9 and _; got 'x\) -> \(\)'",
    ),
    "an extent that is no number": (
        "MODEL",
        with_block(("stages", 0, "k"), "block"),
        "needs extents that are numbers of the model; got 'block'",
    ),
    "a norm without its number": (
        "MODEL",
        {**MODEL, "dims": {name: value for name, value in MODEL["dims"].items() if name != "norm_eps"}},
        "norm_eps: needs a number where the block has a norm; got None",
    ),
    "text for a tuple": ("MODEL", {**MODEL, "targets": "all"}, "Model.targets: needs a list; got str"),
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.replace(" ", "_"))
def test_damaged_registry_is_refused_with_its_file(tmp_path: Path, damage: str) -> None:
    name, value, message = DAMAGES[damage]
    write_registry(tmp_path, values_of() | {name: value})
    with pytest.raises(RegistryError, match=message) as caught:
        load_registry(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'cake_jit.py'}: damaged ")
    assert str(caught.value).endswith("export again")


@pytest.mark.parametrize("name", list(values_of()))
def test_registry_that_lacks_a_name_is_refused(tmp_path: Path, name: str) -> None:
    values = values_of()
    del values[name]
    with pytest.raises(RegistryError, match=rf"cake_jit\.py: lacks {name}; export again"):
        load_registry(write_registry(tmp_path, values))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("SCHEMA_VERSION = \n", "JSONDecodeError: Expecting value"),
        ("EXPORT = 'small'\n", "Expecting value"),
        ('EXPORT = ["a",]\n', "JSONDecodeError"),
        ("EXPORT = NaN\n", "NaN is no JSON"),
        ("EXPORT = -Infinity\n", "-Infinity is no JSON"),
        ('EXPORT = "a"\nEXPORT = "b"\n', "EXPORT is assigned twice"),
        ('EXPORT = "a" + "b"\n', "line 1: needs a line's end behind a value; got"),
        ('# one\n\nEXPORT: str = "a"\n', "line 3: needs `NAME = ` and JSON; got"),
        ("EXPORT = " + "[" * 100_000 + "\n", "RecursionError"),
    ],
)
def test_text_that_is_no_registry_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "cake_jit.py").write_text(text)
    with pytest.raises(RegistryError, match=r"cake_jit\.py: not a registry") as caught:
        load_registry(tmp_path)
    assert why in str(caught.value)


def test_python_imports_what_the_reader_reads(tmp_path: Path) -> None:
    """The line of JSON's names is what makes a module of it."""
    values = values_of() | {"MODEL": {"no": False, "yes": True, "none": None, "half": 0.5, "text": "é\n"}}
    namespace: dict[str, Any] = {}
    exec(compile(registry_text(values), "cake_jit.py", "exec"), namespace)
    assert {name: namespace[name] for name in values} == values == parse_tables(registry_text(values), "x")


def test_name_is_a_shipped_export_and_never_a_folder_of_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can write where a command is started would else choose what is compiled and launched."""
    (tmp_path / "tiny_latent_moe").mkdir()
    write_registry(tmp_path / "tiny_latent_moe", values_of())
    (tmp_path / "mine").mkdir()
    write_registry(tmp_path / "mine", values_of())
    monkeypatch.chdir(tmp_path)
    assert load_registry("tiny_latent_moe").root == paths.generated_root() / "tiny_latent_moe"
    with pytest.raises(RegistryError, match=r"no registry there; .* A folder is written as a path: \./mine"):
        load_registry("mine")
    for spelled in ("./mine", "mine/", str(tmp_path / "mine"), Path("mine")):
        assert load_registry(spelled).export == "small"


@pytest.mark.parametrize("place", ["cake_jit.py", "csrc/cake_small/one_kernel.cu", "csrc"])
def test_symbolic_link_in_a_tree_is_not_followed(tmp_path: Path, place: str) -> None:
    root, outside = tmp_path / "tree", tmp_path / "outside"
    root.mkdir()
    write_registry(root, values_of())
    write_sources(root, "small", {"one_kernel.cu": "text"})
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
    registry = load_registry(write_registry(tmp_path, values_of()))
    with pytest.raises(RegistryError, match="no program for key 'front:i1'; `cakegen list --export small`"):
        registry.program("front:i1")
    with pytest.raises(RegistryError, match=r"one_kernel\.cu: No such file or directory; run `cakegen export small`"):
        registry.read("one_kernel.cu")


def test_registry_is_read_by_work_that_grows_with_its_rows_not_with_its_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table's row is checked once, however many programs name it."""
    checked: list[str] = []
    original = registry_module.convert_literal

    def counted(kind: Any, value: Any, where: str) -> Any:
        checked.append(where)
        return original(kind, value, where)

    monkeypatch.setattr(registry_module, "convert_literal", counted)
    records = {f"p{number}": RECORD for number in range(50)}
    values = registry_values("small", to_literal(tiny_model()), records, {}, {})
    assert len(load_registry(write_registry(tmp_path, values)).programs) == 50
    assert len(checked) == len(TABLES)
