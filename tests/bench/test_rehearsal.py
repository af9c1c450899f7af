"""Libraries are opened after a product in another process: absent, broken, wrong and fatal ones are told apart."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cakegen.bench import rehearsal
from cakegen.bench.libraries import JOINED, LIBRARIES, Library
from cakegen.bench.rehearsal import open_libraries, rehearse, versions_of
from cakegen.errors import BenchError

CPU = torch.device("cpu")
RIGHT = "def bf16_gemm_nt(a, b, d, c=None):\n    d.copy_(a.float() @ b.float().T)\n"
WRONG = "def mm_bf16(a, b, out, backend):\n    out.copy_(a.float() @ b.float() * 1.05)\n"
FATAL = "import os\nos.abort()\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules, which this process and its children see."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for module in ("deep_gemm", "flashinfer"):
        sys.modules.pop(module, None)


@pytest.mark.slow
def test_only_a_library_whose_product_is_right_is_opened(folder: Path) -> None:
    for module, text in (("deep_gemm", RIGHT), ("flashinfer", WRONG), ("quack", FATAL)):
        (folder / f"{module}.py").write_text(text)
    opened = open_libraries(("deepgemm", "flashinfer", "quack"), CPU, search=False)
    assert [library.name for library in opened.libraries] == ["deepgemm"]
    assert opened.found["deepgemm"] == "of no distribution"
    assert "has relative error 0.0" in opened.found["flashinfer"]
    assert opened.found["quack"].endswith("(status -6)")


def test_product_that_is_wrong_is_refused_with_its_error(folder: Path) -> None:
    (folder / "flashinfer.py").write_text(WRONG)
    with pytest.raises(
        BenchError, match=r"flashinfer: a product of 16 tokens by a weight \[512, 512\] has relative err"
    ):
        rehearse("flashinfer", "cpu")


def test_library_that_never_answers_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_SECONDS", 0.05)
    child = subprocess.Popen((sys.executable, "-c", "import time; time.sleep(60)"), stderr=subprocess.PIPE, text=True)
    assert rehearsal._outcome(child) == "no result in 0.05 s"
    assert child.returncode is not None


def test_library_that_fails_to_open_here_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "deep_gemm.py").write_text('raise OSError("undefined symbol: _ZN3c10")')
    monkeypatch.setattr(rehearsal, "_rehearse", lambda names, device: dict.fromkeys(names))
    opened = open_libraries(("deepgemm",), CPU, search=False)
    assert opened.libraries == ()
    assert opened.found == {"deepgemm": "does not run: OSError: undefined symbol: _ZN3c10"}


class Searching(Library):
    """Needs a search, and is part of torch."""

    name, module, only_searches, chains = "searching", "torch", True, JOINED


class Absent(Library):
    """Builds on what is not there either."""

    name, module, builds_on, chains = "absent", "no_such_module.inner", ("no-such-distribution",), JOINED


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "LIBRARIES", {"searching": Searching, "absent": Absent})
    monkeypatch.setattr(rehearsal, "_rehearse", lambda names, device: dict.fromkeys(names))


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("search", [False, True])
def test_absent_library_is_not_tried_and_one_that_only_searches_waits_for_a_search(search: bool) -> None:
    opened = open_libraries(("absent", "searching"), CPU, search=search)
    assert opened.found["absent"] == "does not run: module no_such_module is not installed"
    if search:
        assert [library.name for library in opened.libraries] == ["searching"]
        assert opened.found["searching"].startswith("torch 2.")
    else:
        assert opened.libraries == ()
        assert opened.found["searching"] == "does not run: its GEMMs are found by a search; ask for one with --search"


def test_unknown_library_is_refused() -> None:
    with pytest.raises(BenchError, match="library 'mkl' is not known; known: cublaslt, deepgemm, quack"):
        open_libraries(("mkl",), CPU, search=False)


def test_versions_name_what_a_library_comes_from_and_builds_on() -> None:
    assert versions_of(LIBRARIES["cublaslt"]).startswith("torch 2.")
    assert versions_of(Absent) == "no-such-distribution of no known version"
