"""Every compile test has its own empty cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from cakegen.compile import cache


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, not yet made, and a process that remembers nothing."""
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(cache, "_warned", set())
    folder = tmp_path / "cache"
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", str(folder))
    return folder
