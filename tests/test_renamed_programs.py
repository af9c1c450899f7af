"""Records name programs that are there: today's, or an older commit's by the table that pairs them with today's."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.page_blocks import ROOT

from cakegen.errors import ReviewError
from cakegen.registry import load_registry
from cakegen.review.trees import Tree, resolve_revision

BENCHMARKS = ROOT / "benchmarks"
TOOL_FILE = "renamed_programs.py"
# whose names the records had
COMMIT = "137d27e"
PROGRAM = re.compile(r"\bcake_(\w+?_latent_moe)(?:_[a-z]\w*?)?_[0-9a-f]{20}\b")


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("renamed_programs", ROOT / "tools" / TOOL_FILE)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


TOOL = load_tool()
ROWS: list[dict[str, str]] = TOOL.read_table()


def test_every_old_program_is_one_of_todays_for_all_of_its_keys() -> None:
    for export, rows in grouped(ROWS, "export").items():
        kernels = load_registry(export).kernels
        paired = {key: row["new"] for row in rows for key in row["keys"].split() if key in kernels}
        assert paired == {key: kernels[key] for key in paired}, f"programs were renamed again: python tools/{TOOL_FILE}"
        assert len(paired) > 300
    assert len({row["old"] for row in ROWS}) == len(ROWS)


def grouped(rows: list[dict[str, str]], column: str) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        found.setdefault(row[column], []).append(row)
    return found


def records() -> list[Path]:
    """Every committed text of a measurement, but the table."""
    texts = {".tsv", ".txt", ".json", ".jsonl", ".md"}
    return [file for file in sorted(BENCHMARKS.rglob("*.*")) if file.suffix in texts and file != TOOL.TABLE]


@pytest.mark.parametrize("file", records(), ids=lambda file: file.relative_to(BENCHMARKS).as_posix())
def test_programs_that_a_record_names_are_there(file: Path) -> None:
    known = {row["old"] for row in ROWS} | {row["new"] for row in ROWS}
    found = {match[0] for match in PROGRAM.finditer(file.read_text(encoding="utf-8"))}
    assert found <= known, "rewrite the names by the table of renamed programs, or measure again"


def test_a_name_in_a_record_is_seen() -> None:
    names = (
        "cake_tiny_latent_moe_1f47ebee4f9abbe7375e",
        "cake_kimi_k3_latent_moe_tail_norm_sm90_r4_d2c48b3730fbb0996653",
    )
    assert [match[0] for match in PROGRAM.finditer("\t".join(names))] == list(names)
    assert {match[1] for match in PROGRAM.finditer(" ".join(row["old"] + " " + row["new"] for row in ROWS))} == {
        row["export"] for row in ROWS
    }


def swept_tables() -> dict[str, tuple[int, ...]]:
    """As the page counts the rows of each table: of today's texts, of the commit's, of earlier ones."""
    page = (BENCHMARKS / "emulator" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+\.tsv)` \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    return {name: tuple(map(int, counts)) for name, *counts in rows}


@pytest.mark.parametrize("name", sorted(file.name for file in (BENCHMARKS / "emulator").glob("*.tsv")))
def test_swept_row_says_whose_texts_it_ran(name: str) -> None:
    """A row goes over to today's program where its digest is in the table; the page says how many do."""
    with (BENCHMARKS / "emulator" / name).open(newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t"))
    texts = {(row["export"], *text.split(":")): row for row in ROWS for text in row["texts"].split()}
    todays = {
        (export, arch, digest[:12])
        for export in grouped(ROWS, "export")
        for program in load_registry(export).programs.values()
        for arch, digest in program.closure_digest
    }
    ran = [(row["export"], row["arch"], row["digest"]) for row in rows]
    of_today = sum(texts_of in todays for texts_of in ran)
    of_commit = [(texts[texts_of], row["key"]) for texts_of, row in zip(ran, rows, strict=True) if texts_of in texts]
    assert all(key in entry["keys"].split() for entry, key in of_commit)
    assert swept_tables()[name] == (of_today, len(of_commit), len(rows) - of_today - len(of_commit))


def tree(kernels: dict[str, str]) -> Tree:
    modules: dict[str, Any] = {name: {"closure_digest": {"sm_90a": "0123456789abcdef"}} for name in kernels.values()}
    return Tree("small", {}, modules, kernels, {}, {})


def test_programs_are_paired_by_key() -> None:
    old = tree({"a": "one", "b": "one", "c": "two"})
    rows = list(TOOL.pair_programs(old, tree({"a": "x", "b": "x", "c": "x", "d": "y"})))
    assert rows == [
        {"export": "small", "old": "one", "texts": "sm_90a:0123456789ab", "new": "x", "keys": "a b"},
        {"export": "small", "old": "two", "texts": "sm_90a:0123456789ab", "new": "x", "keys": "c"},
    ]


@pytest.mark.parametrize("kernels", [{"a": "x", "b": "y"}, {"a": "x"}, {}])
def test_program_with_two_successors_or_none_is_refused(kernels: dict[str, str]) -> None:
    with pytest.raises(ReviewError, match=r"small: the keys of one need one program of today's tree; they have"):
        list(TOOL.pair_programs(tree({"a": "one", "b": "one"}), tree(kernels)))


def test_table_is_what_the_tool_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_commit():
        pytest.skip(f"needs git, and a clone that reaches back to {COMMIT}")
    written, static = tmp_path / "table.tsv", tmp_path / "static.tsv"
    static.write_text(TOOL.STATIC.read_text().replace("_sm100_", "_other_"))
    assert TOOL.STATIC.read_text() != static.read_text()
    monkeypatch.setattr(TOOL, "TABLE", written)
    monkeypatch.setattr(TOOL, "STATIC", static)
    assert TOOL.main([COMMIT]) == 0
    assert written.read_text() == (BENCHMARKS / "renamed_programs.tsv").read_text()
    assert static.read_text() == (BENCHMARKS / "static" / "blackwell.tsv").read_text()
    assert json.dumps(TOOL.read_table(written)) == json.dumps(ROWS)


def has_commit() -> bool:
    try:
        resolve_revision(ROOT, COMMIT)
    except ReviewError:
        return False
    return True


def test_tool_says_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert TOOL.main([]) == 2
    assert TOOL.main(["no-such-revision"]) == 1
    assert "names no commit" in capsys.readouterr().err
