"""A family of architectures is asked, not compared: what differs between two stands in their objects."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest
from support.models import kimi_k3_model, tiny_model

import cakegen
from cakegen import paths
from cakegen.arch import ARCHITECTURES
from cakegen.errors import PlanError
from cakegen.model import DeviceFacts
from cakegen.plan import FAMILIES, family_of, plan_route
from cakegen.rules import rule_fields
from cakegen.rules.meaning import MOST, Meaning

PACKAGE = Path(cakegen.__file__).parent
# who says what a name means
MAY_COMPARE = ("arch.py",)


def comparisons(text: str) -> list[int]:
    """Lines on which something is compared with a family's name."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        if isinstance(side, ast.Constant) and side.value in FAMILIES
    ]


def test_no_family_is_compared_by_its_name() -> None:
    found = {
        f"{name}:{line}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for name in [file.relative_to(PACKAGE).as_posix()]
        if not name.startswith(MAY_COMPARE)
        for line in comparisons(file.read_text(encoding="utf-8"))
    }
    assert found == set()
    for file in paths.templates_root().rglob("*"):
        if file.is_file():
            assert not re.search(r"family\s*[!=]=", file.read_text(encoding="utf-8")), file


def legal_values(meaning: Meaning) -> int:
    """How many values a number's bounds let through."""
    if meaning.one_of:
        return len(meaning.one_of)
    low, high = meaning.at_least or 0, MOST if meaning.at_most is None else meaning.at_most
    step = meaning.multiple_of or 1
    return high // step - -(-low // step) + 1


def numbers_of(record: type) -> list[tuple[str, Meaning]]:
    """Every number of a rules' dataclass, those of nested tables among them."""
    found = []
    for field in rule_fields(record):
        nested = numbers_of(field.table) if field.table else [("", field.meaning)]
        found += [(f"{field.name}.{name}".rstrip("."), meaning) for name, meaning in nested]
    return found


def test_every_threshold_has_several_legal_values() -> None:
    for family in FAMILIES.values():
        numbers = numbers_of(family.rules_record)
        assert len(numbers) > 20
        assert [name for name, meaning in numbers if legal_values(meaning) < 2] == []
    assert legal_values(Meaning("a tile", at_least=128, at_most=191, multiple_of=64)) == 1
    assert legal_values(Meaning("a tile", one_of=(2,))) == 1


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
