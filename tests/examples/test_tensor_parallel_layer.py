"""The tensor-parallel example, as torchrun starts it: a process a rank, gloo, and the emulated programs."""

from __future__ import annotations

import re

import pytest
from support.examples.torchrun import run_example

long = pytest.mark.long


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("tp", [2, pytest.param(8, marks=long), pytest.param(16, marks=long)])
def test_layer_on_its_ranks_equals_the_layer_on_one(tp: int) -> None:
    options = ("--device", "cpu", "--export", "tiny_latent_moe", "--tokens", "3", "--emulate")
    status, text = run_example("tensor_parallel_layer.py", tp, *options)
    found = re.search(rf"TP {tp}, T = 3, cpu, emulated: equals TP 1; largest difference ([0-9.]+)", text)
    assert status == 0, text
    assert found, text
    # not one computation twice: the ranks' parts were rounded apart
    assert float(found[1]) > 0


def test_rank_that_the_model_does_not_divide_into_is_refused() -> None:
    options = ("--device", "cpu", "--export", "tiny_latent_moe")
    status, text = run_example("tensor_parallel_layer.py", 3, *options)
    assert status != 0
    assert "tp must divide the latent width 512 and the shared-expert width 1024" in text
