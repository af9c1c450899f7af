"""Runs every situation of `tests/situations/` and counts: `python tests/support/try_situations.py [--write]`.

Prints a line for each that fails, and the figures by kind; `--write` puts them into `docs/what-goes-wrong.md`. A new
kind is a new file there, and a new situation a name and a function in its file; or a row of `TESTS`.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "what-goes-wrong.md"
BEGIN, END = "<!-- figures: python tests/support/try_situations.py --write -->\n", "<!-- end of figures -->\n"
Situation = Callable[[Path], None]


def kinds() -> dict[str, dict[str, Situation]]:
    """The situations of each file, by the file's name."""
    files = sorted((ROOT / "tests" / "situations").glob("[!_]*.py"))
    return {file.stem: importlib.import_module(f"situations.{file.stem}").situations() for file in files}


def attempt(situation: Situation) -> str:
    """What went wrong with a situation, in a line; empty where it was survived."""
    from cakegen.compile import cache

    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("CAKEGEN_CACHE_DIR", str(Path(name) / "cache"))
        patch.setattr(cache, "_memory", {})
        patch.setattr(cache, "_warned", set())
        try:
            situation(Path(name))
        except (Exception, pytest.fail.Exception) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


# What needs a device's stand-in, threads or forks is tried by tests; each of their cases is a situation.
TESTS = {
    "operands that move": ("runtime/test_rebind.py", "runtime/test_validate.py"),
    "malformed files": ("emulator/test_malformed.py", "fuzz/test_fuzz_mutations.py", "spec/test_export_files.py"),
    "giving back": ("runtime/test_release.py", "runtime/test_guard.py"),
    "legal layouts": ("emulator/test_layouts.py",),
    "faults of drivers": ("test_known_faults.py",),
}


class _Outcomes:
    """Counts a run's cases: each that ran, and each that passed."""

    def __init__(self) -> None:
        self.tried = self.survived = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a case has ended."""
        if report.when == "call" and not report.skipped:
            self.tried += 1
            self.survived += report.passed
        elif report.failed:
            self.tried += 1


def attempt_tests(files: Sequence[str]) -> tuple[int, int]:
    """(cases that ran, cases that passed) of some files of tests, without those that `make test` leaves out."""
    outcomes = _Outcomes()
    paths = [str(ROOT / "tests" / file) for file in files]
    pytest.main(
        ["-q", "--no-header", "-m", "not long and not gpu and not thorough", "-p", "no:cacheprovider", *paths],
        plugins=[outcomes],
    )
    return outcomes.tried, outcomes.survived


def figures(counts: dict[str, tuple[int, int]]) -> Iterator[str]:
    """The lines of the table: tried and survived, by kind and in all."""
    yield "| kind | tried | survived |\n| --- | --- | --- |\n"
    for kind, (tried, survived) in counts.items():
        yield f"| {kind.replace('_', ' ')} | {tried} | {survived} |\n"
    tried, survived = (sum(count[place] for count in counts.values()) for place in (0, 1))
    yield f"| all | {tried} | {survived} |\n"


def main() -> int:
    """Try, print, and write where asked to; 1 where one failed."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    counts = {}
    for kind, found in kinds().items():
        faults = {name: fault for name, situation in found.items() if (fault := attempt(situation))}
        counts[kind] = (len(found), len(found) - len(faults))
        for name, fault in faults.items():
            sys.stdout.write(f"FAILED {kind}: {name}: {fault}\n")
    for kind, files in TESTS.items():
        counts[kind] = attempt_tests(files)
    table = "".join(figures(counts))
    sys.stdout.write(table)
    if "--write" in sys.argv[1:]:
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return int(any(tried != survived for tried, survived in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
