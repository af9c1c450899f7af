"""Leaf module: the compiler options that a generated tree may ask for. Imports nothing.

A tree may be anybody's: a branch under review, a folder named with `--export`. NVRTC has options that write files
(`--create-pch=F`, `--time=F`, `--fdevice-time-trace=F`), read them (`-include=F`, `--include-path=D`) or read options
from one (`--options-file=F`). So what a tree asks for is compared with the list below, where its registry is read and
once more before the compiler is called. A value is a word of a list or a number: a macro's value that is a name could
be `__has_include`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_MACRO = r"[A-Za-z_][A-Za-z0-9_]*"
_NUMBER = r"-?(?:0[xX][0-9a-fA-F]{1,16}|[0-9]{1,20})[uU]?[lL]{0,2}"
_SWITCH = r"true|false"
# Supported compile options of NVRTC 12.9 and 13.0; one or two dashes are the same to it.
_PERMITTED = re.compile(
    rf"-D{_MACRO}(?:={_NUMBER})?"
    rf"|--define-macro={_MACRO}(?:={_NUMBER})?"
    r"|--?std=c\+\+(?:11|14|17|20)"
    r"|--?(?:lineinfo|generate-line-info|use_fast_math|extra-device-vectorization|restrict|device-int128)"
    rf"|--?(?:ftz|prec-div|prec-sqrt|fmad)=(?:{_SWITCH})"
    r"|--?maxrregcount=[1-9][0-9]{0,2}"
)
_WORDS = (
    "-D<name>[=<number>], -std=c++11 … 20, -lineinfo, -use_fast_math, -extra-device-vectorization, -restrict, "
    "-device-int128, -ftz, -prec-div, -prec-sqrt and -fmad (=true or =false), -maxrregcount=<number>"
)
_SHOWN_CHARACTERS = 80


def refused_flag(flags: Sequence[str]) -> str:
    """Why the first option that no tree may ask for is refused, with those that it may; empty where all are permitted.

    Parameters
    ----------
    flags
        Compiler options, in order.
    """
    for flag in flags:
        if _PERMITTED.fullmatch(flag) is None:
            return f"the option {flag[:_SHOWN_CHARACTERS]!a} is none that a tree may ask for; it may ask for {_WORDS}"
    return ""


def is_macro(name: str) -> bool:
    """Whether a name can stand before the `=` of `-D<name>=<number>`."""
    return re.fullmatch(_MACRO, name) is not None
