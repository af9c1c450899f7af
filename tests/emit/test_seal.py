"""Banner, seal, and the rules of generated text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cakegen.emit.seal import included_files, is_generated, is_intact, render_sealed, render_sealed_json
from cakegen.errors import EmitError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("file_name", ["a_kernel.cu", "a_device_common.cuh", "cake_jit.py", "README.md"])
def test_sealed_text_is_intact_until_any_line_changes(file_name: str) -> None:
    text = render_sealed(file_name, "tiny", "What it is. " * 20, "one\n\ntwo\n")
    assert is_generated(text)
    assert is_intact(text)
    assert "cakegen export tiny" in text
    for number, line in enumerate(text.splitlines()):
        edited = text.splitlines(keepends=True)
        edited[number] = line + "x\n"
        assert not is_intact("".join(edited))
    assert not is_intact(text + "\n")


def test_banner_ends_with_the_licence_of_the_project() -> None:
    """As SPDX has it: the tag and the identifier end a line, before a comment's own end."""
    (declared,) = re.findall(r'^license = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for name, end in (("a_kernel.cu", ""), ("cake_a.cuh", ""), ("cake_jit.py", ""), ("README.md", " -->")):
        for export in ("tiny", None):
            banner = render_sealed(name, export, "What it is", "text\n").partition("seal:")[0]
            assert f"SPDX-License-Identifier: {declared}{end}\n" in banner
    about = json.loads(render_sealed_json("tiny", "What it is", "cakegen export", {}))["about"]
    assert about[-1].endswith(f" SPDX-License-Identifier: {declared}")


def test_text_without_seal_is_foreign() -> None:
    assert not is_generated("int x;\n")
    assert not is_intact("int x;\n")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ok\n" + "x" * 121 + "\n", "a_kernel.cu:7: 121 columns"),
        ("ok\nx\ty\n", r"a_kernel.cu:7: holds the control character '\\t'"),
        ("ok\r\n", r"control character '\\r'"),
        ("no end", "the last line does not end"),
        ("#include <cuda_bf16.h>\n", "a_kernel.cu:6: includes cuda_bf16.h"),
        ("  #  include <stdint.h>\n", "includes stdint.h"),
        ('#include "cuda/std/atomic"\n', "includes cuda/std/atomic"),
    ],
)
def test_rule_of_generated_text_is_kept(body: str, message: str) -> None:
    with pytest.raises(EmitError, match=message):
        render_sealed("a_kernel.cu", "tiny", "What it is", body)


def test_host_text_may_include_driver_header_only() -> None:
    render_sealed("a_binding.cu", "tiny", "Host", "#include <cuda.h>\n#include <tvm/ffi/function.h>\n")
    with pytest.raises(EmitError, match=r"cuda_runtime\.h"):
        render_sealed("a_binding.cu", "tiny", "Host", "#include <cuda_runtime.h>\n")


def test_included_files_are_those_in_quotes() -> None:
    assert included_files('#include "a.cuh"\n# include <b.h>\n  #include "c.cuh"\n// #include "d.cuh"\n') == [
        "a.cuh",
        "c.cuh",
    ]
