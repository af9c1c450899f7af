"""What a committed account of a GPU run may hold."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from support.gpu.summary import _without, without_folders


def test_reason_names_files_without_the_machine_s_folders() -> None:
    here, packages = Path(__file__).resolve(), Path(torch.__file__).resolve().parents[1]
    text = f"{here}:7: E {packages}/torch/x.py {tempfile.gettempdir()}/x/y.cu"
    assert without_folders(text) == f"tests/{here.name}:7: E torch/x.py x/y.cu"


def test_an_environment_inside_the_checkout_leaves_no_folders() -> None:
    checkout, packages = Path("/a/checkout"), Path("/a/checkout/.venv/lib/python3.12/site-packages")
    text = f"{checkout}/tests/t.py {packages}/torch/x.py"
    assert _without(text, (checkout, packages)) == "tests/t.py torch/x.py"
