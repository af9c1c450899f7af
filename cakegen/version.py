"""Leaf module: which release this is, and of which commit. Imports nothing of cakegen."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

VERSION = "0.1.0"
COMMIT_VARIABLE = "CAKEGEN_COMMIT"
COMMIT_FILE = "COMMIT"
"""Written by `tools/build_hook.py`: at the root of a source distribution, and among the files of a wheel."""
_PACKAGE = Path(__file__).resolve().parent
_SECONDS = 20


def full_version() -> str:
    """The release, and behind `+g` the commit where it is known (PEP 440's local version)."""
    commit = find_commit()
    if not commit:
        return VERSION
    name = f"{commit[:12]}.changed" if commit.endswith("+") else commit[:12]
    return f"{VERSION}+g{re.sub('[^0-9A-Za-z.]', '.', name)}"


def find_commit(root: Path = _PACKAGE.parent) -> str | None:
    """The commit that this copy was made from, with `+` where it was changed since.

    `CAKEGEN_COMMIT` goes first, then what git says of the checkout, then the file that a distribution carries.

    Parameters
    ----------
    root
        Folder that holds the package.
    """
    named = os.environ.get(COMMIT_VARIABLE)
    if named:
        return named
    if (root / ".git").exists():
        commit = _git(root, "rev-parse", "HEAD")
        return commit and commit + ("+" if _git(root, "status", "--porcelain") else "")
    for file in (root / _PACKAGE.name / "_data" / COMMIT_FILE, root / COMMIT_FILE):
        if file.is_file():
            return file.read_text(encoding="utf-8").strip() or None
    return None


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints of a checkout; None where it fails, or is not installed."""
    command = ("git", "-C", str(root), *arguments)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.strip()
