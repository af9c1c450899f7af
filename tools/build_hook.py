"""What a distribution carries beside the files that pyproject.toml names: its commit, and in a wheel the pages."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WHEEL_FOLDER = "cakegen/_data"


class DistributionHook(BuildHookInterface):
    """Hatchling calls it before each build; an editable install stays a checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files by their place in the distribution."""
        if version == "editable":
            return
        root = Path(self.root)
        sys.path.insert(0, self.root)
        from cakegen.version import COMMIT_FILE, find_commit

        commit = find_commit(root)
        folder = f"{WHEEL_FOLDER}/" if self.target_name == "wheel" else ""
        included: dict[str, str] = build_data["force_include"]
        if commit:
            self._written = tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=COMMIT_FILE)  # noqa: SIM115
            self._written.write(commit + "\n")
            self._written.flush()
            included[self._written.name] = f"{folder}{COMMIT_FILE}"
        if folder:
            for page in sorted((root / "docs").rglob("*.md")):
                included[str(page)] = f"{folder}{page.relative_to(root).as_posix()}"
