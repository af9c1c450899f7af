"""A bundle is held against all programs of its export, not only read."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from cakegen.compile import CompileRequest, cached_cubin, request_for
from cakegen.compile.bundle import write_bundle
from cakegen.doctor import ABSENT, OK, PROBLEM, Finding
from cakegen.doctor.bundles import examine_bundles
from cakegen.registry import Registry, load_registry

TINY = "tiny_latent_moe"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    """The small export with the keys of two programs of sm_90a alone."""
    registry = load_registry(TINY)
    keys = {key: name for key, name in registry.kernels.items() if key.startswith("tail_norm:") and "@sm_90a" in key}
    assert len(keys) == 2
    return dataclasses.replace(registry, kernels=keys)


def examined(registry: Registry, folder: Path, requests: Sequence[CompileRequest]) -> Finding:
    write_bundle(folder, TINY, [(request, cached_cubin(request), ["a"]) for request in requests])
    (found,) = examine_bundles(registry)
    return found


def test_bundle_is_ok_where_it_holds_every_program(
    small: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAKEGEN_BUNDLE", str(tmp_path))
    requests = [request_for(small, key, "sm_90a") for key in small.kernels]
    found = examined(small, tmp_path, requests)
    assert (found.state, found.text) == (OK, f"{tmp_path}: 2 of 2 programs of {TINY} for sm_90a")
    shutil.rmtree(tmp_path)
    found = examined(small, tmp_path, requests[:1])
    assert found.state == ABSENT
    assert f"1 of 2 programs of {TINY} for sm_90a; what needs another is refused" in found.text
    assert f"`cakegen bundle --export {TINY} --out {tmp_path}`" in found.text
    shutil.rmtree(tmp_path)
    other = dataclasses.replace(requests[1], source=requests[1].source + "// another\n")
    found = examined(small, tmp_path, [requests[0], other])
    assert found.state == PROBLEM
    assert "1 of 2 programs" in found.text
    assert "1 are of other sources than those here" in found.text
    assert found.facts["held"] == 1
