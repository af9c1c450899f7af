"""`cakegen demo`: it says what ran and what did not, and a wrong result is an error."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from click.testing import CliRunner
from support.models import kimi_k3_model

from cakegen.cli import compile as compile_cli
from cakegen.cli import demo, export
from cakegen.cli.compile import Job, select_jobs
from cakegen.cli.main import main
from cakegen.registry import Registry, load_registry
from cakegen.runtime.reference import reference_outputs

DIMS = kimi_k3_model().dims
TP = 16


@pytest.fixture(scope="module")
def operands() -> demo.Tensors:
    return demo.make_operands(TP, 2, "cpu")


@pytest.fixture(scope="module")
def outputs(operands: demo.Tensors) -> demo.Tensors:
    """What the reference gives, rounded as the contract says."""
    found: demo.Tensors = {}
    for name, stage in DIMS.stages.items():
        results = reference_outputs(name, DIMS, operands | found, tp=TP, rank=0)
        found |= {spec.name: results[spec.short] for spec in stage.outputs}
    return found


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, where the demo launches")
def test_demo_without_a_gpu_compiles_and_says_what_it_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for every program of the export; two of them are compiled here, and those that are emulated."""
    asked: list[tuple[object, ...]] = []

    def two_of(registry: Registry, *filters: Sequence[str]) -> list[Job]:
        asked.append((registry.export, *filters))
        return select_jobs(registry, *filters)[:2]

    checked: list[dict[str, object]] = []
    monkeypatch.setattr(compile_cli, "select_jobs", two_of)
    # what the check finds is tested with `cakegen export --check`
    monkeypatch.setattr(export.export_command, "callback", lambda **options: checked.append(options))
    result = CliRunner().invoke(main, ["demo", "--tokens", "1"])
    assert result.exit_code == 0, result.output
    assert [(options["check"], options["name"]) for options in checked] == [(True, None)], "every tree, once"
    assert asked == [(demo.EXPORT,)]
    assert "2 of 2 programs" in result.stdout
    assert "on CPU, backend 'emulator', TP 8, rank 0:" in result.stdout
    assert result.stdout.count(" warp-instructions in ") == 2
    assert "largest error against fp64: logits " in result.stdout
    assert "NOT RUN on a GPU: nothing was launched, since torch" in result.stdout


def test_why_nothing_launches_tells_a_missing_gpu_from_an_unsupported_one(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = load_registry(demo.EXPORT)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in str(demo.why_nothing_launches(registry))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no CUDA device" in str(demo.why_nothing_launches(registry))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert "Some GPU: compute capability 8.9 is not supported" in str(demo.why_nothing_launches(registry))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert demo.why_nothing_launches(registry) is None


def test_right_results_are_accepted(operands: demo.Tensors, outputs: demo.Tensors) -> None:
    errors, problems = demo.compare_with_fp64(operands, outputs, DIMS, TP)
    assert problems == []
    assert errors.startswith("logits ")
    assert "y bit for bit, out " in errors


@pytest.mark.parametrize(
    ("field", "shift"), [("logits", 1e-2), ("latent", 0.5), ("shared_act", 0.5), ("out", 0.5), ("y_workspace", 0.5)]
)
def test_one_wrong_value_is_a_problem(operands: demo.Tensors, outputs: demo.Tensors, field: str, shift: float) -> None:
    wrong = outputs[field].clone()
    wrong[1, 7] += shift
    _, problems = demo.compare_with_fp64(operands, outputs | {field: wrong}, DIMS, TP)
    # the tail's reference reads the shared activations that the front wrote, so a wrong one shows in `out` as well
    assert problems[0].startswith("y differs" if field == "y_workspace" else f"{field} is outside")


def test_nan_is_a_problem(operands: demo.Tensors, outputs: demo.Tensors) -> None:
    out = outputs["out"].clone()
    out[0, 0] = float("nan")
    _, problems = demo.compare_with_fp64(operands, outputs | {"out": out}, DIMS, TP)
    assert problems == ["out is outside atol = rtol = 0.01"]
