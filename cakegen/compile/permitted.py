"""What a tree may ask of the compiler: nothing but its own files. Imports errors, compiler_flags and this package.

NVRTC searches the file system for whatever a text includes, absolute names too, and no option turns that off
(`--no-source-include` takes away the current folder only; tried with 12.9, 13.0 and 13.5). Its log then quotes what it
read. So texts are looked through before they reach it. The rules are stricter than the language: what could be a
directive is one, wherever it stands, and each text is read as three readers would read it, who differ in what joins
two lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from cakegen.compile.requests import CompileRequest
from cakegen.compiler_flags import is_macro, refused_flag
from cakegen.errors import CompileError

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]*")
# Three readers: who joins no lines, who joins them at a backslash, and who does so with blanks behind it, too.
_SPLICES = (None, re.compile(r"\\\r?\n"), re.compile(r"\\[ \t\v\f\r]*\n"))
# A number sign or its digraph as the first token of a line, or behind the end of a comment, and what follows it.
_LINE_END = r"[\n\r\v\f\x85\u2028\u2029]"
_DIRECTIVE = re.compile(rf"(?P<edge>\A|{_LINE_END}|\*/)[ \t]*(?:#|%:)[ \t]*(?P<word>.?\w*)")
_LINE = re.compile(rf"(?:(?!{_LINE_END}).)*", re.DOTALL)
_INCLUDE = re.compile(r'[ \t]*#[ \t]*include[ \t]+"([^"]*)"[ \t]*(?://.*)?')
_DIRECTIVES = {"define", "undef", "if", "ifdef", "ifndef", "elif", "else", "endif", "error", "warning", "pragma"}
# `##` could spell the first two out of parts
_REFUSED_WORDS = re.compile(r"__has_include|__has_embed|##|%:%:|\?\?[=/]")
_LOG_PLACE = re.compile(r"(?P<file>\S.*?)\(\d+\): (?:[a-z ]*error|warning|remark|note)\b")


def check_request(request: CompileRequest) -> None:
    """Refuse a request whose options or texts reach for anything but the request itself.

    Raises
    ------
    CompileError
        An option that is not permitted, a name that is no plain file name, a text that includes anything but the
        request's own headers, asks whether a file exists, or names another file as its own; with file and line.
    """
    reason = refused_flag(request.flags)
    if reason:
        raise CompileError(f"{request.name}: {reason}")
    for macro, value in request.constants:
        if not is_macro(macro) or type(value) is not int:
            raise CompileError(f"{request.name}: a constant needs a C name and an int; got {macro!a}: {value!a}")
    own = [name for name, _ in request.headers]
    for name in (request.name, *own):
        if _FILE_NAME.fullmatch(name) is None:
            raise CompileError(f"{name!a}: needs a plain file name of letters, digits, '_' and '.'")
    for name, text in ((f"{request.name}_kernel.cu", request.source), *request.headers):
        _check_text(name, text, own)


def _check_text(name: str, text: str, own: Sequence[str]) -> None:
    for splice in _SPLICES:
        read = text if splice is None else splice.sub("", text)
        for line, reason in _refusals(read, own):
            raise CompileError(f"{name}:{line}: {reason}")


def _refusals(text: str, own: Sequence[str]) -> Iterator[tuple[int, str]]:
    """(line, reason) of everything that a text may not hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        yield _line_of(text, error.start), "holds half of a surrogate pair, which no UTF-8 text can"
    if "\0" in text:
        yield _line_of(text, text.index("\0")), "holds a zero byte, where the compiler would take it for finished"
    for found in _REFUSED_WORDS.finditer(text):
        yield (
            _line_of(text, found.start()),
            f"holds {found[0]}; a tree's text may ask for no file, nor spell such names",
        )
    for found in _DIRECTIVE.finditer(text):
        reason = _refused_directive(text, found, own)
        if reason:
            yield _line_of(text, found.end()), reason


def _refused_directive(text: str, found: re.Match[str], own: Sequence[str]) -> str:
    word = found["word"]
    if word in _DIRECTIVES:
        return ""
    if word != "include":
        return f"holds the directive #{word[:20]!a}, which no tree's text needs"
    line = _LINE.match(text, found.end("edge"))
    assert line is not None, "an empty line matches too"
    included = _INCLUDE.fullmatch(line[0]) if found["edge"] != "*/" else None
    if included is None:
        return f'{line[0].strip()[:80]!a}: a tree\'s text includes its own files alone, as one line #include "NAME"'
    if included[1] not in own:
        listed = ", ".join(own) or "none"
        return f"includes {included[1][:80]!a}, which is none of the headers that its record names: {listed}"
    return ""


def _line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def own_log(log: str, request: CompileRequest) -> str:
    """A compiler's log without what concerns other files than the request's own; how much is missing is said.

    A message is a line that names a file and a line of it, with the lines behind it that name none.
    """
    own = {f"{request.name}_kernel.cu", *(name for name, _ in request.headers)}
    kept, left_out, keeping = [], 0, True
    for line in log.splitlines():
        found = _LOG_PLACE.match(line)
        if found is not None:
            keeping = found["file"] in own
        elif line.startswith("ptxas"):
            keeping = True
        if keeping:
            kept.append(line)
        else:
            left_out += 1
    note = [f"({left_out} lines that concern other files are left out)"] if left_out else []
    return "\n".join([*kept, *note])
