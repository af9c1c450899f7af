"""Trees: which programs an export reaches, what their files hold, and that equal inputs give equal bytes."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
import pytest
from support.models import changed, kimi_k3_model, tiny_model
from support.random_models import model_toml, random_model

from cakegen import paths
from cakegen.emit import RenderedTree, render_tree, shared, write_exports
from cakegen.emit.program import COMPILE_FLAGS
from cakegen.emit.reach import reached_keys, reached_plans
from cakegen.emit.seal import included_files, is_intact
from cakegen.emit.shared import included_closure
from cakegen.errors import EmitError
from cakegen.model import DeviceFacts, Model, Target
from cakegen.plan import plan_route
from cakegen.plan.shape import BLOCK_M
from cakegen.registry import TABLES, closure_digest, file_digest, load_registry, parse_tables
from cakegen.rules import LandingAlias
from cakegen.spec import parse_export

MOST_HEADER_LINES, MOST_REGISTRY_LINES = 450, 9000


@pytest.fixture(scope="module")
def tiny_tree() -> RenderedTree:
    """The small model's tree, from the real templates."""
    return render_tree(tiny_model(), "tiny_latent_moe")


def small_model() -> Model:
    """Few programs: one TP degree on one part."""
    return dataclasses.replace(tiny_model(), targets=(Target("sm_90a", (8,), (132,)),))


def program_names(files: dict[str, str]) -> set[str]:
    return {Path(name).name.removesuffix("_kernel.cu") for name in files if name.endswith("_kernel.cu")}


def test_every_file_is_sealed_and_lf(tiny_tree: RenderedTree) -> None:
    for name, text in {**tiny_tree.files, **tiny_tree.headers}.items():
        assert is_intact(text), name
        assert "\r" not in text
        assert max(map(len, text.split("\n"))) <= 120, name


def test_every_program_is_a_pair_and_includes_shared_headers_alone(tiny_tree: RenderedTree) -> None:
    folder = "csrc/cake_tiny_latent_moe"
    names = program_names(tiny_tree.files)
    expected = {f"{folder}/{name}_{half}.cu" for name in names for half in ("kernel", "binding")}
    assert set(tiny_tree.files) == expected | {"cake_jit.py", "README.md"}
    used = set()
    for name in names:
        used |= set(included_files(tiny_tree.files[f"{folder}/{name}_kernel.cu"]))
        used |= set(included_files(tiny_tree.files[f"{folder}/{name}_binding.cu"])) - {f"{name}_kernel.cu"}
    for text in tiny_tree.headers.values():
        used |= set(included_files(text))
    assert used == set(tiny_tree.headers)


def test_header_says_no_export_and_is_short(tiny_tree: RenderedTree) -> None:
    assert {"cake_device_base.cuh", "cake_device_mbarrier.cuh", "cake_host_common.cuh"} <= set(tiny_tree.headers)
    for name, text in tiny_tree.headers.items():
        assert not re.search("latent_moe|kernel_", name + text), name
        assert text.count("\n#pragma once\n") == 1, name
        assert "// From templates/" not in text or text.count("\n") <= MOST_HEADER_LINES, name


def test_name_of_a_program_says_role_family_and_tile(tiny_tree: RenderedTree) -> None:
    tile = r"(?:decode_(?:front|tail)_sm(?:90|100)_n\d+|(?:front|tail)_gemm_sm(?:90|100)_m\d+n\d+|tail_norm_sm\d+_r\d+)"
    for name in program_names(tiny_tree.files):
        assert re.fullmatch(rf"cake_tiny_latent_moe_{tile}_[0-9a-f]{{20}}", name), name


def test_kernel_defines_its_symbol_once_and_no_other(tiny_tree: RenderedTree) -> None:
    for name in program_names(tiny_tree.files):
        text = tiny_tree.files[f"csrc/cake_tiny_latent_moe/{name}_kernel.cu"]
        assert text.count(f"kernel_{name}") == 1
        assert text.count('extern "C" __global__') == 1


