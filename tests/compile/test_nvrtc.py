"""The NVRTC library: which one is loaded, what it is asked before it compiles, and what a refusal says."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.compile.sources import PLAIN_REQUEST

from cakegen.arch import ARCHITECTURES
from cakegen.compile import compile_cubin, load_nvrtc, nvrtc
from cakegen.errors import CompileError


def test_load_nvrtc_names_the_loaded_file_and_release() -> None:
    library = load_nvrtc()
    assert library.path.is_file()
    assert library.label == f"NVRTC {library.version[0]}.{library.version[1]} ({library.path})"
    assert library.release.startswith(f"{library.version[0]}.{library.version[1]}.")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_require_accepts_every_architecture_of_the_table(arch: str) -> None:
    load_nvrtc().require(arch)


@pytest.mark.parametrize("arch", ["sm_90", "sm_120", "120a", "sm_90aa", "compute_90a", ""])
def test_require_refuses_an_architecture_outside_the_table(arch: str) -> None:
    with pytest.raises(CompileError, match="supported: sm_90a, sm_100a, sm_103a"):
        load_nvrtc().require(arch)


@pytest.mark.parametrize(
    ("version", "supported"),
    [((12, 8), (75, 90, 100)), ((12, 8), (75, 90, 100, 103)), ((14, 0), (110, 120))],
    ids=["unknown", "too old", "too new"],
)
def test_require_refuses_a_library_that_lacks_the_target(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], supported: tuple[int, ...]
) -> None:
    library = nvrtc.Nvrtc(load_nvrtc().path, load_nvrtc()._handle)
    monkeypatch.setattr(library, "version", version)
    monkeypatch.setattr(library, "supported", supported)
    with pytest.raises(CompileError) as refusal:
        library.require("sm_103a")
    message = str(refusal.value)
    assert str(library.path) in message
    assert f"NVRTC {version[0]}.{version[1]}" in message
    assert "does not know sm_103a" in message
    assert ", ".join(map(str, supported)) in message
    assert "nvidia-cuda-nvrtc >= 12.9" in message


def test_fresh_options_are_asked_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """12.8 does not know the option, and refuses what it does not know; 12.9 and later know it."""
    library = nvrtc.Nvrtc(load_nvrtc().path, load_nvrtc()._handle)
    assert library.fresh_options == (("--no-cache",) if library.version >= (12, 9) else ())
    monkeypatch.setattr(nvrtc, "_NO_CACHE", "--no-such-option")
    assert nvrtc.Nvrtc(load_nvrtc().path, load_nvrtc()._handle).fresh_options == ()


def test_named_library_that_does_not_exist_is_refused_with_its_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = tmp_path / "libnvrtc.so.13"
    monkeypatch.setenv(nvrtc.NVRTC_PATH_VARIABLE, str(missing))
    with pytest.raises(CompileError, match=r"CAKEGEN_NVRTC=.*libnvrtc\.so\.13"):
        compile_cubin(PLAIN_REQUEST)


def test_named_library_that_is_no_nvrtc_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "libnvrtc.so.13"
    other.write_bytes(b"not a library")
    monkeypatch.setenv(nvrtc.NVRTC_PATH_VARIABLE, str(other))
    with pytest.raises(CompileError, match=r"must be a libnvrtc\.so of CUDA 12\.9 or newer"):
        load_nvrtc()


def test_missing_library_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda import pathfinder

    def absent(name: str) -> None:
        raise pathfinder.DynamicLibNotFoundError(f"no {name} anywhere")

    monkeypatch.delenv(nvrtc.NVRTC_PATH_VARIABLE, raising=False)
    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", absent)
    nvrtc._load.cache_clear()
    try:
        with pytest.raises(CompileError, match=r"Install nvidia-cuda-nvrtc >= 12\.9.*no nvrtc anywhere"):
            load_nvrtc()
    finally:
        nvrtc._load.cache_clear()


def test_missing_builtins_are_reported_before_any_program(monkeypatch: pytest.MonkeyPatch) -> None:
    library = nvrtc.Nvrtc(load_nvrtc().path, load_nvrtc()._handle)
    lost = nvrtc.NvrtcOutput(7, "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE", "failed to open libnvrtc-builtins", b"")
    monkeypatch.setattr(library, "build", lambda *_, **__: lost)
    with pytest.raises(CompileError, match="on an empty text: failed to open libnvrtc-builtins"):
        _ = library.release


def test_two_programs_of_one_process_have_their_own_file_names() -> None:
    for name in ("first", "second"):
        broken = replace(PLAIN_REQUEST, name=name, source="int broken = ;")
        with pytest.raises(CompileError, match=rf"{name}_kernel\.cu\(1\): error"):
            compile_cubin(broken)


@pytest.mark.slow
def test_each_library_of_the_test_folder_compiles(tmp_path: Path) -> None:
    """Set CAKEGEN_TEST_NVRTC to a folder of `pip install --target` installations of other NVRTC releases."""
    folder = os.environ.get("CAKEGEN_TEST_NVRTC")
    if not folder:
        pytest.skip("CAKEGEN_TEST_NVRTC names no folder with other NVRTC releases")
    libraries = sorted(p for p in Path(folder).rglob("libnvrtc.so.*") if ".alt." not in p.name)
    assert libraries
    script = (
        "from support.compile.sources import PLAIN_REQUEST\n"
        "from cakegen.compile import cached_cubin, load_nvrtc\n"
        "program = cached_cubin(PLAIN_REQUEST)\n"
        "print(load_nvrtc().path, program.compiler, program.report.registers)\n"
    )
    roots = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[1])])
    for library in libraries:
        environment = {**os.environ, "CAKEGEN_NVRTC": str(library), "PYTHONPATH": roots}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{library} nvrtc-")
