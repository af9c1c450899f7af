"""Typed filters: what they print, and what they refuse."""

from __future__ import annotations

import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cakegen import paths
from cakegen.emit import filters
from cakegen.errors import EmitError


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("i32", -7, "-7"),
        ("i32", -(2**31), "(-2147483647 - 1)"),
        ("hex32", 0xABC, "0x00000abcu"),
        ("f32", 2, "2.0f"),
        ("f32", 1e-5, "1e-05f"),
        ("boolean", True, "true"),
        ("literal", True, "true"),
        ("literal", 3, "3"),
        ("literal", 0.5, "0.5f"),
        ("cpp_type", False, "bool"),
        ("cpp_type", 1, "int"),
        ("cpp_type", 1.0, "float"),
        ("cpp_type", "K2_ITERS", "u32"),
        ("literal", "K2_ITERS", "K2_ITERS"),
        ("ident", "kBlockM", "kBlockM"),
        ("type_name", "const u16*", "const u16*"),
        ("file_name", "a_b.cuh", "a_b.cuh"),
        ("comment", "K in chunks", "K in chunks"),
        ("string", 'a"b\\', '"a\\"b\\\\"'),
    ],
)
def test_filter_prints_typed_text(name: str, value: object, text: str) -> None:
    made = getattr(filters, name)(value)
    assert made == text
    assert isinstance(made, filters.CppText)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("i32", 2**31),
        ("i32", True),
        ("i32", 1.0),
        ("i32", "1"),
        ("f32", float("nan")),
        ("f32", float("inf")),
        ("f32", 1e39),
        ("f32", 1e-46),
        ("f32", -5e-324),
        ("f32", True),
        ("boolean", 1),
        ("cpp_type", None),
        ("cpp_type", [1]),
        ("literal", "1a"),
        ("ident", "1a"),
        ("ident", "a b"),
        ("ident", "a\n"),
        ("type_name", "int; x"),
        ("file_name", "../x.cuh"),
        ("comment", "ends */ here"),
        ("comment", "two\nlines"),
        ("comment", "splice \\"),
        ("string", "é"),
        ("string", "a\n"),
        ("code", 3),
    ],
)
def test_filter_refuses_other_values(name: str, value: object) -> None:
    with pytest.raises(EmitError):
        getattr(filters, name)(value)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_f32_reads_back_as_same_float(value: float) -> None:
    text = filters.f32(value)
    assert text.endswith("f")
    assert any(mark in text for mark in ".e")
    assert struct.pack("<f", float(text[:-1])) == struct.pack("<f", value)


def test_every_filter_is_one_that_a_template_uses() -> None:
    texts = "".join(path.read_text() for path in paths.templates_root().rglob("*") if path.is_file())
    for name in filters.FILTERS:
        assert re.search(rf"\| *{name}\b|map\(\"{name}\"\)", texts), name
