"""`cakegen bundle`, and the runtime on what it wrote, with no compiler at hand."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.runtime.fakes import FakeDriver

from cakegen.cli.main import main
from cakegen.compile import bundle as bundle_module
from cakegen.errors import CompileError
from cakegen.registry import load_registry
from cakegen.runtime import device, driver
from cakegen.runtime.device import open_device
from cakegen.runtime.programs import ProgramTable

TINY = "tiny_latent_moe"


@pytest.fixture(autouse=True)
def nothing_opened() -> None:
    bundle_module._opened.cache_clear()


@pytest.fixture(scope="module")
def key() -> str:
    registry = load_registry(TINY)
    return min(key for key, name in registry.kernels.items() if registry.programs[name].arches == ("sm_90a",))


@pytest.fixture
def folder(tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle of one program and of all norms; from here on there is no compiler, and no cache."""
    out = tmp_path / "bundle"
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", str(tmp_path / "cache"))
    result = bundle(out, key, "tail_norm:*", "--arch", "sm_90a")
    assert result.exit_code == 0, result.output
    assert f"3 programs of {TINY} for sm_90a" in result.output
    monkeypatch.setenv("CAKEGEN_NVRTC", str(tmp_path / "none.so"))
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", str(tmp_path / "empty"))
    return out


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the driver is asked to load, on a machine of fakes."""
    fake = FakeDriver()
    monkeypatch.setattr(driver, "bindings", lambda: fake)
    monkeypatch.setattr(driver, "is_capturing", lambda ordinal=None: False)
    monkeypatch.setattr(device, "_opened", {})
    calls: list[tuple[Any, ...]] = []
    original = driver.load_kernel
    monkeypatch.setattr(driver, "load_kernel", lambda *a: calls.append(a) or original(*a))
    return calls


def bundle(out: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["bundle", "--export", TINY, "--out", str(out), *arguments])


def test_runtime_loads_from_the_bundle_that_is_given(folder: Path, key: str, loaded: list[tuple[Any, ...]]) -> None:
    registry = load_registry(TINY)
    ProgramTable(registry, bundle=folder).load(open_device(0), key)
    ((cubin, symbol, _),) = loaded
    assert cubin[:4] == b"\x7fELF"
    assert symbol == registry.program(key).kernel_symbol


def test_runtime_loads_from_the_bundle_of_the_environment(
    folder: Path, key: str, loaded: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = ProgramTable(load_registry(TINY))
    with pytest.raises(CompileError, match=r"none\.so"):
        table.load(open_device(0), key)
    monkeypatch.setenv("CAKEGEN_BUNDLE", str(folder))
    steps: list[tuple[int, int]] = []
    table.load_all(open_device(0), [key, "tail_norm:e0@sm_90a"], on_progress=lambda *step: steps.append(step))
    assert len(loaded) == 2
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_runtime_refuses_a_program_that_the_bundle_lacks_and_compiles_nothing(
    folder: Path, key: str, loaded: list[tuple[Any, ...]]
) -> None:
    registry = load_registry(TINY)
    other = next(entry for entry in sorted(registry.kernels) if entry != key and entry.endswith("@sm_90a"))
    table = ProgramTable(registry, bundle=folder)
    for call in (lambda: table.load(open_device(0), other), lambda: table.load_all(open_device(0), [key, other])):
        with pytest.raises(CompileError, match="holds 3 programs for sm_90a, and not"):
            call()
    assert loaded == []


def test_runtime_with_other_flags_refuses_the_bundle(folder: Path, key: str, loaded: list[tuple[Any, ...]]) -> None:
    table = ProgramTable(load_registry(TINY), ("-DCAKEGEN_CHAOS",), folder)
    with pytest.raises(CompileError, match=r"compiled from another text, other flags.* -DCAKEGEN_CHAOS"):
        table.load(open_device(0), key)


def test_check_accepts_a_whole_bundle_and_names_what_is_wrong_with_another(folder: Path, key: str) -> None:
    result = bundle(folder, key, "--check")
    assert result.exit_code == 0, result.output
    assert "1 programs of tiny_latent_moe, whole, compiled by nvrtc-" in result.output
    broken = next(folder.glob("*.cubin"))
    broken.write_bytes(b"")
    refused = bundle(folder, key, "tail_norm:*", "--arch", "sm_90a", "--check")
    assert refused.exit_code == 1
    assert f"{broken}: sha256" in refused.stderr
    assert "1 of 3 programs can't be used" in refused.stderr


def test_bundle_without_a_compiler_writes_nothing(folder: Path, tmp_path: Path, key: str) -> None:
    result = bundle(tmp_path / "second", key)
    assert result.exit_code == 1
    assert "none.so" in result.stderr
    assert not (tmp_path / "second").exists()


def test_bundle_of_a_program_that_does_not_compile_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    from cakegen.compile import parallel

    def refuse(request: object) -> object:
        raise CompileError("refused")

    monkeypatch.setattr(parallel, "cached_cubin", refuse)
    result = bundle(tmp_path / "out", key)
    assert result.exit_code == 1
    assert f"FAILED {key} (sm_90a): refused" in result.stderr
    assert "not written, since 1 programs failed" in result.stderr
    assert not (tmp_path / "out").exists()


def test_bundle_is_signed_and_checked_with_the_keys_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    pytest.importorskip("cryptography", reason="signs bundles")
    private, public, out = tmp_path / "key.pem", tmp_path / "key.pub", tmp_path / "signed"
    for command in (
        ("genpkey", "-algorithm", "ed25519", "-out", str(private)),
        ("pkey", "-in", str(private), "-pubout", "-out", str(public)),
    ):
        made = shutil.which("openssl") and subprocess.run(["openssl", *command], capture_output=True, check=False)
        if not made or made.returncode:
            pytest.skip("needs an openssl that knows Ed25519")
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", str(tmp_path / "cache"))
    assert f"signed with {private}" in bundle(out, key, "--arch", "sm_90a", "--sign", str(private)).output
    checked = bundle(out, key, "--arch", "sm_90a", "--check", "--verify", str(public))
    assert checked.exit_code == 0, checked.output
    assert f"signed by {public}" in checked.output
    manifest = out / "bundle.json"
    manifest.write_text(manifest.read_text().replace("nvrtc-", "nvrtd-"))
    changed = bundle(out, key, "--arch", "sm_90a", "--check", "--verify", str(public))
    assert changed.exit_code == 1
    assert "the signature is not that of" in changed.stderr
    assert bundle(out, key, "--verify", str(public)).exit_code == 2
    assert bundle(out, key, "--check", "--sign", str(private)).exit_code == 2
