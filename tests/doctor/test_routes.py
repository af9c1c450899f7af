"""Routes of devices that a fake driver shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.runtime.fakes import FakeDriver

from cakegen.arch import architecture
from cakegen.doctor import ABSENT, OK, PROBLEM, Finding, examine_devices
from cakegen.doctor.routes import examine_routes, why_refused
from cakegen.errors import LaunchError
from cakegen.model import DeviceFacts
from cakegen.registry import load_registry
from cakegen.runtime import driver
from cakegen.runtime.device import DeviceAttributes

TINY = "tiny_latent_moe"
ROUTES = ("front decode", "front prefill", "tail decode", "tail prefill")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    found = FakeDriver()
    monkeypatch.setattr(driver, "bindings", lambda: found)
    return found


def examine(export: str = TINY) -> dict[str, Finding]:
    return {finding.topic: finding for finding in examine_devices(export)}


def test_every_route_of_a_supported_device_is_there_for_every_degree(fake: FakeDriver) -> None:
    found = examine()
    assert found["cuda:0"].text == "Fake H200, compute capability 9.0, 132 SMs, sm_90a"
    degrees = load_registry(TINY).model.target("sm_90a").tp_degrees  # type: ignore[union-attr]
    for route in ROUTES:
        assert found[f"cuda:0 {route}"].state == OK
        assert found[f"cuda:0 {route}"].facts["tp"] == list(degrees)


def test_doctor_creates_no_context(fake: FakeDriver) -> None:
    examine()
    assert "cuDevicePrimaryCtxRetain" not in fake.calls
    assert "cuCtxSetCurrent" not in fake.calls


def test_device_too_small_for_a_route_is_told_why(fake: FakeDriver) -> None:
    fake.sm_count = 1
    found = examine()
    assert found["cuda:0 front decode"].state == OK
    refused = found["cuda:0 front prefill"]
    assert refused.state == ABSENT
    assert "T = 193: a prefill GEMM runs in pairs" in refused.text
    assert refused.facts["tp"] == []
    assert "1" in refused.facts["refused"]  # type: ignore[operator]


def test_export_without_programs_or_without_the_target_has_no_routes() -> None:
    registry = load_registry(TINY)
    found = DeviceAttributes(0, "Fake H200", (9, 0), 132, 232448)
    for changed, reason in (
        (replace(registry, kernels={}), "which tiny_latent_moe does not hold"),
        (replace(registry, model=replace(registry.model, targets=())), "the export declares no target sm_90a"),
    ):
        routes = list(examine_routes(changed, found, architecture("sm_90a")))
        assert [finding.state for finding in routes] == [ABSENT] * len(ROUTES)
        assert all(reason in finding.text for finding in routes)


def test_unsupported_device_has_no_routes(fake: FakeDriver) -> None:
    fake.capability = (8, 0)
    found = examine()
    assert list(found) == ["cuda:0"]
    assert found["cuda:0"].state == ABSENT
    assert "compute capability 8.0 is not supported; supported: 9.0 (sm_90a)" in found["cuda:0"].text


def test_each_device_is_looked_at(fake: FakeDriver) -> None:
    fake.device_count = 2
    assert {"cuda:0", "cuda:1"} <= set(examine())


def test_no_device_and_no_driver_are_absent(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.device_count = 0
    assert examine() == {
        "devices": Finding("devices", ABSENT, "none: the driver shows this process no device", {"count": 0})
    }

    def none() -> Any:
        raise LaunchError("no driver")

    monkeypatch.setattr(driver, "bindings", none)
    assert examine()["devices"].text == "none: no driver"


def test_device_that_fails_to_answer_is_a_problem(fake: FakeDriver) -> None:
    fake.failures["cuDeviceGetName"] = driver.bindings().CUresult.CUDA_ERROR_ECC_UNCORRECTABLE
    found = examine()["cuda:0"]
    assert found.state == PROBLEM
    assert "CUDA_ERROR_ECC_UNCORRECTABLE" in found.text


def test_missing_tree_is_a_problem_and_devices_are_looked_at_all_the_same(fake: FakeDriver) -> None:
    found = examine("nope")
    assert found["routes"].state == PROBLEM
    assert found["cuda:0"].state == OK


def test_program_that_is_missing_or_not_written_for_the_device_is_named(fake: FakeDriver) -> None:
    registry = load_registry(TINY)
    programs = {name: replace(program, arches=()) for name, program in registry.programs.items()}
    stripped = replace(registry, programs=programs)
    device = DeviceFacts.nominal("sm_90a", 132)
    assert why_refused(registry, device, "front", 1, (8,)) == ""
    assert "whose program is not written for sm_90a" in why_refused(stripped, device, "front", 1, (8,))
    assert "which tiny_latent_moe does not hold" in why_refused(replace(registry, kernels={}), device, "tail", 1, (8,))
    assert "TP 3" in why_refused(registry, device, "front", 3, (8,))
