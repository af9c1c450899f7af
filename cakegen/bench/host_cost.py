"""What calls cost the host: a prepared runner, a graph launch, a warm prepare, a program from the cache.

Imports runtime, torch and this package. The device runs behind; these are times of the calling thread.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cakegen
from cakegen.bench.arms import prepare_ours
from cakegen.bench.measure import Bench
from cakegen.bench.operands import make_operands
from cakegen.bench.rows import STAGES, Row
from cakegen.bench.stats import summarise
from cakegen.bench.timing import Call
from cakegen.errors import CakeError
from cakegen.model import Model
from cakegen.runtime import LatentMoe

HOST_TP = 8
"""Measured at this degree, or the largest below it that the export has."""
HOST_TOKENS = (1, 64)
_BATCHES = 25
_BATCH_CALLS = 50
"""Fewer launches than the driver queues, so that none waits for the device."""
_PREPARES = 25
_SUBPROCESS_SECONDS = 300

_FIRST_RESULT = """
import sys, time, torch
torch.zeros(1, device="cuda").item()
start = time.perf_counter()
from cakegen.registry import load_registry
from cakegen.runtime import LatentMoe
moe, tp = LatentMoe(load_registry(sys.argv[1])), int(sys.argv[2])
dims = moe.model.dims
def made(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda")
weights = made(dims.experts, dims.hidden), made(dims.latent, dims.hidden), made(2 * dims.i_local(tp), dims.hidden)
outputs = made(1, dims.experts, dtype=torch.float32), made(1, dims.latent), made(1, dims.i_local(tp))
moe.front(made(1, dims.hidden), *weights, *outputs)
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def measure_host(bench: Bench) -> Iterator[dict[str, Any]]:
    """A record for each stage and T of `HOST_TOKENS` at one TP degree, then one of a new process."""
    tp = host_tp(bench.moe.model)
    for stage in STAGES:
        for tokens in HOST_TOKENS:
            try:
                yield _measure_call(bench, Row(stage, tp, tokens))
            except CakeError as error:
                yield {"stage": stage, "tp": tp, "tokens": tokens, "problem": str(error)}
    yield _measure_first_result(bench, tp)


def host_tp(model: Model) -> int:
    """`HOST_TP`, or the degree of the export that is nearest to it from below, else the smallest."""
    degrees = model.tp_degrees
    return max((tp for tp in degrees if tp <= HOST_TP), default=degrees[0])


def _measure_call(bench: Bench, row: Row) -> dict[str, Any]:
    case = make_operands(bench.moe.model.dims, row, bench.device, bench.settings.seed).case
    runner, _ = prepare_ours(bench.moe, case, bench.settings.backend)
    graph = bench.clock.capture(runner)
    called, launched = (summarise(_batches(bench, call)) for call in (runner, graph))
    prepared = summarise([_prepare_us(bench.moe, bench, case) for _ in range(_PREPARES)])
    loaded_us = _prepare_us(LatentMoe(bench.moe.registry), bench, case)
    launches = len(runner.plan.launches) if runner.plan is not None else 0
    return {
        "stage": row.stage,
        "tp": row.tp,
        "tokens": row.tokens,
        "launches": launches,
        "call_us": called.median_us,
        "call_min_us": called.min_us,
        "graph_us": launched.median_us,
        "graph_min_us": launched.min_us,
        "prepare_us": prepared.median_us,
        # the programs come from the cache on disk into a runtime that has loaded none
        "load_us_per_program": (loaded_us - prepared.median_us) / max(1, launches),
    }


def _batches(bench: Bench, call: Call) -> list[float]:
    """Microseconds of a call, as the mean of each batch."""
    samples = []
    for _ in range(_BATCHES):
        bench.clock.settle()
        start = time.perf_counter()
        for _ in range(_BATCH_CALLS):
            call()
        samples.append((time.perf_counter() - start) * 1e6 / _BATCH_CALLS)
    bench.clock.settle()
    return samples


def _prepare_us(moe: LatentMoe, bench: Bench, case: Any) -> float:
    """A prepare with its outputs' allocations, which the allocator has at hand."""
    start = time.perf_counter()
    prepare_ours(moe, case, bench.settings.backend)
    return (time.perf_counter() - start) * 1e6


def _measure_first_result(bench: Bench, tp: int) -> dict[str, Any]:
    """Seconds from the import of cakegen to a first result, in a new process that has torch and a context."""
    root = str(Path(cakegen.__file__).resolve().parents[1])
    path = os.pathsep.join((root, os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)
    command = (sys.executable, "-c", _FIRST_RESULT, str(bench.moe.registry.root), str(tp))
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_SUBPROCESS_SECONDS,
            check=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        return {"first_result_s": float(done.stdout)}
    except subprocess.CalledProcessError as error:
        # its last line is the error's own message; what stands above is our script
        return {"problem": f"first result: {error.stderr.strip().rpartition(chr(10))[2][-300:]}"}
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return {"problem": f"first result: {error}"}
