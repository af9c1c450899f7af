"""A pytest plugin that leaves what a GPU run was and what it found, as JSON and as a table.

Written after every test, so that a run that is killed leaves what it had.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch


class Summary:
    """Collects the outcome, the seconds and the counted cases of each test."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_suffix("")
        self._start = time.time()
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note one phase of a test; a failure in any phase is the test's outcome."""
        entry = self._tests.setdefault(report.nodeid, {"outcome": "passed", "cases": 0, "seconds": 0.0})
        if report.outcome != "passed":
            entry["outcome"] = report.outcome
            reason = str(report.longrepr)[-2000:] if report.failed else _skip_reason(report)
            entry["reason"] = without_folders(reason)
        if report.when == "teardown":
            properties = dict(report.user_properties)
            entry["cases"] = properties.get("cases", 1)
            entry["seconds"] = properties.get("seconds", 0.0)
            entry["notes"] = {key: value for key, value in properties.items() if key not in ("cases", "seconds")}
            self._write()

    def pytest_sessionfinish(self) -> None:
        """Write the last state."""
        self._write()

    def _write(self) -> None:
        record = {"run": _provenance(), "wall_seconds": round(time.time() - self._start, 1), "tests": self._tests}
        record["counts"] = self._counts()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.with_suffix(".json").write_text(
            json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )
        self._path.with_suffix(".md").write_text(self._table(record), encoding="utf-8")

    def _counts(self) -> dict[str, int]:
        outcomes = [entry["outcome"] for entry in self._tests.values()]
        counts = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
        counts["cases"] = sum(entry["cases"] for entry in self._tests.values() if entry["outcome"] == "passed")
        return counts

    def _table(self, record: dict[str, Any]) -> str:
        lines = ["# GPU run", "", *(f"- {key}: {value}" for key, value in record["run"].items())]
        lines += [f"- wall: {record['wall_seconds']} s", f"- counts: {record['counts']}", ""]
        lines += ["| test | outcome | cases | seconds | notes |", "| --- | --- | --- | --- | --- |"]
        for name, entry in self._tests.items():
            notes = entry.get("reason", "") if entry["outcome"] != "passed" else entry.get("notes") or ""
            note = str(notes).replace("\n", " ").replace("|", "/")[:160]
            lines.append(f"| {name} | {entry['outcome']} | {entry['cases']} | {entry['seconds']} | {note} |")
        return "\n".join(lines) + "\n"


def without_folders(text: str) -> str:
    """A text without where this machine keeps the checkout, Python, its packages and temporary files."""
    return _without(text, _folders())


def _folders() -> tuple[Path, ...]:
    checkout, packages = Path(__file__).resolve().parents[3], Path(torch.__file__).resolve().parents[1]
    return checkout, packages, Path(sys.prefix), Path(tempfile.gettempdir())


def _without(text: str, folders: Iterable[Path]) -> str:
    """The innermost folder goes first: an environment often lies inside the checkout."""
    for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
        text = text.replace(f"{folder}{os.sep}", "")
    return text


def _skip_reason(report: pytest.TestReport) -> str:
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)


def _provenance() -> dict[str, str]:
    facts = {
        "commit": os.environ.get("CAKEGEN_COMMIT", "not given"),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["device"] = f"{torch.cuda.device_count()} x {properties.name}, {properties.multi_processor_count} SMs"
        facts["driver and compiler"] = _versions()
    return facts


def _versions() -> str:
    from cakegen.errors import LaunchError
    from cakegen.runtime import driver

    kernel_module = Path("/proc/driver/nvidia/version")
    text = kernel_module.read_text().split("\n")[0] if kernel_module.is_file() else ""
    try:
        return f"{driver.versions()}; {text}".strip("; ")
    except LaunchError as error:
        return str(error)
