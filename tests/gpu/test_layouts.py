"""Every legal layout of the operands on the device: the bits of plain copies, and nothing beside the outputs."""

from __future__ import annotations

import pytest
import torch
from support.emulator.layouts import LAYOUTS, LayoutCheck, laid_out
from support.runtime.operands import front_operands, tail_operands

from cakegen.runtime import LatentMoe

TP, RANK = 8, 3


@pytest.fixture(scope="module")
def checks(warm: dict[str, LatentMoe]) -> dict[str, LayoutCheck]:
    """By model; results on plain copies are remembered."""
    return {name: LayoutCheck(moe) for name, moe in warm.items()}


# one token, several, and a prefill whose last row tile is ragged
@pytest.mark.parametrize(("tokens", "partials"), [(1, 3), (5, 2), (300, 2)])
@pytest.mark.parametrize(("stage", "layout"), LAYOUTS)
@pytest.mark.parametrize("name", ["tiny", "kimi"])
def test_layout_gives_the_device_the_same_bits(
    checks: dict[str, LayoutCheck],
    warm: dict[str, LatentMoe],
    device: torch.device,
    name: str,
    stage: str,
    layout: str,
    tokens: int,
    partials: int,
) -> None:
    model = warm[name].model
    if stage == "front":
        made, options = front_operands(model, TP, tokens), {}
    else:
        made, options = tail_operands(model, TP, tokens, partials), {"tp": TP, "rank": RANK}
    there = {each: value.to(device) for each, value in made.items()}
    checks[name].check(stage, laid_out(stage, layout, there), **options)
