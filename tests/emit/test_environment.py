"""The Jinja environment: delimiters that leave C++ alone, typed output only, and messages that name the place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cakegen.emit.environment import render_template, template_environment
from cakegen.errors import EmitError


def render(tmp_path: Path, text: str, **context: Any) -> str:
    (tmp_path / "a.cu").write_bytes(text.encode())
    return render_template(template_environment(tmp_path), "a.cu", context)


@pytest.mark.parametrize(
    "text",
    [
        "int a[2][2] = {{1, 2}, {3, 4}};\n",
        'asm("{%0, %1}" :: "r"(x));\n',
        "#define F(x) {#x}\n",
        "a %= b; c = d % e;\n// 50 % of it\n",
        "no end of line",
        "\n\ntwo blank lines in front and behind\n\n",
    ],
)
def test_cpp_text_passes_unchanged(tmp_path: Path, text: str) -> None:
    assert render(tmp_path, text) == text


def test_whole_line_statements_and_comments_leave_no_line(tmp_path: Path) -> None:
    text = "a\n    //% if on\n    b\n    //% endif\n    //# gone\n    /*# x #*/\n/*% if on %*/\nc\n/*% endif %*/\nd\n"
    assert render(tmp_path, text, on=True) == "a\n    b\nc\nd\n"


def test_trailing_block_keeps_its_line_end(tmp_path: Path) -> None:
    text = "void /*% if on %*/attr /*% endif %*/\nf();\nx;  /*# why #*/\ny;  //# why\nz;\n"
    assert render(tmp_path, text, on=True) == "void attr\nf();\nx;\ny;\nz;\n"


@pytest.mark.parametrize("value", [3, 2.5, True, "text", None, [1]])
def test_bare_value_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(EmitError, match=r"templates/a\.cu:2: a template may print typed text only"):
        render(tmp_path, "first\n${ value }\n", value=value)


def test_bare_constant_expression_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EmitError, match="typed text only"):
        render(tmp_path, "${ 1 + 1 }f\n")


@pytest.mark.parametrize("expression", ["nope", "nope | i32", "spec.nope | ident", "nope.deeper | i32"])
def test_undefined_name_is_refused_with_its_line(tmp_path: Path, expression: str) -> None:
    with pytest.raises(EmitError, match=r"templates/a\.cu:3: .*nope"):
        render(tmp_path, "first\n\n${ " + expression + " }\n", spec=object())


def test_error_in_included_template_names_that_template(tmp_path: Path) -> None:
    (tmp_path / "part.cuh").write_text("one\n//# two\n${ 'x y' | ident }\n")
    with pytest.raises(EmitError, match=r"templates/part\.cuh:3: filter ident"):
        render(tmp_path, '/*% include "part.cuh" %*/\n')


def test_syntax_error_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(EmitError, match=r"templates/a\.cu:2: "):
        render(tmp_path, "a\n//% if\n")


def test_macro_text_needs_the_code_filter(tmp_path: Path) -> None:
    macro = "//% macro twice(n)\n${(2 * n) | i32}\n//% endmacro\n"
    assert render(tmp_path, macro + "${ twice(4) | code }") == "8\n"
    with pytest.raises(EmitError, match="typed text only"):
        render(tmp_path, macro + "${ twice(4) }")


@pytest.mark.parametrize(
    ("raw", "message"),
    [(b"a\r\nb\n", "line 1: holds a carriage return"), (b"\xff\n", "not UTF-8 at byte 0")],
)
def test_loader_refuses_damaged_template(tmp_path: Path, raw: bytes, message: str) -> None:
    (tmp_path / "a.cu").write_bytes(raw)
    with pytest.raises(EmitError, match=message):
        render_template(template_environment(tmp_path), "a.cu", {})


@pytest.mark.parametrize("name", ["../a.cu", "/etc/hosts", "none.cu"])
def test_loader_refuses_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(EmitError, match="template"):
        render_template(template_environment(tmp_path), name, {})


def test_chance_is_out_of_reach(tmp_path: Path) -> None:
    for text in ("${ [1, 2] | random | i32 }\n", "${ lipsum() | code }\n"):
        with pytest.raises(EmitError):
            render(tmp_path, text)


def test_blank_lines_below_statements_stay_and_never_double(tmp_path: Path) -> None:
    text = "a\n//% if true\n\nb\n//% endif\n\n\n//% if false\nc\n//% endif\n\nd\n//% if true\ne\n//% endif\nf\n"
    (tmp_path / "x.cu").write_text(text)
    assert render_template(template_environment(tmp_path), "x.cu", {}) == "a\n\nb\n\nd\ne\nf\n"
