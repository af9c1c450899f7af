"""A compile request as one text, for whoever wants to read a program in one piece. Imports this package."""

from __future__ import annotations

import re

from cakegen.compile.requests import CompileRequest

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"\n]+)"[^\n]*\n', re.MULTILINE)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*\n", re.MULTILINE)


def flat_source(request: CompileRequest) -> str:
    """The source with each header in the place of its first include, and the compile line's constants in front.

    A comment stands where a header begins and where it ends. The text compiles alone, with the request's other flags.
    """
    headers, seen = dict(request.headers), set[str]()

    def inlined(text: str) -> str:
        return _INCLUDE.sub(lambda found: included(found[1], found[0]), text)

    def included(name: str, line: str) -> str:
        if name not in headers:
            return line
        if name in seen:
            return ""
        seen.add(name)
        return f"// {name}: begin\n{inlined(_ONCE.sub('', headers[name]))}// {name}: end\n"

    flags = " ".join((*request.flags, f"--gpu-architecture={request.arch}"))
    defines = "".join(f"#define {name} {value}\n" for name, value in request.constants)
    return f"// {request.name}, its headers inlined; compile with {flags}\n{defines}\n{inlined(request.source)}"
