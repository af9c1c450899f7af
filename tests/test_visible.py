"""Text of others: what can't be seen is spelled."""

from __future__ import annotations

import pytest

from cakegen.visible import unseen_text, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("front:g1_r4@sm_90a", "front:g1_r4@sm_90a"),
        ("ü → 漢", "ü → 漢"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),
        ("if (a \u202e) b", "if (a \\u202e) b"),
        ("\ud800 and \udcff", "\\ud800 and \\udcff"),
        ("\u2028\u00a0\u200b\x85\ufeff", "\\u2028\\xa0\\u200b\\x85\\ufeff"),
    ],
)
def test_what_is_unseen_is_spelled(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert shown.isprintable()
    assert shown.encode()


def test_line_ends_stay_where_they_are_wanted() -> None:
    assert visible("a\n\tb\r\x1b", "\n\t") == "a\n\tb\\r\\x1b"


def test_every_character_comes_out_printable() -> None:
    everything = "".join(map(chr, range(0x11000)))
    assert visible(everything).isprintable()


def test_unseen_text_is_found_in_nested_literals() -> None:
    assert unseen_text({"a": ["b", ("c", 1, None)]}) == ""
    assert unseen_text({"a": ["b", ("c\x1b", 1)]}) == "c\x1b"
    assert unseen_text({"a\ud800": 1}) == "a\ud800"
