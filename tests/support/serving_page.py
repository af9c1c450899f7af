"""Runs the code blocks of docs/serving.md, in order and in one namespace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serving.md"


def run_page(device: str) -> dict[str, Any]:
    """Names that the page's code leaves; on a CPU without the blocks that are marked `gpu`."""
    blocks = re.findall(r"```python( gpu)?\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, Any] = {}
    for needs_gpu, code in blocks:
        if device == "cuda" or not needs_gpu:
            exec(code.replace('"cuda"', f'"{device}"'), names)
    return names