@pytest.mark.parametrize("model", [kimi_k3_model, tiny_model])
def test_registry_reads_back_what_was_exported(tmp_path: Path, model: Callable[[], Model]) -> None:
    expected = model()
    rendered = render_tree(expected, expected.name)
    write_exports(tmp_path, [rendered])
    registry = load_registry(tmp_path / expected.name)
    assert registry.model == expected
    assert registry.export == expected.name
    keys = reached_keys(expected)
    assert registry.kernels == {entry.key: entry.program.name for entry in keys}
    assert set(registry.programs) == program_names(rendered.files)
    for entry in keys:
        program, spec = registry.program(entry.key), entry.program
        assert program.arg_plan == spec.arg_plan
        assert program.tensor_maps == spec.tensor_maps
        assert program.barriers == spec.barriers
        assert program.launch == spec.launch
        assert set(entry.arches) <= set(program.arches)
        sources = [(file, file_digest(text)) for file, text in registry.closure(program)]
        assert program.headers == included_closure(program.kernel_source, dict(registry.closure(program)))
        for arch, digest in program.closure_digest:
            assert digest == closure_digest(arch, sources, COMPILE_FLAGS)


def test_registry_states_each_row_once_and_keeps_to_its_lines(tiny_tree: RenderedTree) -> None:
    text = tiny_tree.files["cake_jit.py"]
    assert text.count("\n") <= MOST_REGISTRY_LINES
    values = parse_tables(text, "x")
    for table in TABLES:
        rows = [repr(row) for row in values[table].values()]
        assert len(set(rows)) == len(rows), table
        field = {"ARG_PLANS": "arg_plan", "LAUNCHES": "launch"}.get(table, table.lower())
        assert {entry[field] for entry in values["MODULES"].values()} == set(values[table]), "a row that nobody names"
    sources = {Path(name).name for name in tiny_tree.files if name.startswith("csrc/")}
    assert set(values["FILES"]) == sources


def test_row_of_a_registry_keeps_its_name_when_others_come() -> None:
    """So that a new program adds lines and renames none."""
    few = small_model()
    more = dataclasses.replace(few, targets=(Target("sm_90a", (4, 8), (132,)),))
    one, two = (parse_tables(render_tree(model, model.name).files["cake_jit.py"], "x") for model in (few, more))
    for table in (*TABLES, "FILES", "MODULES"):
        assert one[table].items() <= two[table].items(), table
        assert len(two["MODULES"]) > len(one["MODULES"])


