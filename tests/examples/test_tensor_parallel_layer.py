"""The tensor-parallel example, as torchrun starts it: two processes, gloo, torch in the place of the programs."""

from __future__ import annotations

import re

import pytest
from torchrun import run_example


@pytest.mark.slow
def test_layer_on_two_ranks_equals_the_layer_on_one() -> None:
    options = ("--device", "cpu", "--export", "tiny_latent_moe", "--tokens", "5")
    status, text = run_example("tensor_parallel_layer.py", 2, *options)
    found = re.search(r"TP 2, T = 5, cpu: equals TP 1; largest difference ([0-9.]+)", text)
    assert status == 0, text
    assert found, text
    # not one computation twice: the ranks' parts were rounded apart
    assert float(found[1]) > 0
