"""JSON as text: what is written reads back, within the columns."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cakegen.emit.literal import render_literal

ASCII = st.text(st.characters(max_codepoint=127), max_size=30)
LEAVES = st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | ASCII
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(ASCII, inner, max_size=5))


@given(VALUES)
def test_literal_reads_back_equal(value: Any) -> None:
    read = json.loads(render_literal(value, 60))
    assert read == value
    assert repr(read) == repr(value)


@given(st.dictionaries(st.text("abc_", max_size=40), st.text("abc_", max_size=40), max_size=8))
def test_literal_keeps_to_the_columns(value: dict[str, str]) -> None:
    assert all(len(line) <= 60 for line in render_literal(value, 60).splitlines())


def test_entry_too_long_for_a_line_breaks_behind_its_key() -> None:
    assert (
        render_literal({"a" * 20: "b" * 20}, 40) == '{\n    "aaaaaaaaaaaaaaaaaaaa":\n        "bbbbbbbbbbbbbbbbbbbb"\n}'
    )