def test_every_request_of_the_declared_parts_has_a_program() -> None:
    model = tiny_model()
    keys = {entry.key for entry in reached_keys(model)}
    device = DeviceFacts.nominal("sm_90a", 114)
    for tokens in range(1, 386):
        for partials in (1, 5, model.max_partials):
            plan = plan_route(model, stage="tail", tp=16, tokens=tokens, partials=partials, device=device)
            assert {launch.key for launch in plan.launches} <= keys


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_declared_hopper_parts_cover_every_larger_slice_of_one(tp: int) -> None:
    """With as many SMs as the tail has tiles, any SM count and any number of resident pairs has its programs."""
    model = kimi_k3_model()
    keys = {entry.key for entry in reached_keys(model)}
    tail_tiles = model.dims.hidden // BLOCK_M
    nominal = DeviceFacts.nominal("sm_90a", 132)
    for sm_count in range(tail_tiles, 133):
        for pairs in {0, sm_count // 2, sm_count // 2 - 8}:
            device = dataclasses.replace(nominal, sm_count=sm_count, resident_pairs=pairs)
            for tokens in (1, 4, 8, 9, 16, 17, 33, 65):
                for stage, partials in (("front", 1), ("tail", 1), ("tail", 2)):
                    plan = plan_route(model, stage=stage, tp=tp, tokens=tokens, partials=partials, device=device)
                    assert {launch.key for launch in plan.launches} <= keys


def test_plans_walk_the_ends_of_token_tiles_and_pair_rows() -> None:
    plans = list(reached_plans(small_model()))
    assert {plan.device.arch for plan in plans} == {"sm_90a"}
    tokens = {plan.tokens for plan in plans}
    decode_ends = {1, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 160, 161, 192, 193, 256, 257, 320, 321, 384, 385}
    assert tokens >= decode_ends | {512, 513, 16384}, "the ends of token tiles and of pair rows"
    assert not tokens & set(range(386, 512))


def test_export_of_another_name_is_refused() -> None:
    with pytest.raises(EmitError, match="the two names must be the same"):
        render_tree(tiny_model(), "other")


def test_edit_of_a_header_changes_that_header_alone(templates: Path) -> None:
    model = small_model()
    before = render_tree(model, model.name, templates)
    base = templates / "device/base.cuh"
    base.write_text(base.read_text() + "using u8 = unsigned char;\n")
    after = render_tree(model, model.name, templates)
    assert after.files == before.files
    assert set(after.headers) == set(before.headers)
    assert {name for name, text in after.headers.items() if text != before.headers[name]} == {"cake_device_base.cuh"}


def test_edit_of_a_header_changes_the_digests_of_its_includers_only(tmp_path: Path, templates: Path) -> None:
    model = dataclasses.replace(small_model(), targets=(Target("sm_90a", (8,), (3,)),))
    digests = []
    for step in range(2):
        write_exports(tmp_path / str(step), [render_tree(model, model.name, templates)])
        registry = load_registry(tmp_path / str(step) / model.name)
        digests.append({(p.role, name): p.closure_digest for name, p in registry.programs.items()})
        (templates / "device/wgmma.cuh").write_text("#pragma once\n// another\n")
    changed = {role for role, name in digests[0] if digests[0][role, name] != digests[1][role, name]}
    with_wgmma = {"decode_front", "decode_tail", "front_gemm", "tail_gemm"}
    assert {role for role, _ in digests[0]} == with_wgmma | {"tail_norm"}
    assert changed == with_wgmma


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("max_stages = 12", "max_stages = 6"),
        ("n_pads = [8, 16, 32, 64, 128]", "n_pads = [16, 32, 64, 128]"),
        ("tp_degrees = [1, 2, 4, 8, 16]", "tp_degrees = [4]"),
        ("from_chunks = 4\n", "from_chunks = 64\n"),
    ],
)
def test_one_edited_line_of_the_export_changes_programs(tmp_path: Path, before: str, after: str) -> None:
    text = model_toml(tiny_model())
    assert before in text
    names = []
    for number, content in enumerate((text, text.replace(before, after, 1))):
        file = tmp_path / str(number) / "export.toml"
        file.parent.mkdir()
        file.write_text(content)
        model = parse_export(file).to_model()
        names.append({entry.program.name for entry in reached_keys(model)})
    assert names[0] != names[1]


def test_edit_of_a_threshold_that_no_plan_meets_changes_no_source(tmp_path: Path) -> None:
    model = small_model()
    base, other = (changed(model, hopper__decode__landing_alias=LandingAlias(128, least)) for least in (4000, 5000))
    one, two = render_tree(base, base.name).files, render_tree(other, other.name).files
    assert {name for name in one if one[name] != two[name]} == {"cake_jit.py"}


@pytest.mark.parametrize("seed", range(8))
def test_random_model_exports(tmp_path: Path, seed: int) -> None:
    model = random_model(seed)
    file = tmp_path / model.name / "export.toml"
    file.parent.mkdir()
    file.write_text(model_toml(model))
    rendered = render_tree(parse_export(file).to_model(), model.name)
    assert rendered == render_tree(model, model.name)
    assert len(program_names(rendered.files)) == len({entry.program.name for entry in reached_keys(model)})


def test_export_renders_each_text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An export's cost is its texts: two for a program, one for a header, and each export renders no more."""
    rendered: list[str] = []
    original = shared.render_template

    def render(environment: jinja2.Environment, name: str, context: Mapping[str, Any]) -> str:
        rendered.append(name)
        return original(environment, name, context)

    monkeypatch.setattr(shared, "render_template", render)
    tree = render_tree(small_model(), "tiny_latent_moe")
    programs = program_names(tree.files)
    assert len(rendered) == 2 * len(programs) + len(tree.headers)
    assert sorted(Counter(rendered).values())[-2:] == [len(programs)] * 2


