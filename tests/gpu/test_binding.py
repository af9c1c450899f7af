"""The C++ bindings on the device: built by the toolkit's compiler, called through TVM-FFI, with the runtime's bits."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.emit.binding_build import build_binding, find_nvcc, include_flags
from support.gpu.cases import Case, Checks, FrontCase, TailCase, make_weights
from support.gpu.prefill import cut_tokens

from cakegen.model import DeviceFacts
from cakegen.plan import partials_elems
from cakegen.registry import Program, Registry
from cakegen.runtime import LatentMoe
from cakegen.runtime.runner import BoundLaunch, ProgramRunner

Record = Callable[[str, object], None]
WAIT_LIMIT_NS = 2_000_000_000
COUNTERS = 1024


def operands_of(case: Case, tokens: int) -> dict[str, torch.Tensor]:
    """The tensors of a call by the names that `arg_plan` uses."""
    outputs = dict(zip(case.names, (output.view(tokens) for output in case.outputs), strict=True))
    if isinstance(case, FrontCase):
        names = ("gate_weight", "down_weight", "shared_gate_up_weight")
        return {"x": case.x[:tokens], **dict(zip(names, case.weights, strict=True)), **outputs}
    return {
        "routed": case.routed[:, :tokens],
        "norm_weight": case.norm,
        "up_weight": case.up,
        "shared_act": case.shared_act[:tokens],
        "shared_down_weight": case.shared_down,
        "y_workspace": outputs["y"],
        "out": outputs["out"],
    }


def arguments_of(launch: BoundLaunch, tensors: dict[str, torch.Tensor], column_limit: int) -> list[torch.Tensor | int]:
    """A launch's arguments in the binding's order; a `columns` view ends with this rank's slice."""
    program: Program = launch.loaded.program
    maps = {entry.name: entry for entry in program.tensor_maps}
    values: dict[str, Mapping[str, Any]] = {"buffer": tensors}
    values["parameter"] = {
        argument.name: argument.value for argument in launch.block.arguments if argument.kind == "parameter"
    }
    values["grid"] = dict(zip(("grid_x", "grid_y", "grid_z"), launch.launch.grid_ctas, strict=True))
    arguments: list[torch.Tensor | int] = []
    for kind, name in program.arg_plan:
        if kind == "tma_buffer":
            tensor = tensors[maps[name].operand]
            arguments.append(tensor[:, :column_limit] if maps[name].view == "columns" else tensor)
        else:
            arguments.append(values[kind][name])
    return arguments


def run_bindings(runner: ProgramRunner, case: Case, tokens: int, modules: dict[str, Any]) -> torch.Tensor:
    """The launches of a runner, each through its binding, on torch's current stream; returns the counters."""
    elems = max(1024, *(partials_elems(launch.launch) for launch in runner.launches))
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=case.device)
    wait_record = torch.zeros(16, dtype=torch.int64, device=case.device)
    wait_record[0] = WAIT_LIMIT_NS
    tensors = operands_of(case, tokens) | {
        "partials": torch.full((elems,), float("nan"), device=case.device),
        "counters": counters,
        "wait_record": wait_record,
    }
    rank = case.rank if isinstance(case, TailCase) else 0
    limit = (rank + 1) * case.moe.model.dims.latent_slice(case.tp)
    for launch in runner.launches:
        modules[launch.launch.key][launch.loaded.program.ffi_entry](*arguments_of(launch, tensors, limit))
    return counters


@pytest.mark.parametrize("model", ["tiny", "kimi"])
def test_bindings_give_the_runtimes_bits(
    trees: dict[str, Registry], device: torch.device, model: str, tmp_path: Path, record_property: Record
) -> None:
    """Decode and prefill of both stages; a ragged slice; a tail of two launches; cut and whole tiles."""
    find_nvcc()
    include_flags()
    tvm_ffi = pytest.importorskip("tvm_ffi")
    moe = LatentMoe(trees[model])
    # degrees at which either model cuts tiles
    cut = {stage: cut_tokens(moe, stage, tp) for stage, tp in (("front", 4), ("tail", 1))}
    weights = make_weights(moe.model, device, 4, tokens=max(300, *cut.values()))
    calls: list[tuple[Case, int]] = [
        *((FrontCase(moe, weights, 8), tokens) for tokens in (5, 128, 190, 300)),
        (FrontCase(moe, weights, 4), cut["front"]),
        *((TailCase(moe, weights, 8, 3, 2), tokens) for tokens in (5, 128, 190, 300)),
        (TailCase(moe, weights, 1, 0, 1), cut["tail"]),
        *((TailCase(moe, weights, 16, 15, 1), tokens) for tokens in (20, 300)),
    ]
    if model == "tiny":
        apart = LatentMoe(trees[model], device_facts=DeviceFacts.nominal("sm_90a", 3))
        calls.append((TailCase(apart, weights, 4, 1, 1), 64))
    runners = [case.prepare(tokens) for case, tokens in calls]
    keys = sorted({launch.key for runner in runners for launch in runner.plan.launches})  # type: ignore[union-attr]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        libraries = list(pool.map(lambda key: build_binding(trees[model], key, tmp_path), keys))
    modules = {key: tvm_ffi.load_module(str(library)) for key, library in zip(keys, libraries, strict=True)}
    checks = Checks()
    for (case, tokens), runner in zip(calls, runners, strict=True):
        assert isinstance(runner, ProgramRunner)
        label = f"{runner.plan.stage} tp {case.tp} T {tokens}" if runner.plan else ""
        case.poison()
        expected = [value.clone() for value in runner()]
        case.poison()
        counters = run_bindings(runner, case, tokens, modules)
        for name, value, other in zip(case.names, runner.outputs, expected, strict=True):
            checks.equal(f"{label} {name}", value, other)
        case.check_guards(checks, runner, tokens, label)
        checks.zero(f"{label} counters", counters.count_nonzero())
    record_property("bindings", len(keys))
    record_property("cases", checks.settle())
