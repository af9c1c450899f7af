"""Headers that all exports share: how they are named, what of a folder they are, and how little an edit changes."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.models import tiny_model

from cakegen import paths
from cakegen.emit import RenderedTree, render_tree, shared_files, write_exports
from cakegen.emit.environment import template_environment
from cakegen.emit.seal import is_intact
from cakegen.emit.shared import HeaderPool, seal_header
from cakegen.errors import EmitError
from cakegen.model import Model, Target
from cakegen.registry import SHARED_FILE, load_registry, parse_shared_table

# of what an edit of one header may change: files, and lines that go or come
MOST_FILES, MOST_LINES = 6, 60
EXPORTS = 10


def pool_of(root: Path, texts: dict[str, str]) -> HeaderPool:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return HeaderPool(template_environment(root))


def test_header_is_called_after_its_template_and_what_it_is_given(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, {"device/mma.cuh": "// ${n | i32}\n", "kernels/front/sm90.cuh": "// front\n"})
    assert pool.header("kernels/front/sm90.cuh") == "cake_kernels_front_sm90.cuh"
    assert pool.header("device/mma.cuh", n=96) == "cake_device_mma_n96.cuh"
    texts = pool.texts()
    assert set(texts) == {"cake_kernels_front_sm90.cuh", "cake_device_mma_n96.cuh"}
    assert texts["cake_device_mma_n96.cuh"].endswith("\n\n// 96\n")
    assert all(is_intact(text) for text in texts.values())
    assert "// From templates/device/mma.cuh." in texts["cake_device_mma_n96.cuh"]
    assert "// Shared by all exports; written by `cakegen export`." in texts["cake_device_mma_n96.cuh"]


def test_pool_holds_what_its_headers_include(tmp_path: Path) -> None:
    include = '#include "device/b.cuh"\n#include "device/deeper/d.cuh"\n// #include "device/c.cuh"\n'
    parts = {"device/b.cuh": "// b\n", "device/c.cuh": "// c\n", "device/deeper/d.cuh": "// d\n"}
    pool = pool_of(tmp_path, {"device/a.cuh": include, **parts})
    pool.header("device/a.cuh")
    texts = pool.texts()
    assert set(texts) == {"cake_device_a.cuh", "cake_device_b.cuh", "cake_device_deeper_d.cuh"}
    assert texts["cake_device_a.cuh"].endswith(
        '\n\n#include "cake_device_b.cuh"\n#include "cake_device_deeper_d.cuh"\n// #include "device/c.cuh"\n'
    )


def test_include_of_no_template_is_refused(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, {"device/a.cuh": '#include "device/absent.cuh"\n'})
    pool.header("device/a.cuh")
    with pytest.raises(EmitError, match=r"template 'device/absent\.cuh': No such file"):
        pool.texts()


@pytest.mark.parametrize("template", ["../a.cuh", "device/a.cu", "Device/a.cuh", "device//a.cuh", "/device/a.cuh"])
def test_path_of_no_header_is_refused(tmp_path: Path, template: str) -> None:
    with pytest.raises(EmitError, match=r"is no template of a header; name a \.cuh below templates/ in small letters"):
        pool_of(tmp_path, {}).header(template)


def test_two_headers_of_one_file_name_are_refused(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, {})
    pool.header("device/a_b.cuh")
    with pytest.raises(EmitError, match=r"would both be written to cake_device_a_b\.cuh; rename one of them"):
        pool.header("device/a/b.cuh")
    pool.header("device/c.cuh", n=1)
    with pytest.raises(EmitError, match=r"would both be written to cake_device_c_n1\.cuh"):
        pool.header("device/c_n1.cuh")


def test_header_knows_no_program(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, {"device/a.cuh": "// ${spec.name | ident}\n"})
    pool.header("device/a.cuh")
    with pytest.raises(EmitError, match=r"templates/device/a\.cuh:1: 'spec' is undefined"):
        pool.texts()


def tree_of(export: str, **headers: str) -> RenderedTree:
    sealed = {f"{name}.cuh": seal_header(f"{name}.cuh", "A header.", f"// {text}\n") for name, text in headers.items()}
    registry = "# seal: sha256 " + "0" * 64 + "\n"
    return RenderedTree(export, {"cake_jit.py": registry}, sealed)


def names_in(folder: Path) -> set[str]:
    names = {path.name for path in folder.iterdir()}
    assert set(parse_shared_table((folder / SHARED_FILE).read_text(), "x")) == names - {SHARED_FILE}
    return names - {SHARED_FILE}


def test_export_keeps_the_headers_of_the_trees_beside_it_and_drops_them_with_the_last(tmp_path: Path) -> None:
    write_exports(tmp_path, [tree_of("one", a="a", b="b")])
    write_exports(tmp_path, [tree_of("two", b="b", c="c")])
    assert names_in(tmp_path / "shared") == {"a.cuh", "b.cuh", "c.cuh"}
    write_exports(tmp_path, [tree_of("two", c="c")])
    assert names_in(tmp_path / "shared") == {"a.cuh", "b.cuh", "c.cuh"}, "one may include them"
    shutil.rmtree(tmp_path / "one")
    write_exports(tmp_path, [tree_of("two", c="c")])
    assert names_in(tmp_path / "shared") == {"c.cuh"}


def test_export_of_all_holds_what_any_includes(tmp_path: Path) -> None:
    write_exports(tmp_path, [tree_of("one", a="a", old="old"), tree_of("two", b="b")])
    write_exports(tmp_path, [tree_of("one", a="a"), tree_of("two", b="b")])
    assert names_in(tmp_path / "shared") == {"a.cuh", "b.cuh"}


def test_header_that_two_exports_would_write_differently_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EmitError, match=r"two: would write another a\.cuh than one; a header is shared"):
        write_exports(tmp_path, [tree_of("one", a="a"), tree_of("two", a="b")])
    assert not (tmp_path / "one").exists()


def test_edited_header_of_another_tree_is_not_taken_for_generated(tmp_path: Path) -> None:
    write_exports(tmp_path, [tree_of("one", a="a")])
    (tmp_path / "shared" / "a.cuh").write_text((tmp_path / "shared" / "a.cuh").read_text() + "// mine\n")
    with pytest.raises(EmitError, match=r"a\.cuh: edited by hand, and other trees include it"):
        shared_files(tmp_path, [tree_of("two", b="b")])
    write_exports(tmp_path, [tree_of("one", a="a")])


def test_no_export_can_be_called_as_the_shared_folder() -> None:
    with pytest.raises(EmitError, match="no export can be called 'shared'"):
        render_tree(dataclasses.replace(tiny_model(), name="shared"), "shared")


def many_models() -> list[Model]:
    """Of both families: one that has programs of every role, and others with few."""
    targets = (Target("sm_90a", (8,), (3,)), Target("sm_100a", (8,), (3,)))
    models = [dataclasses.replace(tiny_model(), name=f"model_{number}", targets=targets) for number in range(EXPORTS)]
    return [models[0], *(dataclasses.replace(model, max_tokens=16) for model in models[1:])]


def export_all(folder: Path, templates: Path) -> None:
    write_exports(folder, [render_tree(model, model.name, templates) for model in many_models()])


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trees of ten exports, from the templates as they are."""
    folder = tmp_path_factory.mktemp("before")
    export_all(folder, paths.templates_root())
    return folder


