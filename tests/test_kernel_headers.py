"""The headers of `templates/kernels`: plain C++ in the project's layout, and nothing in them that nobody uses."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cuda_text import code_of, declared, functions
from support.models import kimi_k3_model

from cakegen import paths
from cakegen.emit import operands
from cakegen.emit.program import Operand
from cakegen.functions import ACTIVATIONS
from cakegen.model import ModelDims
from cakegen.plan import FAMILIES

ROOT = paths.templates_root()
HEADERS = sorted((ROOT / "kernels").glob("*.cuh"))
JINJA = re.compile(r"//[%#]|/\*[%#]|\$\{")
MOST_LINES = 450


def name_of(file: Path) -> str:
    return file.name


@pytest.mark.parametrize("file", HEADERS, ids=name_of)
def test_header_is_short_and_holds_no_jinja(file: Path) -> None:
    text = file.read_text()
    assert not JINJA.search(text)
    assert text.startswith("#pragma once\n")
    assert text.count("\n") <= MOST_LINES


def test_one_template_writes_all_programs() -> None:
    assert [file.name for file in (ROOT / "kernels").iterdir() if file.suffix != ".cuh"] == ["program.cu"]


def clang_format() -> str:
    beside = Path(sys.executable).with_name("clang-format")
    found = str(beside) if beside.is_file() else shutil.which("clang-format")
    if found is None or importlib.util.find_spec("clang_format") is None:
        pytest.skip("needs the package clang-format of the release that tools/lock.txt names")
    return found


def test_headers_are_in_the_layout_of_clang_format() -> None:
    command = [clang_format(), "--dry-run", "-Werror", *map(str, HEADERS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, f"run `make format`\n{done.stderr[:2000]}"


def test_layout_that_differs_is_seen(tmp_path: Path) -> None:
    shutil.copy(ROOT / ".clang-format", tmp_path)
    (tmp_path / "a.cuh").write_text("#pragma once\nvoid f(){ }\n")
    command = [clang_format(), "--dry-run", "-Werror", str(tmp_path / "a.cuh")]
    assert subprocess.run(command, capture_output=True, check=False, timeout=900).returncode != 0


def unread_parameters(code: str) -> list[str]:
    """Also those without a name, but in one of several overloads, whose parameters the others name."""
    found = list(functions(code))
    names = [function.name for function in found]
    return [
        f"{function.name}({name})"
        for function in found
        for name in function.parameters
        if (not re.search(rf"\b{name}\b", function.body) if name else names.count(function.name) == 1)
    ]


@pytest.mark.parametrize("file", HEADERS, ids=name_of)
def test_every_parameter_of_a_function_is_named_in_its_body(file: Path) -> None:
    code = code_of(file.read_text())
    assert unread_parameters(code) == []
    # each definition is seen: those of templates and members alike
    assert len(list(functions(code))) == len(re.findall(r"\b__device__\b[^;{}]*?\)[^;{}()]*\{", code))


def unused_names(codes: list[str]) -> set[str]:
    """What some text defines, and no text of them names anywhere else."""
    everything = "".join(codes)
    definitions: dict[str, int] = {}
    for code in codes:
        for function in functions(code):
            definitions[function.name] = definitions.get(function.name, 0) + 1
        for name in declared(code):
            definitions.setdefault(name, 1)
    return {name for name, count in definitions.items() if len(re.findall(rf"\b{name}\b", everything)) <= count}


def structs(dims: ModelDims) -> Iterator[Operand]:
    """What programs make of their parameters."""
    prepared = dims.sum_stage.preparation
    yield from (operands.NO_NORM, operands.SPLIT, operands.PARTIALS)
    yield from (operands.front_maps_operand(dims), operands.front_outputs(dims))
    yield from (operands.norm_operands(prepared), operands.one_partial_norm(prepared))
    for flag in (False, True):
        yield operands.tail_maps_operand(dims, resident=flag)
        yield operands.tail_output(dims, mapped=flag)


def test_everything_that_a_header_declares_is_used() -> None:
    """By another place of the templates, or by the call that a program makes."""
    called = {role for family in FAMILIES.values() for role in family.bodies}
    called |= {activation.functor for activation in ACTIVATIONS.values()}
    called |= {operand.struct for operand in structs(kimi_k3_model().dims)}
    codes = [code_of(file.read_text()) for file in HEADERS]
    assert len({name for code in codes for name in declared(code)}) > 20
    assert unused_names(codes) - called == set()


def test_parts_that_nobody_uses_are_found() -> None:
    code = code_of(
        "struct Used { u32 a; };  // struct Gone\n"
        "struct Gone {};\n"
        "template <class Cfg>\nconstexpr bool kNarrow = Cfg::kRows < 4;\n"
        "enum class Kind { kOne, kTwo };\n"
        "__device__ __forceinline__ u32 twice(u32 value, const u32 (&others)[4], u32 spare) {\n"
        "    return value + others[0];\n}\n"
        "template <class Cfg>\n__device__ Used run(const Map<2, 3>& map) {\n    return {twice(map.a, map.b, 1)};\n}\n"
        "__device__ void of(const Map<2, 3>& map) { map.a; }\n__device__ void of(const NoMap&) {}\n"
        "__device__ void alone(const NoMap&) {}\n"
        "struct Ring {\n    __device__ void advance(u32 step) const { stage += Kind::kOne; }\n};\n"
    )
    assert unread_parameters(code) == ["twice(spare)", "alone()", "advance(step)"]
    assert unused_names([code]) == {"Gone", "kNarrow", "kTwo", "run", "of", "alone", "Ring", "advance"}
