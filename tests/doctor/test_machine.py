"""What the doctor finds on this machine, and how it words what is wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.compile.sources import PLAIN_REQUEST
from support.runtime.fakes import FakeDriver

from cakegen.compile import cached_cubin, load_nvrtc
from cakegen.compile.bundle import write_bundle
from cakegen.doctor import ABSENT, OK, PROBLEM, Finding, examine_machine, machine
from cakegen.doctor.machine import SETTINGS
from cakegen.errors import LaunchError
from cakegen.registry import SHARED_FOLDER, Registry, load_registry
from cakegen.runtime import driver

TINY = "tiny_latent_moe"


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the outside, but a cache of the test's own."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", str(tmp_path / "cache"))


def examine(export: str | Path = TINY) -> dict[str, Finding]:
    found = list(examine_machine(str(export)))
    assert all(json.dumps(dict(finding.facts)) for finding in found)
    return {finding.topic: finding for finding in found}


def test_tree_compiler_and_cache_of_this_machine_are_sound() -> None:
    found = examine()
    assert {found[topic].state for topic in ("python", "cakegen", "tree", "nvrtc", "cache")} == {OK}
    registry = load_registry(TINY)
    assert found["tree"].facts == {"export": TINY, "keys": len(registry.kernels), "programs": len(registry.programs)}
    assert found["nvrtc"].facts["path"] == str(load_nvrtc().path)
    assert found["nvrtc"].facts["version"] == load_nvrtc().release
    arches = sorted({arch for program in registry.programs.values() for arch in program.arches})
    assert found["nvrtc"].text.endswith(f"compiles for {', '.join(arches)}")


@pytest.mark.parametrize(("version", "state"), [((3, 10), PROBLEM), ((3, 11), OK), ((3, 13), OK), ((3, 14), PROBLEM)])
def test_python_outside_of_what_is_supported_is_a_problem(
    version: tuple[int, int], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "sys", SimpleNamespace(version_info=version, executable="python"))
    assert machine._python().state == state


@pytest.mark.parametrize(
    ("torch", "state", "text"),
    [
        (("2.13.0", None, False), ABSENT, "2.13.0, built without CUDA: backend='reference' and the emulator only"),
        (("2.13.0", "13.0", False), OK, "2.13.0, built for CUDA 13.0, sees no device"),
        (("2.13.0", "13.0", True), OK, "2.13.0, built for CUDA 13.0, sees a device"),
    ],
)
def test_torch_is_told_by_its_build(
    torch: tuple[str, str | None, bool], state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, cuda, sees = torch
    fake = SimpleNamespace(
        __version__=version, version=SimpleNamespace(cuda=cuda), cuda=SimpleNamespace(is_available=lambda: sees)
    )
    monkeypatch.setattr(machine, "importlib", SimpleNamespace(import_module=lambda name: fake))
    found = machine._torch()
    assert (found.state, found.text) == (state, text)


def test_torch_that_can_not_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(machine, "importlib", SimpleNamespace(import_module=missing))
    assert machine._torch().state == PROBLEM
    assert "libcudart.so.13" in machine._torch().text


@pytest.mark.parametrize(
    ("version", "state", "text"),
    [
        (13000, OK, "for CUDA 13.0"),
        (14020, OK, "for CUDA 14.2"),
        (12090, PROBLEM, "for CUDA 12.9; NVRTC 13.0 is of a newer major version"),
    ],
)
def test_driver_older_than_the_compilers_major_version_is_a_problem(
    version: int, state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeDriver()
    monkeypatch.setattr(driver, "bindings", lambda: fake)
    monkeypatch.setattr(driver, "call", lambda name: version)
    monkeypatch.setattr(machine, "load_nvrtc", lambda: SimpleNamespace(version=(13, 0)))
    found = machine._driver()
    assert found.state == state
    assert found.text.startswith(text)


def test_machine_without_a_driver_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Any:
        raise LaunchError("no CUDA driver can be used here")

    monkeypatch.setattr(driver, "bindings", none)
    assert examine()["driver"] == Finding("driver", ABSENT, "no CUDA driver can be used here", {"cuda": None})


def test_missing_compiler_is_a_problem_unless_a_bundle_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = cached_cubin(PLAIN_REQUEST)
    monkeypatch.setenv("CAKEGEN_NVRTC", str(tmp_path / "none.so"))
    assert examine()["nvrtc"].state == PROBLEM
    write_bundle(tmp_path / "bundle", "small", [(PLAIN_REQUEST, program, ["a"])])
    monkeypatch.setenv("CAKEGEN_BUNDLE", str(tmp_path / "bundle"))
    found = examine()
    assert found["nvrtc"].state == ABSENT
    assert found["bundle"].state == ABSENT
    assert found["bundle"].text.startswith(f"{tmp_path / 'bundle'}: 1 programs of small for sm_90a, compared with")


def test_compiler_that_does_not_know_a_target_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = load_nvrtc()
    monkeypatch.setattr(nvrtc, "supported", (75, 80))
    found = examine()["nvrtc"]
    assert found.state == PROBLEM
    assert re.search(r"does not know sm_\w+; it supports 75, 80", found.text)


def test_folder_that_is_no_bundle_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAKEGEN_BUNDLE", str(tmp_path))
    assert examine()["bundle"].state == PROBLEM


def copy_tree(registry: Registry, folder: Path) -> None:
    shutil.copytree(registry.root, folder / registry.export)
    shutil.copytree(registry.shared, folder / SHARED_FOLDER)


def test_tree_that_lacks_a_source_is_a_problem(tmp_path: Path) -> None:
    registry = load_registry(TINY)
    copy_tree(registry, tmp_path)
    lost = next((tmp_path / TINY).rglob("*_kernel.cu"))
    lost.unlink()
    found = examine(tmp_path / TINY)["tree"]
    assert found.state == PROBLEM
    assert lost.name in found.text


def test_tree_of_two_versions_is_a_problem(tmp_path: Path) -> None:
    registry = load_registry(TINY)
    copy_tree(registry, tmp_path)
    with (tmp_path / SHARED_FOLDER / "cake_device_wgmma.cuh").open("a") as file:
        file.write("// of another version\n")
    found = examine(tmp_path / TINY)["tree"]
    assert found.state == PROBLEM
    assert "cake_device_wgmma.cuh: not the file of this registry" in found.text


def test_damaged_cache_entry_is_a_problem_with_its_remedy(tmp_path: Path) -> None:
    cached_cubin(PLAIN_REQUEST)
    assert examine()["cache"].facts["entries"] == 1
    next((tmp_path / "cache").rglob("*.cubin")).write_bytes(b"")
    found = examine()["cache"]
    assert found.state == PROBLEM
    assert "1 damaged, which `cakegen cache verify --remove` removes" in found.text


def test_cache_below_a_folder_of_another_user_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as /root of a container whose service runs as nobody: nothing below can even be asked for."""

    def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setenv("CAKEGEN_CACHE_DIR", str(tmp_path / "theirs" / "cache"))
    for name in ("listdir", "lstat"):
        monkeypatch.setattr(os, name, refuse)
    found = machine._cache()
    assert found.state == PROBLEM
    assert "can't be read (Permission denied); set CAKEGEN_CACHE_DIR" in found.text


