"""What a committed account of a GPU run may hold."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from gpu_summary import without_folders


def test_reason_names_files_without_the_machine_s_folders() -> None:
    here = Path(__file__).resolve()
    text = f"{here}:7: E {Path(torch.__file__).resolve()} {tempfile.gettempdir()}/x/y.cu"
    torch_file = Path(torch.__file__).resolve().relative_to(Path(torch.__file__).resolve().parents[1])
    assert without_folders(text) == f"tests/{here.name}:7: E {torch_file} x/y.cu"
