"""The committed exports: they parse, and give the models that the other tests use."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from support.models import hopper, kimi_k3_model

from cakegen import paths
from cakegen.arch import ARCHITECTURES
from cakegen.errors import SpecError
from cakegen.registry import load_registry
from cakegen.rules import BlackwellRules, HopperRules
from cakegen.spec import parse_export
from cakegen.spec.rules_file import parse_rules, render_rules, rules_file

EXPORTS = sorted(file.parent.name for file in paths.exports_root().glob("*/export.toml"))


@pytest.mark.parametrize("name", EXPORTS)
def test_export_file_gives_the_model_of_its_registry(name: str) -> None:
    assert parse_export(paths.exports_root() / name / "export.toml").to_model() == load_registry(name).model


@pytest.mark.parametrize("name", EXPORTS)
def test_export_says_what_the_model_is_in_forty_lines(name: str) -> None:
    text = (paths.exports_root() / name / "export.toml").read_text()
    assert tomllib.loads(text)["name"] == name
    assert len(text.splitlines()) <= 40
    assert text.startswith("# ")


@pytest.mark.parametrize("name", ["hopper", "blackwell"])
def test_rules_file_is_its_rules_with_the_comments_of_their_fields(name: str) -> None:
    """So a field's meaning, unit and bounds stand once, in `cakegen.rules`; the file shows them above each value."""
    rules = getattr(kimi_k3_model(), name)
    assert rules_file(name).read_text() == render_rules(name, rules)


def test_rules_files_hold_every_rule_and_the_large_model_overrides_none() -> None:
    assert "hopper" not in tomllib.loads((paths.exports_root() / "kimi_k3_latent_moe" / "export.toml").read_text())
    for record, name in ((HopperRules, "hopper"), (BlackwellRules, "blackwell")):
        assert parse_rules(record, name, {}) == getattr(kimi_k3_model(), name)


def test_override_lays_tables_over_tables_and_false_leaves_a_rule_out() -> None:
    rules = parse_rules(HopperRules, "hopper", {"decode": {"front": {"narrow": False}, "tail": {"weights_ahead": 1}}})
    kimi = hopper(kimi_k3_model())
    assert rules.decode.front.narrow is None
    assert rules.decode.tail.weights_ahead == 1
    assert rules.decode.tail.staged == kimi.decode.tail.staged
    assert rules.prefill == kimi.prefill


def test_sm_counts_default_to_known_parts() -> None:
    model = parse_export(paths.exports_root() / "kimi_k3_latent_moe" / "export.toml").to_model()
    target = model.target("sm_100a")
    assert target is not None
    assert target.sm_counts == tuple(sorted({part.sm_count for part in ARCHITECTURES["sm_100a"].parts}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"name = {'9' * 5000}", "not a TOML file: Exceeds the limit"),
        (f"name = {'[' * 5000}", "not a TOML file: maximum recursion depth exceeded"),
        (f"{'a.' * 2000}b = 1", "tables within tables, more than 32 levels of them"),
        ("name = 'a'" + "\n" * (1 << 20), "1048586 bytes; a file of at most 1048576 is read"),
    ],
)
def test_file_of_absurd_digits_depth_or_size_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "export.toml").write_text(text)
    with pytest.raises(SpecError, match=f"^{tmp_path.name}/export.toml: {message}"):
        parse_export(tmp_path / "export.toml")
