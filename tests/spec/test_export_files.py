"""The committed exports: they parse, and give the models that the other tests use."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from models import kimi_k3_model, tiny_model

from cakegen import paths
from cakegen.arch import ARCHITECTURES
from cakegen.model import Model
from cakegen.spec import parse_export


@pytest.mark.parametrize("model", [kimi_k3_model, tiny_model])
def test_export_file_gives_the_model_of_the_tests(model: Callable[[], Model]) -> None:
    expected = model()
    parsed = parse_export(paths.exports_root() / expected.name / "export.toml").to_model()
    for field in ("dims", "targets", "families", "decode", "prefill", "prefill_sm90"):
        assert getattr(parsed, field) == getattr(expected, field)
    assert parsed == expected


@pytest.mark.parametrize("file", sorted(paths.exports_root().glob("*/export.toml")), ids=lambda file: file.parent.name)
def test_export_file_explains_each_section(file: Path) -> None:
    text = file.read_text()
    assert tomllib.loads(text)["name"] == file.parent.name
    lines = text.splitlines()
    heads = [number for number, line in enumerate(lines) if re.match(r"\[\[?\w+\]", line)]
    assert heads
    tables = set()
    for number in heads:
        table = lines[number].strip("[]")
        # of several tables of one kind, the first may speak for all
        assert lines[number - 1].startswith("#") or table in tables, f"{file.name}:{number + 1}: no comment above"
        tables.add(table)


def test_sm_counts_default_to_known_parts() -> None:
    model = parse_export(paths.exports_root() / "kimi_k3_latent_moe" / "export.toml").to_model()
    target = model.target("sm_100a")
    assert target is not None
    assert target.sm_counts == tuple(sorted({part.sm_count for part in ARCHITECTURES["sm_100a"].parts}))