@pytest.mark.parametrize("folder", ["/proc/none/cache", "/dev/null/cache"])
def test_cache_that_can_not_be_written_is_a_problem(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", folder)
    found = examine()["cache"]
    assert found.state == PROBLEM
    assert found.facts["writable"] is False
    assert "so every process compiles what it lacks" in found.text


def test_doctor_makes_no_folder(tmp_path: Path) -> None:
    examine()
    assert not (tmp_path / "cache").exists()


def test_setting_that_is_none_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAKEGEN_CACH_DIR", "x")
    found = [finding for finding in examine_machine(TINY) if finding.topic == "setting"]
    assert {finding.facts["name"]: finding.state for finding in found} == {
        "CAKEGEN_CACH_DIR": PROBLEM,
        "CAKEGEN_CACHE_DIR": OK,
    }
    (wrong,) = (finding for finding in found if finding.state == PROBLEM)
    assert wrong.text == "CAKEGEN_CACH_DIR is no setting of cakegen; did you mean CAKEGEN_CACHE_DIR?"


def test_settings_are_those_that_the_sources_read() -> None:
    """Every `CAKEGEN_…` of the package and its tools is known to the doctor, but for macros of the compiler."""
    root = Path(machine.__file__).parents[2]
    files = [*root.glob("cakegen/**/*.py"), *root.glob("tools/**/*"), *root.glob("tests/**/*.py")]
    mentioned = {
        name for file in files if file.is_file() for name in re.findall(r'"(CAKEGEN_[A-Z_]+)"', file.read_text())
    }
    mentioned |= set(re.findall(r"\{(CAKEGEN_[A-Z_]+)", (root / "tools" / "setup.sh").read_text()))
    assert mentioned - {"CAKEGEN_", "CAKEGEN_CACH_DIR"} == set(SETTINGS)


@pytest.mark.parametrize(
    ("driver_version", "nvrtc_version", "named"),
    [
        ((13, 1), (13, 0), {"small-tensor-map": OK, "log-of-a-repeat": OK}),
        ((13, 4), (12, 8), {"spills-of-12.9": PROBLEM}),
        ((13, 4), (12, 9), {"log-of-a-repeat": OK, "spills-of-12.9": PROBLEM}),
    ],
)
def test_known_faults_that_apply_here_are_named(
    monkeypatch: pytest.MonkeyPatch,
    driver_version: tuple[int, int],
    nvrtc_version: tuple[int, int],
    named: dict[str, str],
) -> None:
    monkeypatch.setattr(machine.driver, "driver_version", lambda: driver_version)
    monkeypatch.setattr(machine, "load_nvrtc", lambda: types.SimpleNamespace(version=nvrtc_version))
    found = list(machine._known_faults(("sm_90a", "sm_100a")))
    assert {finding.facts["name"]: finding.state for finding in found} == named
    assert {finding.topic for finding in found} == {"known fault"}


def test_no_known_fault_is_said_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.driver, "driver_version", lambda: (99, 0))
    monkeypatch.setattr(machine, "load_nvrtc", lambda: types.SimpleNamespace(version=(12, 8)))
    (found,) = machine._known_faults(("sm_100a",))
    assert (found.state, found.text) == (OK, "none of 3 applies here")
