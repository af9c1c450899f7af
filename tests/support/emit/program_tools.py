"""The scripts of `tools/`, for tests: they are no package."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from support.page_blocks import ROOT


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    sys.modules[name] = tool
    spec.loader.exec_module(tool)
    return tool