RENDER = """
import dataclasses, hashlib, os, sys
os.chdir(sys.argv[1])
from support.models import tiny_model
from cakegen.emit import render_tree
targets = tuple(dataclasses.replace(t, tp_degrees=(8,), sm_counts=t.sm_counts[:2]) for t in tiny_model().targets)
files = render_tree(dataclasses.replace(tiny_model(), targets=targets), "tiny_latent_moe")
texts = sorted({**files.files, **files.headers}.items())
print(list(files.files) == sorted(files.files), hashlib.sha256(repr(texts).encode()).hexdigest())
"""


def test_bytes_do_not_depend_on_hash_seed_locale_folder_or_clock(tmp_path: Path) -> None:
    root = Path(paths.__file__).parents[1]
    processes = []
    for seed in range(6):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": str(seed),
            "PYTHONPATH": os.pathsep.join((str(root), str(root / "tests"))),
            "LC_ALL": ("C", "C.UTF-8", "POSIX")[seed % 3],
            "PYTHONUTF8": str(seed % 2),
            "TZ": ("UTC", "Asia/Tokyo")[seed % 2],
        }
        folder = (tmp_path, root)[seed % 2]
        command = [sys.executable, "-c", RENDER, str(folder)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = {process.communicate()[0] for process in processes}
    assert all(process.returncode == 0 for process in processes)
    assert len(outputs) == 1
    assert outputs.pop().startswith("True ")


def test_reached_keys_are_sorted() -> None:
    keys = [entry.key for entry in reached_keys(small_model())]
    assert keys == sorted(set(keys))


def test_digests_of_different_records_differ() -> None:
    records = [
        ("sm_90a", [("a.cu", "xy")], ("-f", "-g")),
        ("sm_100a", [("a.cu", "xy")], ("-f", "-g")),
        ("sm_90a", [("a.cux", "y")], ("-f", "-g")),
        ("sm_90a", [("a.cu", "xy")], ("-f-g",)),
        ("sm_90a", [("a.cu", "xy")], ("-g", "-f")),
        ("sm_90a", [("a.cu", "x"), ("y", "")], ("-f", "-g")),
        ("sm_90a", [("a.cu", "xy"), ("-f", "-g")], ()),
    ]
    digests = [closure_digest(arch, closure, flags) for arch, closure, flags in records]
    assert len(set(digests)) == len(digests)


def test_tree_does_not_depend_on_the_order_of_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates are found by their names alone: nothing that a file system lists in an order of its own is asked."""
    expected = render_tree(small_model(), "tiny_latent_moe")

    def refuse(*arguments: object) -> None:
        raise AssertionError(f"a folder was listed: {arguments}")

    for name in ("listdir", "scandir", "walk"):
        monkeypatch.setattr(os, name, refuse)
    assert render_tree(small_model(), "tiny_latent_moe") == expected


def test_two_specifications_of_one_name_are_refused(templates: Path) -> None:
    """Comments, summary and headers are text and no part of the hash: a name must not stand for two texts."""
    keys = reached_keys(small_model())
    again = next(entry for entry in keys if entry.program.role == "decode_front")
    other = dataclasses.replace(again, program=dataclasses.replace(again.program, summary="another"))
    with pytest.raises(EmitError, match=r"share one canonical form but differ in summary"):
        render_tree(small_model(), "tiny_latent_moe", templates, keys=(*keys, other))


def test_lines_fit_the_columns_whatever_the_name_of_the_export_is() -> None:
    targets = tuple(Target(arch, (1,), (132,)) for arch in ("sm_90a", "sm_100a"))
    model = dataclasses.replace(tiny_model(), name="m" * 40, targets=targets)
    tree = render_tree(model, model.name)
    assert {path.rpartition(".")[2] for path in tree.files} == {"cu", "md", "py"}
    assert max(len(line) for text in tree.files.values() for line in text.splitlines()) <= 120
    assert f"  in `csrc/cake_{model.name}`" in tree.files["README.md"].splitlines()
