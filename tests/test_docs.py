"""The serving page's code runs as it stands, with torch in the place of a GPU; blocks marked `gpu` need one."""

from __future__ import annotations

import shutil

import pytest
import torch
from support.serving_page import run_page


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_serving_page_runs_on_a_cpu() -> None:
    torch.manual_seed(0)
    names = run_page("cpu")
    assert names["out"].shape == (16, 7168)
    assert bool(names["out"].isfinite().all())
    # the overload with outputs of the caller wrote them
    assert bool(names["logits"].isfinite().all())
