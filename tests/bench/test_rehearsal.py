"""Libraries are opened after a product in another process: absent, broken, wrong and fatal ones are told apart."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cakegen.bench import rehearsal
from cakegen.bench.rehearsal import open_libraries, rehearse, version_of
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
    opened = open_libraries(("deepgemm", "flashinfer", "quack", "triton"), CPU, search=False)
    assert [library.name for library in opened.libraries] == ["deepgemm"]
    assert opened.found["deepgemm"] == "of no distribution"
    assert "has relative error 0.0" in opened.found["flashinfer"]
    assert opened.found["quack"].endswith("(status -6)")
    assert opened.found["triton"].startswith("does not run: ")


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


def test_library_that_fails_to_open_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_rehearse", lambda names, device: {})
    opened = open_libraries(("deepgemm",), CPU, search=False)
    assert opened.libraries == ()
    assert opened.found == {"deepgemm": "does not run: ModuleNotFoundError: No module named 'deep_gemm'"}


def test_unknown_library_is_refused() -> None:
    with pytest.raises(BenchError, match="library 'mkl' is not known; known: cublaslt, deepgemm, quack"):
        open_libraries(("mkl",), CPU, search=False)


def test_version_names_the_distribution() -> None:
    assert version_of("torch").startswith("torch 2.")
    assert version_of("no_such_module.inner") == "of no distribution"
