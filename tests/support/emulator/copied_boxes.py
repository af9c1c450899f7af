"""The boxes that emulated tensor copies read, for tests of what lies in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from cakegen.emulator.units.tma.tensor_view import TensorView


@dataclasses.dataclass(frozen=True)
class Box:
    """Rows that a copy reads, of a tensor of `extent` rows."""

    name: str
    first: int
    end: int
    extent: int


def record_boxes(monkeypatch: pytest.MonkeyPatch, names: Collection[str]) -> list[Box]:
    """The boxes that runs copy from now on of the tensors of these names."""
    boxes: list[Box] = []
    fetch = TensorView.fetch

    def record(view: TensorView, corner: Sequence[int]) -> Any:
        about = view.record
        if about.name in names:
            boxes.append(Box(about.name, corner[1], corner[1] + about.box[1], about.dims[1]))
        return fetch(view, corner)

    monkeypatch.setattr(TensorView, "fetch", record)
    return boxes
