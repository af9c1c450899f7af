"""The serving page's code on a GPU, as it stands."""

from __future__ import annotations

import importlib.util
import shutil

import pytest
import torch
from support.serving_page import run_page


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or shutil.which("gcc") is None,
    reason="torch.compile on a GPU needs triton and a C compiler",
)
def test_serving_page_runs_on_a_device() -> None:
    pytest.importorskip("rich")
    torch.manual_seed(0)
    names = run_page("cuda")
    assert bool(names["out"].isfinite().all())
    expected = names["layer"].front(names["x"])
    assert all(torch.equal(names[name], value) for name, value in zip(("logits", "latent"), expected, strict=False))
