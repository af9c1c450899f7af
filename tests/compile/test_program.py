"""From text to a cubin: what is reported, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.compile.sources import (
    INDEXED,
    PLAIN,
    PLAIN_REQUEST,
    SETMAXNREG_IGNORED,
    SPILLING,
    WGMMA_SERIALIZED,
    request_of,
)

from cakegen.arch import ARCHITECTURES
from cakegen.compile import compile_cubin, compile_ptx, program
from cakegen.compile.nvrtc import NvrtcOutput
from cakegen.errors import CompileError


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compile_cubin_reports_the_kernel_for_every_architecture(arch: str) -> None:
    compiled = compile_cubin(replace(PLAIN_REQUEST, arch=arch))
    report = compiled.report
    assert compiled.cubin.startswith(b"\x7fELF")
    assert f"Used {report.registers} registers" in compiled.log
    assert report.static_smem_bytes == 128 * 4
    assert report.parameter_bytes == 8 + 4
    assert report.stack_bytes == 0
    assert report.spill_bytes == 0
    assert report.cubin_bytes == len(compiled.cubin)
    assert report.compile_ms > 0
    assert not compiled.cached


def test_compile_cubin_repeats_its_bytes() -> None:
    assert compile_cubin(PLAIN_REQUEST).cubin == compile_cubin(PLAIN_REQUEST).cubin


def test_constants_and_flags_reach_the_text() -> None:
    checked = PLAIN + "\n#if SCALE != 7 || !defined(CAKEGEN_CHAOS)\n#error not as requested\n#endif\n"
    with pytest.raises(CompileError, match="not as requested"):
        compile_cubin(request_of(checked))
    compile_cubin(request_of(checked, flags=("-std=c++17", "-DCAKEGEN_CHAOS"), constants=(("SCALE", 7),)))


def test_refused_source_raises_with_log_file_name_and_library() -> None:
    with pytest.raises(CompileError) as refusal:
        compile_cubin(request_of('extern "C" __global__ void kernel_plain() { undefined_name(); }'))
    message = str(refusal.value)
    assert "plain for sm_90a, NVRTC" in message
    assert "libnvrtc" in message
    assert 'plain_kernel.cu(1): error: identifier "undefined_name" is undefined' in message
    assert "--gpu-architecture=sm_90a -std=c++17 -DSCALE=3" in message


def test_missing_header_raises_with_its_name() -> None:
    with pytest.raises(CompileError, match=r"includes 'scaled\.cuh', which is none of the headers .*: none"):
        compile_cubin(replace(PLAIN_REQUEST, headers=()))


def test_toolkit_headers_are_not_at_hand() -> None:
    with pytest.raises(CompileError, match=r"cuda_bf16\.h"):
        compile_cubin(request_of("#include <cuda_bf16.h>\n" + PLAIN))


def test_unknown_option_raises_with_the_options() -> None:
    with pytest.raises(CompileError, match=r"--no-such-option"):
        compile_cubin(replace(PLAIN_REQUEST, flags=("--no-such-option",)))


@pytest.mark.parametrize("flag", ["-arch=sm_90", "--gpu-architecture=sm_100a", "-dlto", "--pch"])
def test_flag_that_cakegen_sets_itself_is_refused(flag: str) -> None:
    with pytest.raises(CompileError, match="is set by cakegen itself"):
        compile_cubin(replace(PLAIN_REQUEST, flags=(flag,)))


@pytest.mark.parametrize("returned", [b"", b"\x7fELF\x02\x01", b"garbage"], ids=["empty", "cut short", "no ELF"])
def test_success_without_a_cubin_is_refused(monkeypatch: pytest.MonkeyPatch, returned: bytes) -> None:
    monkeypatch.setattr(program.Nvrtc, "build", lambda *_, **__: NvrtcOutput(0, "NVRTC_SUCCESS", "", returned))
    with pytest.raises(CompileError, match="cubin"):
        compile_cubin(PLAIN_REQUEST)


def test_kernel_without_c_linkage_is_refused_with_what_is_defined() -> None:
    with pytest.raises(CompileError, match=r"exactly one definition of kernel_plain.*found 0.*_Z12kernel_plain"):
        compile_cubin(request_of(PLAIN.replace('extern "C" ', "")))


def test_spills_are_an_error_with_their_bytes() -> None:
    with pytest.raises(CompileError, match=r"\d{2,} bytes of stack, \d{3,} bytes of register spills or local arrays"):
        compile_cubin(request_of(SPILLING))


def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An NVRTC that takes every program out of a cache, and so leaves no log (12.9 and later, with a driver)."""
    build = program.Nvrtc.build
    monkeypatch.setattr(program.Nvrtc, "build", lambda *a, **k: replace(build(*a, **k), log=""))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_spills_are_an_error_without_a_log(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """Stack and local accesses come from the cubin; the sums are those that ptxas reports where it does."""
    with pytest.raises(CompileError) as told:
        compile_cubin(request_of(SPILLING, arch=arch))
    stores, loads = map(int, re.findall(r"(\d+) bytes spill", str(told.value)))
    silent(monkeypatch)
    for _ in range(3):
        with pytest.raises(CompileError, match=rf"bytes of stack, {stores + loads} bytes of register spills"):
            compile_cubin(request_of(SPILLING, arch=arch))


def test_indexed_local_array_is_an_error_too() -> None:
    with pytest.raises(CompileError, match=r"128 bytes of stack, 120 bytes of register spills or local arrays"):
        compile_cubin(request_of(INDEXED))


def test_chaos_build_may_spill() -> None:
    report = compile_cubin(request_of(SPILLING, flags=("-std=c++17", "-DCAKEGEN_CHAOS"))).report
    assert report.stack_bytes > 0
    assert report.spill_bytes > 1000


def test_program_without_a_log_is_refused_since_three_faults_stand_there_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent(monkeypatch)
    with pytest.raises(CompileError, match=r"no report on kernel_plain, so the code came .* CUDA_CACHE_DISABLE=1"):
        compile_cubin(PLAIN_REQUEST)


def test_compiler_is_told_to_compile_again_where_it_knows_how(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    build = program.Nvrtc.build

    def noting(
        library: program.Nvrtc, source: str, name: str, headers: object, options: object, **more: bool
    ) -> object:
        seen.append(tuple(options))  # type: ignore[arg-type]
        return build(library, source, name, headers, options, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(program.Nvrtc, "build", noting)
    compile_cubin(PLAIN_REQUEST)
    compile_ptx(PLAIN_REQUEST)
    assert "--no-cache" in seen[-2]
    assert "--no-cache" not in seen[-1], "PTX is not kept in that cache, and no fact is read from its log"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_ignored_setmaxnreg_is_an_error(arch: str) -> None:
    with pytest.raises(CompileError, match="C7508"):
        compile_cubin(request_of(SETMAXNREG_IGNORED, arch=arch))


def test_serialized_wgmma_and_injected_waits_are_errors() -> None:
    with pytest.raises(CompileError) as refusal:
        compile_cubin(request_of(WGMMA_SERIALIZED))
    verdict = str(refusal.value).split("Full log")[0]
    assert "wgmma.mma_async instructions are serialized" in verdict
    assert "is injected" in verdict


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compile_ptx_gives_the_target_and_the_entry(arch: str) -> None:
    text = compile_ptx(replace(PLAIN_REQUEST, arch=arch))
    assert f".target {arch}" in text
    assert text.count(".entry kernel_plain") == 1


def test_compile_ptx_without_the_kernel_is_refused() -> None:
    with pytest.raises(CompileError, match=r"must define \.entry kernel_other once, not 0"):
        compile_ptx(replace(PLAIN_REQUEST, kernel_symbol="kernel_other"))


def test_compile_needs_no_driver_library() -> None:
    script = (
        "from support.compile.sources import PLAIN_REQUEST\n"
        "from cakegen.compile import compile_cubin\n"
        "compile_cubin(PLAIN_REQUEST)\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libnvrtc' in maps and 'libcuda.so' not in maps\n"
    )
    roots = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": roots},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
