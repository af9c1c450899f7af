"""A family of architectures is asked, not compared: what differs between two stands in their objects."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
from support.models import kimi_k3_model, tiny_model

import cakegen
from cakegen.arch import ARCHITECTURES
from cakegen.errors import PlanError
from cakegen.model import DeviceFacts
from cakegen.plan import FAMILIES, family_of, plan_route
from cakegen.rules import rule_fields

PACKAGE = Path(cakegen.__file__).parent
# who defines the names, and the families' emitters
MAY_COMPARE = ("arch.py", "emit/")


def comparisons(text: str) -> list[int]:
    """Lines on which something is compared with a family's name."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        if isinstance(side, ast.Constant) and side.value in FAMILIES
    ]


def test_no_family_is_compared_outside_of_the_emitters() -> None:
    found = {
        f"{name}:{line}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for name in [file.relative_to(PACKAGE).as_posix()]
        if not name.startswith(MAY_COMPARE)
        for line in comparisons(file.read_text(encoding="utf-8"))
    }
    assert found == set()


def test_comparison_with_a_family_is_seen() -> None:
    assert comparisons('x = 1\nif family == "sm90" or "sm100" != other:\n    pass\n') == [2, 2]


def test_every_architecture_has_a_family_that_answers_every_question() -> None:
    assert {family_of(arch).name for arch in ARCHITECTURES} == set(FAMILIES)
    model = kimi_k3_model()
    for family in FAMILIES.values():
        assert isinstance(family.rules(model), family.rules_record)
        assert family.decode(model).max_cta_tokens <= family.max_cta_tokens
        assert set(family.decode(model).n_pads) <= set(family.token_tiles)
        assert rule_fields(family.rules_record)


@pytest.mark.parametrize(("arch", "rules", "name"), [("sm_90a", "hopper", "sm90"), ("sm_100a", "blackwell", "sm100")])
def test_model_without_the_rules_of_a_served_architecture_says_so(arch: str, rules: str, name: str) -> None:
    bare = dataclasses.replace(tiny_model(), **{rules: None})
    message = f"tiny_latent_moe has no rules for {name}; it is exported for sm_90a, sm_100a, sm_103a"
    with pytest.raises(PlanError, match=message):
        plan_route(bare, stage="front", tp=1, tokens=1, partials=1, device=DeviceFacts.nominal(arch, 132))
