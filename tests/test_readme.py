"""The README's example runs as it stands, with torch in the place of a GPU."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch

from cakegen import runtime

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.mark.slow
def test_readme_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python gpu\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    for name in ("prepare_kimi_k3_latent_moe_front", "prepare_kimi_k3_latent_moe_tail"):
        monkeypatch.setattr(runtime, name, functools.partial(getattr(runtime, name), backend="reference"))
    names: dict[str, torch.Tensor] = {}
    exec(example.replace('"cuda"', '"cpu"'), names)
    assert names["out"].shape == (16, 7168)
    assert names["logits"].shape == (16, 896)
    assert bool(names["out"].isfinite().all())
