"""Loaded programs: the way from a committed tree through the real compiler to the driver's load call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.runtime.fakes import Machine

from cakegen import compile as compilation
from cakegen.errors import LaunchError, RegistryError
from cakegen.registry import Registry, load_registry
from cakegen.runtime import programs
from cakegen.runtime.device import open_device
from cakegen.runtime.programs import ProgramTable


def hopper_key(registry: Registry) -> str:
    """A key whose program serves the fake devices."""
    return min(key for key in registry.kernels if "sm_90a" in registry.program(key).arches)


@pytest.mark.parametrize("flags", [(), ("-DCAKEGEN_CHAOS",)])
def test_table_loads_what_the_compiler_wrote(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    monkeypatch.setattr(programs, "compilation", compilation)
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", str(tmp_path))
    loaded: list[Any] = []
    original = programs.driver.load_kernel
    monkeypatch.setattr(programs.driver, "load_kernel", lambda *a: loaded.append(a) or original(*a))
    registry = load_registry("tiny_latent_moe")
    key = hopper_key(registry)
    found = ProgramTable(registry, flags).load(open_device(0), key)
    ((cubin, symbol, smem),) = loaded
    assert cubin[:4] == b"\x7fELF"
    assert symbol == found.kernel.symbol == f"kernel_{registry.kernels[key]}"
    assert smem == registry.program(key).launch.dynamic_smem_bytes


def test_unknown_key_is_a_registry_error(machine: Machine, tiny_registry: Registry) -> None:
    with pytest.raises(RegistryError, match="no program for key 'decode:nothing'"):
        ProgramTable(tiny_registry).load(open_device(0), "decode:nothing")


def test_program_of_another_architecture_is_refused(machine: Machine, tiny_registry: Registry) -> None:
    machine.driver.capability = (10, 0)
    key = hopper_key(tiny_registry)
    with pytest.raises(LaunchError, match=r"serves sm_90a; cuda:0 is sm_100a"):
        ProgramTable(tiny_registry).load(open_device(0), key)


def test_loaded_program_is_found_and_not_loaded_again(machine: Machine, tiny_registry: Registry) -> None:
    table, device, key = ProgramTable(tiny_registry), open_device(0), hopper_key(tiny_registry)
    assert table.find(device, key) is None
    first = table.load(device, key)
    assert table.load(device, key) is first is table.find(device, key)
    assert machine.driver.calls.count("cuLibraryLoadData") == 1


def test_every_device_has_its_own_kernel(machine: Machine, tiny_registry: Registry) -> None:
    table, key = ProgramTable(tiny_registry), hopper_key(tiny_registry)
    table.load(open_device(0), key)
    table.load(open_device(1), key)
    assert machine.driver.calls.count("cuLibraryLoadData") == 2