def changed(before: Path, after: Path) -> tuple[int, int]:
    """Files and lines that differ, as git counts them."""
    command = ["git", "diff", "--no-index", "--shortstat", str(before), str(after)]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    files, *lines = (int(number) for number in re.findall(r"\d+", said))
    return files, sum(lines)


def body_templates(folder: Path) -> list[str]:
    """Templates of the kernel bodies that stand in headers."""
    texts = [file.read_text() for file in sorted((folder / "shared").glob("*.cuh"))]
    found = [re.search(r"^// From templates/(kernels/\S+)\.$", text, re.MULTILINE) for text in texts]
    return [match[1] for match in found if match]


EDITS = {
    "comment in a device header": ("device/mbarrier.cuh", "namespace cake {\n", "// Another word.\nnamespace cake {\n"),
    "expression in a device header": ("device/math.cuh", "__float_as_uint(value)", "__float_as_uint(value + 0.0f)"),
    "expression in a kernel body": ("kernels/ring.cuh", "phase ^= 1", "phase = phase ^ 1"),
    "expression of the host half": ("host/entry.cuh", "2 * items", "items * 2"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edit_of_a_shared_text_is_a_few_lines_of_a_few_files_among_ten_exports(
    tmp_path: Path, before: Path, edit: str
) -> None:
    template, old, new = EDITS[edit]
    check_edit(tmp_path, before, template, old, new)


def test_edit_of_a_kernel_body_is_a_few_lines_of_a_few_files_among_ten_exports(tmp_path: Path, before: Path) -> None:
    bodies = body_templates(before)
    assert len(bodies) > 10
    for number, template in enumerate(bodies[:: -(-len(bodies) // 3)]):
        (tmp_path / str(number)).mkdir()
        check_edit(tmp_path / str(number), before, template, "{\n", "{  // the same\n")


def check_edit(folder: Path, before: Path, template: str, old: str, new: str) -> None:
    templates = folder / "templates"
    shutil.copytree(paths.templates_root(), templates)
    text = (templates / template).read_text()
    assert old in text
    (templates / template).write_text(text.replace(old, new, 1))
    export_all(folder / "after", templates)
    files, lines = changed(before, folder / "after")
    assert 0 < files <= MOST_FILES, f"{template}: {files} files"
    assert 0 < lines <= MOST_LINES, f"{template}: {lines} lines"
    registry = load_registry(folder / "after" / "model_0")
    old_registry = load_registry(before / "model_0")
    digests = {name: program.closure_digest for name, program in registry.programs.items()}
    old_digests = {name: program.closure_digest for name, program in old_registry.programs.items()}
    assert (digests != old_digests) == (not template.startswith("host/"))


def test_another_export_changes_no_file_but_the_table_of_headers(tmp_path: Path) -> None:
    few, more = many_models()[:1], many_models()[:2]
    write_exports(tmp_path / "few", [render_tree(model, model.name) for model in few])
    write_exports(tmp_path / "more", [render_tree(model, model.name) for model in more])
    for file in (tmp_path / "few").rglob("*"):
        if file.is_file():
            assert file.read_bytes() == (tmp_path / "more" / file.relative_to(tmp_path / "few")).read_bytes()
