"""Leaf module: typed filters between Python values and C++ text. Imports only errors and jinja2's Undefined.

A template may print nothing but the result of one of these filters (`environment.finalize` refuses the rest), so a
float can't turn into an `int` literal, a name can't carry an operator, and a bool can't print as `True`. Every filter
raises `EmitError` for a value of another type, out of range, or of another spelling than its name says.
"""

from __future__ import annotations

import math
import re
import struct
import textwrap
from collections.abc import Callable
from typing import Any

from jinja2 import Undefined

from cakegen.errors import EmitError

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_TYPE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_:]*(?: [A-Za-z_][A-Za-z0-9_:]*)*(?: ?[*&])*\Z")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\Z")


class CppText(str):
    """Text that a typed filter made, and that a template may therefore print."""


def _integer(value: Any, kind: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise EmitError(f"filter {kind} needs an int; got {_shown(value)}")
    if not low <= value <= high:
        raise EmitError(f"filter {kind} needs a value in [{low}, {high}]; got {value}")
    return value


def _shown(value: Any) -> str:
    if isinstance(value, Undefined):
        value._fail_with_undefined_error()
    return f"{type(value).__name__} {value!r}"


def i32(value: Any) -> CppText:
    """An `int` literal; the lowest one is spelled so that it stays an int."""
    number = _integer(value, "i32", -(2**31), 2**31 - 1)
    return CppText("(-2147483647 - 1)" if number == -(2**31) else str(number))


def hex32(value: Any) -> CppText:
    """An `unsigned int` literal, in 8 hexadecimal digits."""
    return CppText(f"0x{_integer(value, 'hex32', 0, 2**32 - 1):08x}u")


def f32(value: Any) -> CppText:
    """A `float` literal that always holds a point or an exponent, and reads back as the nearest float.

    Raises
    ------
    EmitError
        Not an int or float, not finite, too large for a float, or so small that it would be 0.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise EmitError(f"filter f32 needs a number; got {_shown(value)}")
    if not math.isfinite(value) or abs(value) > 3.4028234663852886e38:
        raise EmitError(f"filter f32 needs a finite number within float's range; got {value!r}")
    text = repr(float(value))
    nearest = struct.unpack("<f", struct.pack("<f", value))[0]
    if value != 0 and nearest == 0:
        raise EmitError(f"filter f32 needs 0 or what a float can tell from it; got {value!r}")
    assert struct.unpack("<f", struct.pack("<f", float(text)))[0] == nearest
    return CppText(f"{text}f")


def boolean(value: Any) -> CppText:
    """`true` or `false`; an int is refused."""
    if not isinstance(value, bool):
        raise EmitError(f"filter boolean needs a bool; got {_shown(value)}")
    return CppText("true" if value else "false")


def literal(value: Any) -> CppText:
    """A constant by its Python type: bool, int (as `int`), float (as `float`), or text that names a macro."""
    if isinstance(value, bool):
        return boolean(value)
    if isinstance(value, str):
        return ident(value)
    return i32(value) if isinstance(value, int) else f32(value)


def cpp_type(value: Any) -> CppText:
    """The C++ type that `literal` gives a constant."""
    if isinstance(value, bool):
        return CppText("bool")
    if isinstance(value, int):
        return CppText("int")
    if isinstance(value, float):
        return CppText("float")
    if isinstance(value, str):
        return CppText("u32")
    raise EmitError(f"filter cpp_type needs a bool, int, float or a macro's name; got {_shown(value)}")


def _matching(value: Any, kind: str, pattern: re.Pattern[str], need: str) -> CppText:
    if not isinstance(value, str) or not pattern.match(value):
        raise EmitError(f"filter {kind} needs {need}; got {_shown(value)}")
    return CppText(value)


def ident(value: Any) -> CppText:
    """A C identifier."""
    return _matching(value, "ident", _IDENTIFIER, "a C identifier")


def type_name(value: Any) -> CppText:
    """A C++ type: names, `::`, blanks between words, and pointer or reference marks at the end."""
    return _matching(value, "type_name", _TYPE_NAME, "a C++ type name")


def file_name(value: Any) -> CppText:
    """A file name without folders, as an `#include` names it."""
    return _matching(value, "file_name", _FILE_NAME, "a plain file name")


def comment(value: Any) -> CppText:
    """One line of text inside a comment: nothing that could end the comment or splice the next line."""
    if not isinstance(value, str):
        raise EmitError(f"filter comment needs text; got {_shown(value)}")
    if not value.isprintable() or "*/" in value or "/*" in value or value.endswith("\\"):
        raise EmitError(f"filter comment needs one printable line without comment marks; got {value!r}")
    return CppText(value)


def string(value: Any) -> CppText:
    """A C string literal of printable ASCII."""
    if not isinstance(value, str) or not value.isascii() or not value.isprintable():
        raise EmitError(f"filter string needs printable ASCII text; got {_shown(value)}")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return CppText(f'"{escaped}"')


def code(value: Any) -> CppText:
    """Text that a macro rendered, whose own values went through filters already."""
    if not isinstance(value, str):
        raise EmitError(f"filter code needs text that a macro rendered; got {_shown(value)}")
    return CppText(value)


def names(values: Any, indent: int) -> CppText:
    """C identifiers with commas between them, in lines of at most 118 columns that begin behind `indent` blanks."""
    words = ", ".join(ident(value) for value in values)
    return CppText(f"\n{' ' * indent}".join(textwrap.wrap(words, 118 - indent)))


FILTERS: dict[str, Callable[..., CppText]] = {
    function.__name__: function
    for function in (
        i32, hex32, literal, cpp_type, ident, type_name, file_name, comment, string, code, names,
    )
}  # fmt: skip
