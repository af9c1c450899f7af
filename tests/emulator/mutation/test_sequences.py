"""Mutation of kernels of launch files: right is what the unmutated kernel writes, whatever the schedule."""

from __future__ import annotations

from pathlib import Path

import pytest

from cakegen.cli.emulate_files import FileRequest
from cakegen.cli.mutate_files import sequence_targets
from cakegen.emulator.mutation.sequences import SequenceTarget, SequenceTrial
from cakegen.errors import EmulationError

pytestmark = pytest.mark.emulator

LAUNCH = """{"version": 1, "buffers": {
    "x": {"role": "read", "element": "f32", "shape": [64], "fill": "normal"},
    "out": {"role": "write", "element": "u32", "shape": [64]},
    "counter": {"role": "update", "element": "u32", "shape": [1], "fill": 0}},
  "launches": [{"entry": "k", "grid": [1], "block": [64], "arguments": [
    {"kind": "buffer", "name": "x"}, {"kind": "buffer", "name": "out"}, {"kind": "buffer", "name": "counter"}]}]}"""
HEAD = 'extern "C" __global__ void k(const float* x, unsigned* out, unsigned* counter) {'


def target(folder: Path, body: str) -> SequenceTarget:
    cuda, launch = folder / "k.cu", folder / "k.json"
    cuda.write_text(f"{HEAD}\n{body}\n}}\n")
    launch.write_text(LAUNCH)
    (found,) = sequence_targets([FileRequest(None, cuda, launch, None, None, "sm_90a", (), ())])
    return found


def test_wrong_bits_kill_a_mutant(tmp_path: Path) -> None:
    """Values of a normal distribution differ, so that a neighbour's is wrong."""
    body = """__shared__ float staged[64];
    staged[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = __float_as_uint(staged[63 - threadIdx.x]);
    atomicAdd(counter, 1);"""
    trial = SequenceTrial(target(tmp_path, body), seeds=0)
    verdicts = {
        (each.operator, trial.target.kernel_line(each)): trial.run(each) for each in trial.reached(trial.target.mutants)
    }
    assert verdicts["drop-wait", "__syncthreads();"].outcome == "unwritten-read"
    assert verdicts["count", "atomicAdd(counter, 1);"].outcome == "wrong values"
    assert "counter has not the bits" in verdicts["count", "atomicAdd(counter, 1);"].message
    assert all(verdict.killed for (name, _), verdict in verdicts.items() if name == "drop-store")


def test_kernel_whose_bits_depend_on_the_schedule_is_refused(tmp_path: Path) -> None:
    found = target(tmp_path, "out[threadIdx.x] = threadIdx.x % 32 ? 0 : atomicAdd(counter, 1);")
    with pytest.raises(EmulationError, match="k: the program itself is wrong: out has not the bits"):
        SequenceTrial(found, seeds=0)


def test_targets_are_equal_by_what_decides_their_runs(tmp_path: Path) -> None:
    first = target(tmp_path, "out[threadIdx.x] = 1;")
    assert first == target(tmp_path, "out[threadIdx.x] = 1;")
    assert hash(first) == hash(target(tmp_path, "out[threadIdx.x] = 1;"))
    assert first != target(tmp_path, "out[threadIdx.x] = 2;")
