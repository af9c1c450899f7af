"""Fixtures of the runtime's tests: a machine of fakes, and registries made from plans."""

from __future__ import annotations

import collections
import gc
import weakref
from collections.abc import Iterator

import pytest
from support.models import kimi_k3_model, tiny_model
from support.runtime.fakes import FakeCompiler, FakeDriver, Machine, registry_of, torch_without_cuda

from cakegen.registry import Registry
from cakegen.runtime import control, device, driver, programs, streams, workspace


@pytest.fixture(scope="module", autouse=True)
def older_objects_set_aside() -> Iterator[None]:
    """A collection looks at what these tests made, and not at the plans and programs of all tests before them."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with fake H200s; nothing of it outlives the test."""
    fake = Machine(FakeDriver(), FakeCompiler())
    monkeypatch.setattr(driver, "bindings", lambda: fake.driver)
    monkeypatch.setattr(driver, "tensor_map_encoder", lambda: lambda *arguments: 0)
    monkeypatch.setattr(driver, "bind_launch", fake.driver.bind_launch)
    monkeypatch.setattr(driver, "context_is_current", lambda context: fake.driver.context == context)
    monkeypatch.setattr(driver, "is_capturing", lambda ordinal=None: fake.capturing)
    monkeypatch.setattr(driver, "stream_reader", lambda: lambda ordinal: fake.stream)
    monkeypatch.setattr(driver, "stream_is_foreign", lambda ordinal: fake.stream in fake.foreign)
    monkeypatch.setattr(streams, "_known", weakref.WeakValueDictionary())
    monkeypatch.setattr(programs, "compilation", fake.compiler)
    monkeypatch.setattr(programs, "_kernels", collections.deque())
    monkeypatch.setattr(device, "_opened", {})
    monkeypatch.setattr(control, "_controls", {})
    for name in ("_shared", "_recent", "_foreign", "_captured", "_freed"):
        monkeypatch.setattr(workspace, name, type(getattr(workspace, name))())
    monkeypatch.setattr(workspace, "torch", torch_without_cuda())
    return fake


@pytest.fixture(scope="session")
def tiny_registry() -> Registry:
    """The tiny model's registry."""
    return registry_of(tiny_model())


@pytest.fixture(scope="session")
def kimi_registry() -> Registry:
    """The product's registry."""
    return registry_of(kimi_k3_model())
