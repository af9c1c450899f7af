"""Texts of trees reach for nothing but their own files, whatever a compiler would read; its log tells of no other.

Each hostile text is also given to the compiler itself, so that the list below is one of real ways in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.compile.hostile_input import ASKERS, OTHERS, READERS
from support.compile.sources import HEADER, PLAIN, PLAIN_REQUEST, request_of

from cakegen.compile import CompileRequest, compile_cubin, compile_ptx, load_nvrtc
from cakegen.compile.permitted import check_request, own_log
from cakegen.errors import CompileError

SECRET = "TOPSECRET words"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret.txt"
    file.write_text(f"{SECRET}\n")
    return file


def raw_log(source: str, headers: Sequence[tuple[str, str]] = ()) -> str:
    return load_nvrtc().build(source, "x.cu", headers, ("--gpu-architecture=sm_90a", "-DSCALE=1")).log


def refusal_of(request: CompileRequest) -> str:
    with pytest.raises(CompileError) as by_cubin:
        compile_cubin(request)
    with pytest.raises(CompileError) as by_ptx:
        compile_ptx(request)
    assert str(by_cubin.value) == str(by_ptx.value)
    assert str(by_cubin.value).isprintable()
    return str(by_cubin.value)


@pytest.mark.parametrize("way", READERS)
def test_text_that_would_be_read_into_the_log_never_reaches_the_compiler(secret: Path, way: str) -> None:
    hostile = READERS[way].format(secret)
    assert SECRET in raw_log(hostile), "a way in"
    for request in (
        request_of(hostile + PLAIN),
        replace(PLAIN_REQUEST, headers=(("scaled.cuh", f"{HEADER}\n{hostile}"),)),
    ):
        assert SECRET not in refusal_of(request)


@pytest.mark.parametrize("way", ASKERS)
def test_text_that_asks_whether_a_file_is_there_is_refused(secret: Path, way: str) -> None:
    hostile = ASKERS[way].format(secret)
    assert "it is there" in raw_log(hostile), "a way in"
    assert "it is there" not in refusal_of(request_of(hostile + PLAIN))


@pytest.mark.parametrize("way", OTHERS)
def test_directive_that_no_text_needs_is_refused_whatever_this_compiler_makes_of_it(secret: Path, way: str) -> None:
    refusal_of(request_of(OTHERS[way].format(secret) + PLAIN))


@pytest.mark.parametrize("folder", ["", "sub/"])
def test_file_beside_the_process_is_not_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """NVRTC looks in the current folder first; a header that the record does not name is not part of the key."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / folder / "beside.cuh").write_text(SECRET)
    text = f'#include "{folder}beside.cuh"\n'
    assert SECRET in raw_log(text)
    message = refusal_of(request_of(text + PLAIN))
    wanted = f"plain_kernel.cu:1: includes '{folder}beside.cuh', which is none of the headers that its record names: "
    assert message == f"{wanted}scaled.cuh"


def test_own_header_is_the_trees_and_not_one_of_that_name_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scaled.cuh").write_text(SECRET)
    compile_cubin(PLAIN_REQUEST)


@pytest.mark.parametrize(
    "text",
    [
        '#include "scaled.cuh"  // what it says\n',
        '  #  include  "scaled.cuh"\n',
        "// a note #7, and #include as a word\n",
        "/* #1 of 2 */\n#if defined(SCALE) && SCALE > 1\n#pragma unroll\n#else\n#error no\n#endif\n",
        "#define TWICE(a) \\\n  ((a) * 2)\n",
        '__device__ const char* percent() { return "%: # 12"; }\n',
    ],
)
def test_harmless_text_passes(text: str) -> None:
    check_request(request_of(text + PLAIN))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flags": ("--create-pch=x",)}, "plain: the option '--create-pch=x' is none that a tree may ask for"),
        ({"constants": (("A=1 -x", 3),)}, "plain: a constant needs a C name and an int; got 'A=1 -x': 3"),
        ({"constants": (("A", "3"),)}, "plain: a constant needs a C name and an int; got 'A': '3'"),
        ({"name": "../x"}, "'../x': needs a plain file name"),
        ({"headers": (("/etc/passwd", ""),)}, "'/etc/passwd': needs a plain file name"),
        ({"source": "a\0b"}, "plain_kernel.cu:1: holds a zero byte"),
        ({"source": "a\n\ud800"}, "plain_kernel.cu:2: holds half of a surrogate pair"),
    ],
)
def test_request_that_reaches_beyond_itself_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CompileError) as caught:
        compile_cubin(replace(PLAIN_REQUEST, **changes))
    assert str(caught.value).startswith(message)


def test_long_texts_are_looked_through_in_linear_time() -> None:
    """Each would take hours if a place were looked at from every other; the limit of a test is five minutes."""
    for text in ("#" * 10**6, "\n" * 10**6, "*/" * 500_000, "/*#" * 300_000, "\\ " * 500_000, '#include "' * 100_000):
        with pytest.raises(CompileError):
            check_request(request_of(f'{text}\n#include "x"'))


def test_log_is_quoted_where_it_concerns_own_files() -> None:
    log = (
        "scaled.cuh(3): error: one\n   quoted\n\n/etc/passwd(1): error: two\n   root:x\n   ^\n\n"
        "plain_kernel.cu(9): warning #1-D: three\n\nnote(1): catastrophic error: four\n"
        "ptxas info    : Used 32 registers"
    )
    kept = own_log(log, PLAIN_REQUEST)
    assert "root" not in kept
    assert "two" not in kept
    assert "four" not in kept
    for word in ("one", "quoted", "three", "Used 32 registers"):
        assert word in kept
    assert kept.endswith("(5 lines that concern other files are left out)")
    assert own_log("plain_kernel.cu(1): error: x", PLAIN_REQUEST) == "plain_kernel.cu(1): error: x"


def test_file_of_the_users_own_may_include_what_its_options_lead_to(secret: Path) -> None:
    request = request_of(f'#line 1 "mine.cu"\n#include "scaled.cuh"\n{PLAIN}', headers=(), flags=(), constants=())
    (secret.parent / "scaled.cuh").write_text(HEADER)
    text = compile_ptx(request, ("-std=c++17", f"--include-path={secret.parent}", "-DSCALE=3"))
    assert ".entry kernel_plain" in text
    with pytest.raises(CompileError, match="-arch=sm_90' is set by cakegen itself"):
        compile_ptx(request, ("-arch=sm_90",))
