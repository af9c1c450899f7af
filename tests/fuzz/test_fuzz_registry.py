"""Malformed registries and trees: a `CakeError`, or something that can be asked for each of its programs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from support.fuzz.strategies import damaged, damaged_bytes, fuzzed
from support.models import tiny_model
from support.review.trees import small_programs, write_small_tree
from support.small_registry import registry_text, registry_values

from cakegen import registry as registry_module
from cakegen.cli.main import main
from cakegen.compile import request_for
from cakegen.emit.shared import render_shared_table
from cakegen.errors import CakeError, PlanError
from cakegen.model import DeviceFacts, Model, from_literal, to_literal
from cakegen.plan import plan_route
from cakegen.registry import SHARED_FILE, SHARED_FOLDER, TABLES, load_registry, parse_tables
from cakegen.review import compare_trees, render_html, render_markdown, render_text
from cakegen.review.report import Review
from cakegen.review.trees import read_trees

COMMANDS = (
    ("list",),
    ("plan", "--stage", "front", "--tp", "8", "--tokens", "16"),
    ("show", "norm:e9"),
    ("compile", "--arch", "sm_90a", "nothing"),
)


def write_tree(folder: Path) -> Path:
    """A small tree with a model that can be planned; returns its registry's file."""
    write_small_tree(folder, small_programs(), model=to_literal(tiny_model()))
    return folder / "small" / "cake_jit.py"


def values_of(folder: Path) -> dict[str, Any]:
    file = write_tree(folder)
    return parse_tables(file.read_text(), "x")


def walk(root: Path) -> None:
    """Whatever can be asked of a tree without a GPU."""
    registry_module._load.cache_clear()
    registry = load_registry(root)
    for key in registry.kernels:
        program = registry.program(key)
        assert program.kernel_symbol.startswith("kernel_")
        for arch in program.arches:
            request = request_for(registry, key, arch)
            assert all(isinstance(option, str) for option in request.options)
            hash(request)
    device = DeviceFacts.nominal("sm_90a", 132)
    for tokens in (1, 128, 4096):
        plan_route(registry.model, stage="tail", tp=8, tokens=tokens, partials=1, device=device)


def test_whole_tree_can_be_walked(tmp_path: Path) -> None:
    walk(write_tree(tmp_path).parent)


def tree_texts(folder: Path, values: Any) -> Path:
    file = write_tree(folder)
    file.write_text(registry_text(values), encoding="utf-8")
    return file.parent


WHOLE = registry_values(
    "small",
    to_literal(tiny_model()),
    {program.name: program.record() for program in small_programs()},
    {program.key: program.name for program in small_programs()},
    {program.key: program.constants for program in small_programs()},
    {
        name: text
        for program in small_programs()
        for name, text in (
            (f"{program.name}_kernel.cu", program.kernel()),
            (f"{program.name}_binding.cu", program.binding()),
        )
    },
)


def allowed(root: Path) -> None:
    with contextlib.suppress(CakeError):
        walk(root)


@fuzzed
@given(values=damaged(WHOLE))
def test_registry_with_damaged_values_is_refused_or_whole(tmp_path: Path, values: Any) -> None:
    allowed(tree_texts(tmp_path, values))


@fuzzed
@given(values=damaged({name: WHOLE[name] for name in (*TABLES, "FILES", "MODULES")}))
def test_registry_with_damaged_records_is_refused_or_whole(tmp_path: Path, values: Any) -> None:
    allowed(tree_texts(tmp_path, WHOLE | values))


@fuzzed
@given(values=damaged({"MODEL": WHOLE["MODEL"]}))
def test_registry_with_a_damaged_model_is_refused_or_whole(tmp_path: Path, values: Any) -> None:
    allowed(tree_texts(tmp_path, WHOLE | values))


RULES = ("hopper", "blackwell")


def places(value: Any, where: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Where the numbers of nested tables stand."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(item, (dict, list)):
            yield from places(item, (*where, key))
        elif type(item) is int:
            yield (*where, key)


def with_number(value: Any, where: tuple[str | int, ...], number: int) -> Any:
    """A copy with another number in one place."""
    if not where:
        return number
    copy = value.copy()
    copy[where[0]] = with_number(value[where[0]], where[1:], number)
    return copy


FIELDS = [place for rules in RULES for place in places(WHOLE["MODEL"][rules], (rules,))]


def test_fields_reach_into_tables() -> None:
    assert ("blackwell", "prefill", "block_n") in FIELDS
    assert ("hopper", "prefill", "tiles", 3, "segment_cost") in FIELDS


@pytest.mark.parametrize("value", [0, -1, 1, 2**31])
def test_each_threshold_out_of_bounds_is_refused_or_planned(value: int) -> None:
    """A registry is not checked as an export is; the planner must bear any number."""
    for place in FIELDS:
        model = from_literal(Model, with_number(WHOLE["MODEL"], place, value))
        for arch, stage, tokens in itertools.product(("sm_90a", "sm_100a"), ("front", "tail"), (1, 129, 4096)):
            device = DeviceFacts.nominal(arch, 132)
            with contextlib.suppress(PlanError):
                plan_route(model, stage=stage, tp=8, tokens=tokens, partials=2, device=device)


def test_tile_of_nothing_names_the_way_out() -> None:
    model = from_literal(Model, with_number(WHOLE["MODEL"], ("hopper", "decode", "front", "narrow", "block_m"), 0))
    with pytest.raises(PlanError, match=r"T = 1: a tile or a threshold of the model is too small .* export again"):
        plan_route(model, stage="front", tp=8, tokens=1, partials=1, device=DeviceFacts.nominal("sm_90a", 132))


@fuzzed
@given(raw=damaged_bytes(registry_text(WHOLE).encode()))
def test_registry_with_damaged_bytes_is_refused_or_whole(tmp_path: Path, raw: bytes) -> None:
    file = write_tree(tmp_path)
    file.write_bytes(raw)
    allowed(file.parent)


@fuzzed
@given(raw=damaged_bytes(render_shared_table({"cake_device_common.cuh": "// a\n", "b.cuh": "// b\n"}).encode()))
def test_damaged_table_of_headers_is_refused_or_whole(tmp_path: Path, raw: bytes) -> None:
    file = write_tree(tmp_path)
    (tmp_path / SHARED_FOLDER / SHARED_FILE).write_bytes(raw)
    allowed(file.parent)


@fuzzed
@given(values=damaged(WHOLE))
def test_command_line_on_a_damaged_tree_prints_no_traceback(tmp_path: Path, values: Any) -> None:
    root = tree_texts(tmp_path, values)
    for arguments in COMMANDS:
        registry_module._load.cache_clear()
        result = CliRunner().invoke(main, [*arguments, "--export", str(root)])
        assert result.exit_code in (0, 1, 2)
        assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exception)


@fuzzed
@given(values=damaged(WHOLE))
def test_review_of_a_damaged_tree_is_refused_or_rendered(tmp_path: Path, values: Any) -> None:
    write_tree(tmp_path)
    old = read_trees(tmp_path)["small"]
    tree_texts(tmp_path, values)
    with contextlib.suppress(CakeError):
        new = read_trees(tmp_path)["small"]
        review = Review("base", (compare_trees(old, new),), None)
        for render in (render_text, render_markdown, render_html):
            assert render(review)
