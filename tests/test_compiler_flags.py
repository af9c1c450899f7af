"""What a tree may ask of the compiler by options: a list, and numbers as values."""

from __future__ import annotations

import pytest
from support.compile.hostile_input import REFUSED_FLAGS

from cakegen.compiler_flags import is_macro, refused_flag

PERMITTED = (
    "-std=c++17",
    "--std=c++20",
    "-lineinfo",
    "-DCAKEGEN_CHAOS",
    "-DSCALE=-3",
    "-DMASK=0xffUL",
    "--define-macro=SCALE=3",
    "-use_fast_math",
    "--fmad=false",
    "-maxrregcount=128",
)


def test_permitted_options_pass_one_by_one_and_together() -> None:
    assert refused_flag(PERMITTED) == ""
    assert [flag for flag in PERMITTED if refused_flag([flag])] == []


@pytest.mark.parametrize("flag", REFUSED_FLAGS)
def test_any_other_option_is_refused_with_those_that_are_not(flag: str) -> None:
    reason = refused_flag(["-std=c++17", flag])
    assert reason.startswith(f"the option {flag!a} is none that a tree may ask for; it may ask for -D<name>")
    assert reason.isprintable()


@pytest.mark.parametrize(("name", "good"), [("SCALE", True), ("_a1", True), ("A=1", False), ("1A", False), ("", False)])
def test_macro_names_are_c_names(name: str, good: bool) -> None:
    assert is_macro(name) is good
