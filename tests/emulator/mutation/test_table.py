"""The table of a campaign: sites, survivors, explanations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cakegen.emulator.mutation.table import (
    Explanation,
    read_explanations,
    render_survivors,
    render_table,
    survivors_of,
)
from cakegen.errors import EmulationError

HEADER = {"export": "tiny", "arch": "sm_90a", "seeds": 5, "nvrtc": "NVRTC 13.0"}


def result(operator: str, site: str, outcome: str, key: str = "p", line: str = "f();") -> dict[str, Any]:
    return {
        "operator": operator,
        "site": site,
        "outcome": outcome,
        "key": key,
        "line": line,
        "change": "+8 bytes",
        "instruction": "bar.sync [0]",
    }


RESULTS = [
    result("count", "a", "deadlock"),
    result("count", "a", "survived", "q"),
    result("count", "b", "survived", "q", "unused();"),
    result("count", "c", "survived"),
    result("parity", "d", "refused"),
    result("parity", "e", "wrong values"),
]
UNUSED = Explanation({"line": "unused*"}, "equivalent", "Nobody uses it.")


def test_site_is_killed_where_any_program_shows_it() -> None:
    survivors = survivors_of(RESULTS, [UNUSED])
    assert [(each.entry["site"], each.kind) for each in survivors] == [
        ("b", "equivalent"),
        ("c", "unexplained"),
        ("d", "unexplained"),
    ]


def test_site_is_explained_only_where_all_its_results_are() -> None:
    blind = Explanation({"key": "p"}, "not seen", "Too small.")
    two = [result("count", "a", "survived", "p", "unused();"), result("count", "a", "survived", "q", "unused();")]
    assert [each.kind for each in survivors_of(two, [blind])] == ["unexplained"]
    assert [each.kind for each in survivors_of(two, [blind, UNUSED])] == ["not seen"]
    assert [each.kind for each in survivors_of(two, [UNUSED, blind])] == ["equivalent"]


def test_table_counts_mutants_sites_and_shares() -> None:
    text = render_table(HEADER, RESULTS, survivors_of(RESULTS, [UNUSED]))
    assert text.startswith("tiny sm_90a, early, late, 5 seeds and a chain, NVRTC 13.0")
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()[3:]}
    assert rows["count"] == ["4", "1", "3", "1", "1", "0", "1", "50.0", "%"]
    assert rows["parity"] == ["2", "1", "2", "1", "0", "0", "1", "50.0", "%"]
    assert rows["all"] == ["6", "2", "5", "2", "1", "0", "2", "50.0", "%"]


def test_survivors_come_with_their_line_and_reason() -> None:
    text = render_survivors(survivors_of(RESULTS, [UNUSED]))
    assert "equivalent: count (+8 bytes) `bar.sync [0]`\n  unused();\n  Nobody uses it." in text
    assert text.count("unexplained:") == 2


def test_brackets_of_an_explanation_mean_themselves(tmp_path: Path) -> None:
    file = tmp_path / "explained.json"
    file.write_text(json.dumps([{"instruction": "bar.sync [0]", "kind": "not seen", "why": "Because."}]))
    (explanation,) = read_explanations(file)
    assert explanation.matches(RESULTS[0])
    assert not explanation.matches({**RESULTS[0], "instruction": "bar.sync 0"})


@pytest.mark.parametrize(
    "content", [b"\xff", b"{", b"{}", b"[1]", b'[{"operator": 1, "kind": "equivalent", "why": "x"}]']
)
def test_file_that_holds_no_explanations_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "explained.json"
    file.write_bytes(content)
    with pytest.raises(EmulationError, match=r"explained\.json: .* list of explanations"):
        read_explanations(file)


@pytest.mark.parametrize(
    "entry",
    [
        {"operator": "count", "kind": "equivalent"},
        {"operator": "count", "kind": "maybe", "why": "x"},
        {"kind": "equivalent", "why": "x"},
        {"file": "x", "kind": "equivalent", "why": "x"},
    ],
)
def test_explanation_without_a_reason_a_kind_or_a_pattern_is_refused(entry: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "explained.json"
    file.write_text(json.dumps([entry]))
    with pytest.raises(EmulationError, match="entry 1 needs a `why`, a `kind`"):
        read_explanations(file)
