"""Malformed exports: a refusal with the file's name, or a model that can be planned. Nothing else."""

from __future__ import annotations

import contextlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz.strategies import damaged, damaged_bytes, fuzzed

from cakegen import paths
from cakegen.block import Block
from cakegen.block_text import formula_lines
from cakegen.cli.main import main
from cakegen.errors import PlanError, SpecError
from cakegen.model import DeviceFacts, Model
from cakegen.plan import family_of, plan_route
from cakegen.spec import parse_export
from cakegen.spec.block import parse_block
from cakegen.spec.honoured import missing_parts

RAW = (paths.exports_root() / "tiny_latent_moe" / "export.toml").read_bytes()
TABLE = tomllib.loads(RAW.decode())
TABLE |= {
    family: tomllib.loads((paths.exports_root() / "tiny_latent_moe" / TABLE[family]).read_text())
    for family in ("hopper", "blackwell")
}
"""With the rules that stand in files beside it."""
BLOCK = tomllib.loads((paths.exports_root() / "blocks" / "latent_moe.toml").read_text())


def to_toml(table: dict[str, Any]) -> str:
    """Values as TOML, where it has them; others as text that is none."""
    lines: list[str] = []
    for name, value in table.items():
        if not isinstance(value, dict) and not (isinstance(value, list) and value and isinstance(value[0], dict)):
            lines.append(f"{json.dumps(str(name))} = {_literal(value)}")
    for name, value in table.items():
        sections = value if isinstance(value, list) else [value]
        if sections and all(isinstance(section, dict) for section in sections):
            head = f"[[{json.dumps(str(name))}]]" if isinstance(value, list) else f"[{json.dumps(str(name))}]"
            for section in sections:
                lines += [head, *(f"{json.dumps(str(key))} = {_literal(item)}" for key, item in section.items())]
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(_literal(item) for item in value)}]"
    return json.dumps(value)


def check(file: Path) -> None:
    try:
        model = parse_export(file).to_model()
    except SpecError as error:
        message = str(error)
    else:
        can_be_planned(model)
        return
    assert "export.toml" in message


def can_be_planned(model: Model) -> None:
    for target in model.targets:
        for stage in ("front", "tail"):
            for tokens in (1, family_of(target.arch).decode(model).max_tokens, model.max_tokens):
                device = DeviceFacts.nominal(target.arch, target.sm_counts[0])
                plan = plan_route(model, stage=stage, tp=target.tp_degrees[0], tokens=tokens, partials=1, device=device)
                assert plan.launches


def test_toml_of_the_whole_table_is_the_export(tmp_path: Path) -> None:
    """Else the tests below would fuzz something that is refused from its first line on."""
    file = tmp_path / "export.toml"
    file.write_text(to_toml(TABLE))
    assert parse_export(file) == parse_export(paths.exports_root() / "tiny_latent_moe" / "export.toml")


@fuzzed
@given(table=damaged(TABLE))
def test_export_with_damaged_values_is_refused_or_planned(tmp_path: Path, table: Any) -> None:
    file = tmp_path / "export.toml"
    file.write_text(to_toml(table), encoding="utf-8")
    check(file)


@fuzzed
@given(table=damaged(BLOCK))
def test_block_with_damaged_stages_is_refused_or_read(table: Any) -> None:
    try:
        block = parse_block(table)
    except SpecError as error:
        message = str(error)
    else:
        can_be_shown(block)
        return
    assert message.startswith("block")


def can_be_shown(block: Block) -> None:
    # what was read can be shown, and asked for
    assert list(formula_lines(block, dict.fromkeys((*block.widths, *block.numbers), 64)))
    missing_parts(block)


@fuzzed
@given(raw=damaged_bytes(RAW))
def test_export_with_damaged_bytes_is_refused_or_planned(tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "export.toml"
    file.write_bytes(raw)
    check(file)


@fuzzed
@given(raw=st.binary(max_size=200))
def test_command_line_refuses_a_file_that_is_no_export_with_one_message(tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "export.toml"
    file.write_bytes(raw)
    result = CliRunner().invoke(main, ["export", str(file), "--dest", str(tmp_path / "trees")])
    assert result.exit_code == 1
    assert result.stderr.startswith("cakegen: ")
    assert not (tmp_path / "trees").exists()


def test_folder_in_the_place_of_an_export_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "export.toml"
    folder.mkdir()
    with pytest.raises(SpecError, match="Is a directory"):
        parse_export(folder)


@fuzzed
@given(
    stage=st.sampled_from(("front", "tail", "", "both")),
    tp=st.integers(-2, 70),
    tokens=st.integers(-2, 20000),
    partials=st.integers(-1, 80),
    arch=st.sampled_from(("sm_90a", "sm_100a", "sm_103a", "sm_80", "")),
    sm_count=st.integers(-1, 200),
    pairs=st.integers(-1, 100),
    smem=st.sampled_from((-1, 0, 1024, 100_000, 232_448, 2**40)),
)
def test_request_that_does_not_belong_is_refused_or_planned_within_its_device(
    stage: str, tp: int, tokens: int, partials: int, arch: str, sm_count: int, pairs: int, smem: int
) -> None:
    model = parse_export(paths.exports_root() / "tiny_latent_moe" / "export.toml").to_model()
    device = DeviceFacts(arch, sm_count, pairs, smem)
    with contextlib.suppress(PlanError):
        plan = plan_route(model, stage=stage, tp=tp, tokens=tokens, partials=partials, device=device)
        for launch in plan.launches:
            assert all(1 <= extent < 2**31 for extent in launch.grid_ctas)
            assert all(0 <= value < 2**31 for _, value in launch.parameters)
