"""`cakegen compile` on a tree of two small programs, one of which can be broken."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.compile.sources import HEADER, PLAIN
from support.models import tiny_model
from support.small_registry import registry_text, registry_values, small_record, write_headers, write_sources

from cakegen import registry
from cakegen.cli.compile import compile_command
from cakegen.errors import CompileError
from cakegen.model import to_literal

LAUNCH = {
    "block": [128, 1, 1],
    "cluster": [1, 1, 1],
    "cooperative": False,
    "programmatic": False,
    "overlap": False,
    "dynamic_smem_bytes": 4096,
}


def _module(arches: list[str]) -> dict[str, object]:
    return small_record(role="decode_front", includes=["scaled.cuh"], arches=arches, launch=LAUNCH)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A generated tree: `one` on two targets behind two keys, `two` on one target with a constant of its key."""
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", str(tmp_path / "cache"))
    root = tmp_path / "small"
    sources = {f"{name}_kernel.cu": PLAIN.replace("kernel_plain", f"kernel_{name}") for name in ("one", "two")}
    values = registry_values(
        "small",
        to_literal(tiny_model()),
        {"one": _module(["sm_90a", "sm_100a"]), "two": _module(["sm_90a"])},
        {"decode:a": "one", "decode:b": "one", "norm:c": "two"},
        {key: {"SCALE": 2} for key in ("decode:a", "decode:b", "norm:c")},
        sources,
    )
    write_sources(root, "small", sources)
    write_headers(tmp_path, {"scaled.cuh": HEADER})
    (root / "cake_jit.py").write_text(registry_text(values))
    return root


def _compile(tree: Path, *arguments: str) -> Result:
    """With the digests of what the files say now."""
    registry._load.cache_clear()
    file = tree / "cake_jit.py"
    values = registry.parse_tables(file.read_text(), "x")
    sources = {path.name: path.read_text() for path in (tree / "csrc" / "cake_small").iterdir()}
    values["FILES"] |= {name: registry.file_digest(text) for name, text in sources.items()}
    file.write_text(registry_text(values))
    return CliRunner().invoke(compile_command, ["--export", str(tree), *arguments])


def _rows(result: Result) -> list[dict[str, str]]:
    head, *rest = (line.split("\t") for line in result.stdout.splitlines() if "\t" in line)
    return [dict(zip(head, row, strict=True)) for row in rest]


def test_compile_reports_each_program_of_each_target_once(tree: Path) -> None:
    result = _compile(tree)
    assert result.exit_code == 0, result.output
    rows = _rows(result)
    assert [(row["program"], row["arch"]) for row in rows] == [("one", "sm_90a"), ("one", "sm_100a"), ("two", "sm_90a")]
    assert [row["keys"] for row in rows] == ["decode:a (+1)", "decode:a (+1)", "norm:c"]
    assert {row["shared memory"] for row in rows} == {str(4096 + 512)}
    assert {row["from"] for row in rows} == {"compiler"}
    assert all(int(row["registers"]) > 0 and int(row["cubin"]) > 1000 for row in rows)
    assert "3 of 3 programs: 3 compiled, 0 from the cache, 0 failed" in result.stdout


def test_compile_again_reads_the_cache_until_it_is_cleared(tree: Path) -> None:
    _compile(tree)
    assert "0 compiled, 3 from the cache" in _compile(tree).stdout
    cleared = _compile(tree, "--clear-cache")
    assert "removed 3 files" in cleared.stderr
    assert "3 compiled, 0 from the cache" in cleared.stdout
    assert _compile(tree, "--clear-cache", "decode:z").exit_code == 2
    assert "0 compiled, 3 from the cache" in _compile(tree).stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["norm:c"], {("two", "sm_90a")}),
        (["decode:*"], {("one", "sm_90a"), ("one", "sm_100a")}),
        (["two"], {("two", "sm_90a")}),
        (["--arch", "sm_100a"], {("one", "sm_100a")}),
        (["decode:b", "norm:*", "--arch", "sm_90a", "--jobs", "1"], {("one", "sm_90a"), ("two", "sm_90a")}),
    ],
)
def test_compile_selects_by_key_program_pattern_and_target(
    tree: Path, arguments: list[str], expected: set[tuple[str, str]]
) -> None:
    assert {(row["program"], row["arch"]) for row in _rows(_compile(tree, *arguments))} == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode:z"], "no key or program matches 'decode:z'"),
        (["--arch", "sm_103a"], "no selected program is written for sm_103a; there is: sm_100a, sm_90a"),
        (["norm:c", "--arch", "sm_90a", "--arch", "sm_100a"], "written for sm_100a"),
    ],
)
def test_compile_refuses_a_selection_that_matches_nothing(tree: Path, arguments: list[str], message: str) -> None:
    result = _compile(tree, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_compile_lists_failures_after_the_rest_and_exits_with_1(tree: Path) -> None:
    source = tree / "csrc" / "cake_small" / "two_kernel.cu"
    source.write_text(source.read_text() + "int broken = ;\n")
    result = _compile(tree)
    assert result.exit_code == 1
    assert [row["program"] for row in _rows(result)] == ["one", "one"]
    assert "2 of 3 programs: 2 compiled, 0 from the cache, 1 failed" in result.stdout
    assert result.stderr.count("FAILED") == 1
    assert "FAILED norm:c (sm_90a): two for sm_90a, NVRTC" in result.stderr
    assert "two_kernel.cu" in result.stderr


def test_compile_passes_further_flags_to_the_compiler(tree: Path) -> None:
    source = tree / "csrc" / "cake_small" / "two_kernel.cu"
    source.write_text(source.read_text() + "#ifdef CAKEGEN_CHAOS\n#error chaos is on\n#endif\n")
    assert _compile(tree, "two").exit_code == 0
    chaotic = _compile(tree, "two", "--flag", "-DCAKEGEN_CHAOS")
    assert chaotic.exit_code == 1
    assert "chaos is on" in chaotic.stderr


def test_compile_recompiles_only_what_a_changed_source_touches(tree: Path) -> None:
    _compile(tree)
    source = tree / "csrc" / "cake_small" / "two_kernel.cu"
    source.write_text(source.read_text() + "// another line\n")
    assert {(row["program"], row["from"]) for row in _rows(_compile(tree))} == {("one", "cache"), ("two", "compiler")}


def test_compile_without_a_compiler_says_so_once(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAKEGEN_NVRTC", str(tree / "libnvrtc.so.13"))
    result = _compile(tree)
    assert isinstance(result.exception, CompileError)
    assert "CAKEGEN_NVRTC" in str(result.exception)
    assert result.output == ""
