"""Shared headers of a tree: their table, digests and closures; an edited, missing or linked one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models import tiny_model
from support.small_registry import registry_text, registry_values, small_record, write_headers, write_sources

from cakegen.errors import RegistryError
from cakegen.model import to_literal
from cakegen.registry import load_registry


def header_tree(folder: Path, includes: list[str], headers: dict[str, str]) -> Path:
    """A tree of one program that includes something."""
    record, sources = small_record(includes=includes), {"one_kernel.cu": "// kernel\n", "one_binding.cu": "// host\n"}
    values = registry_values("small", to_literal(tiny_model()), {"one": record}, {"a": "one"}, {}, sources)
    (folder / "small").mkdir()
    (folder / "small" / "cake_jit.py").write_text(registry_text(values))
    write_sources(folder / "small", "small", sources)
    write_headers(folder, headers)
    return folder / "small"


HEADERS = {"a.cuh": '#include "b.cuh"\n#include "c.cuh"\n', "b.cuh": '#include "c.cuh"\n', "c.cuh": "// c\n"}


def test_closure_follows_the_shared_table_and_holds_each_header_once(tmp_path: Path) -> None:
    registry = load_registry(header_tree(tmp_path, ["b.cuh", "a.cuh"], HEADERS))
    program = registry.program("a")
    assert program.headers == ("b.cuh", "a.cuh", "c.cuh")
    assert [name for name, _ in registry.closure(program)] == ["one_kernel.cu", "b.cuh", "a.cuh", "c.cuh"]
    assert dict(registry.closure(program))["c.cuh"] == "// c\n"
    assert registry.path("c.cuh") == tmp_path / "shared" / "c.cuh"


def test_digest_of_a_program_follows_from_its_kernel_headers_and_flags_alone(tmp_path: Path) -> None:
    def digest(name: str, headers: dict[str, str], includes: list[str]) -> object:
        folder = tmp_path / name
        folder.mkdir()
        return load_registry(header_tree(folder, includes, headers)).program("a").closure_digest

    whole = digest("whole", HEADERS, ["b.cuh"])
    assert digest("unread", HEADERS | {"a.cuh": "// other\n"}, ["b.cuh"]) == whole
    assert digest("inner", HEADERS | {"c.cuh": "// other\n"}, ["b.cuh"]) != whole
    assert digest("more", HEADERS, ["a.cuh"]) != whole


@pytest.mark.parametrize(
    ("name", "table"), [("one_kernel.cu", "cake_jit.py"), ("c.cuh", r"shared/headers\.json"), ("b.cuh", "shared")]
)
def test_edited_file_is_refused_by_its_name(tmp_path: Path, name: str, table: str) -> None:
    registry = load_registry(header_tree(tmp_path, ["b.cuh"], HEADERS))
    registry.closure(registry.program("a"))
    with registry.path(name).open("a") as file:
        file.write(" ")
    with pytest.raises(RegistryError, match=rf"{name}: not the file of this registry \(sha256 .*; {table}.* says"):
        registry.closure(registry.program("a"))


def test_tree_without_its_headers_says_that_both_folders_are_needed(tmp_path: Path) -> None:
    root = header_tree(tmp_path, ["b.cuh"], HEADERS)
    (tmp_path / "shared" / "headers.json").unlink()
    with pytest.raises(RegistryError, match=r"headers\.json: No such file.*the folder 'shared' beside it.*copy both"):
        load_registry(root)


@pytest.mark.parametrize("place", ["shared", "shared/headers.json", "shared/b.cuh"])
def test_symbolic_link_to_or_in_the_shared_folder_is_not_followed(tmp_path: Path, place: str) -> None:
    root = header_tree(tmp_path, ["b.cuh"], HEADERS)
    (tmp_path / place).rename(tmp_path / "outside")
    (tmp_path / place).symlink_to(tmp_path / "outside")
    with pytest.raises(RegistryError, match="is a symbolic link, which is not followed"):
        load_registry(root).read("b.cuh")


def test_header_that_the_table_does_not_list_is_named(tmp_path: Path) -> None:
    root = header_tree(tmp_path, ["b.cuh", "d.cuh"], HEADERS)
    with pytest.raises(
        RegistryError, match=r"damaged tables .*one: needs the header 'd\.cuh', which the shared table does not list"
    ):
        load_registry(root)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "schema 'list'; this cakegen reads 1"),
        ('{"schema": 2, "headers": {}}', "schema 2; this cakegen reads 1"),
        ('{"schema": 1}', "KeyError: 'headers'"),
        ('{"schema": 1, "headers": {"../a": {}}}', "needs a plain file name"),
        ('{"schema": 1, "headers": {"a": {"sha256": "00"}}}', "needs the fields"),
        ('{"schema": 1, "headers": {"a": {"sha256": "00", "includes": []}}}', "needs a sha256 of 64 hex digits"),
    ],
)
def test_damaged_table_of_headers_is_refused(tmp_path: Path, text: str, why: str) -> None:
    root = header_tree(tmp_path, ["b.cuh"], HEADERS)
    (tmp_path / "shared" / "headers.json").write_text(text)
    with pytest.raises(RegistryError, match=r"shared/headers\.json: damaged table of headers") as caught:
        load_registry(root)
    assert why in str(caught.value)
