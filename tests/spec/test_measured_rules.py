"""What was measured when rules were chosen: each row is about a rule as it is."""

from __future__ import annotations

import csv
import dataclasses
from typing import Any

import pytest
from support.models import kimi_k3_model

from cakegen import paths

with (paths.exports_root() / "rules" / "measured.tsv").open(encoding="utf-8", newline="") as stream:
    ROWS = list(csv.DictReader(stream, delimiter="\t"))


def value_of(rule: str) -> Any:
    found: Any = kimi_k3_model()
    for name in rule.split("."):
        assert dataclasses.is_dataclass(found), rule
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['rule']}_{row['stage']}_{row['tp']}_{row['tokens']}")
def test_row_is_about_a_rule_with_the_value_it_has_today(row: dict[str, str]) -> None:
    value = value_of(row["rule"])
    if isinstance(value, tuple):
        assert int(row["value"]) in value
    else:
        assert row["value"] == ("never" if value is None else str(value))
    assert row["other"] != row["value"]
    # the value was chosen because it is the faster one
    assert 0 < float(row["us"]) < float(row["other_us"])
