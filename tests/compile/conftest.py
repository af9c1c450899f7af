"""Every compile test has its own empty cache."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, not yet made."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", str(folder))
    return folder
