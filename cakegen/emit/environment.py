"""The Jinja environment: C++ stays readable as C++, and only typed text reaches a source.

Delimiters: variable `${x | i32}`, statement line `//% if …`, block `/*% … %*/`, comment `/*# … #*/`, comment line
`//# …`. Jinja's own collide with CUDA (`{{1, 2}}`, `{#`, `"{%0, %1}"`).
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension

from cakegen.emit.filters import FILTERS, CppText
from cakegen.errors import EmitError
from cakegen.known_faults import small_map_facts

_COMMENT_LINE = re.compile(r"^[ \t]*//#(.*)$", re.MULTILINE)
# Jinja's statement lines take all blank lines below along
_BLANK_AFTER_STATEMENT = re.compile(r"^([ \t]*//%.*)\n[ \t]*$", re.MULTILINE)
# a block or comment that ends a line which holds something else in front of it
_TRAILING_BLOCK = re.compile(r"^([ \t]*\S.*/\*[%#].*[^+\-])([%#]\*/)[ \t]*$", re.MULTILINE)
_LINE_END_BLANKS = re.compile(r"[ \t]+$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n{3,}")
_SOURCE_MARK = "templates/"


class WholeLines(Extension):
    """Blocks and comments take a newline along exactly where they stand alone in their line; no line number moves.

    Jinja's `trim_blocks` knows no such difference: it would join `f() /*% endif %*/` with the line below.
    """

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        """Spell `//# …` lines as block comments, which are trimmed, and mark trailing blocks as not trimmed."""
        source = _COMMENT_LINE.sub(lambda match: f"/*#{match[1]}#*/", source)
        source = _BLANK_AFTER_STATEMENT.sub(r'\1\n${"" | code}', source)
        return _TRAILING_BLOCK.sub(r"\1+\2", source)


class TemplateLoader(jinja2.BaseLoader):
    """Reads templates below one folder; names are paths with `/`, whatever the host.

    Parameters
    ----------
    root
        Folder that holds `device`, `kernels` and `host`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, name: str) -> str:
        """Text of one template.

        Raises
        ------
        EmitError
            The name leaves the folder, or the file is missing, not UTF-8, or not LF.
        """
        file = self.root / name
        if name.startswith("/") or ".." in name.split("/"):
            raise EmitError(f"template {name!r} is outside the templates folder; name it relative to it")
        try:
            text = file.read_bytes().decode("utf-8")
        except OSError as error:
            raise EmitError(f"template {name!r}: {error.strerror} ({file})") from None
        except UnicodeDecodeError as error:
            raise EmitError(f"template {name!r}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
        if "\r" in text:
            line = text[: text.index("\r")].count("\n") + 1
            raise EmitError(f"template {name!r} line {line}: holds a carriage return; save it with LF line ends")
        return text

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str | None, Callable[[], bool] | None]:
        """Jinja's hook: text, the name that tracebacks show, and no reload."""
        return self.read(template), _SOURCE_MARK + template, lambda: True


def _finalize(value: Any) -> CppText:
    if isinstance(value, jinja2.Undefined):
        value._fail_with_undefined_error()
    if not isinstance(value, CppText):
        kinds = ", ".join(FILTERS)
        shown = f"{type(value).__name__} {value!r}"
        raise EmitError(f"a template may print typed text only; got {shown}. End the expression with one of: {kinds}")
    return value


def template_environment(root: Path) -> jinja2.Environment:
    """An environment over the templates below `root`.

    Raises
    ------
    EmitError
        Later, from its templates: an undefined name, or a value that no typed filter made.
    """
    environment = jinja2.Environment(
        block_start_string="/*%",
        block_end_string="%*/",
        variable_start_string="${",
        variable_end_string="}",
        comment_start_string="/*#",
        comment_end_string="#*/",
        line_statement_prefix="//%",
        line_comment_prefix="//#",
        trim_blocks=True,
        lstrip_blocks=True,
        newline_sequence="\n",
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
        loader=TemplateLoader(root),
        auto_reload=False,
        extensions=(WholeLines,),
    )
    # Nothing in a template may depend on chance: no `random` filter, no `lipsum`.
    environment.filters.pop("random", None)
    environment.globals.pop("lipsum", None)
    environment.filters.update(FILTERS)
    environment.globals["small_map"] = small_map_facts()
    return environment


def render_template(environment: jinja2.Environment, name: str, context: Mapping[str, Any]) -> str:
    """One template as text; blanks at line ends, which a trailing comment or block leaves, are dropped.

    Raises
    ------
    EmitError
        Whatever went wrong, with the template's name and line.
    """
    try:
        text = _LINE_END_BLANKS.sub("", environment.get_template(name).render(context))
        return _BLANK_LINES.sub("\n\n", text)
    except jinja2.TemplateSyntaxError as error:
        raise EmitError(f"{_SOURCE_MARK}{error.name or name}:{error.lineno}: {error.message}") from None
    except (jinja2.TemplateError, EmitError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise EmitError(f"{_where(error, name)}: {error or type(error).__name__}") from None


def _where(error: BaseException, name: str) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(_SOURCE_MARK)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else f"{_SOURCE_MARK}{name}"
