"""A repository whose first commit holds a small tree."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.review.trees import commit_all, git, small_programs, write_small_tree


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`repository/generated`, committed."""
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", str(tmp_path / "cache"))
    repository = tmp_path / "repository"
    folder = repository / "generated"
    folder.mkdir(parents=True)
    git(repository, "init", "-q", "-b", "main")
    write_small_tree(folder, small_programs())
    commit_all(repository, "first")
    return folder
