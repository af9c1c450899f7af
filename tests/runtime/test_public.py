"""The public functions, and importing them where optional packages and the driver are absent."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from support.runtime.operands import front_operands, tail_operands

import cakegen.runtime as runtime
from cakegen.registry import Registry
from cakegen.runtime import LatentMoe

ROOT = Path(__file__).resolve().parents[2]

BLOCKED = """
    import sys

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            blocked = {"jinja2", "pydantic", "click", "rich", "cakegen.spec", "cakegen.emit", "cakegen.emulator"}
            if name in blocked:
                raise ImportError(f"{name} is blocked")

    sys.meta_path.insert(0, Blocker())
    import torch
    from support.models import tiny_model
    from support.runtime.operands import front_operands

    import cakegen.runtime
    from cakegen.errors import LaunchError
    from cakegen.registry import Registry
    from cakegen.runtime import LatentMoe
    from pathlib import Path

    from cakegen.runtime import driver

    assert driver.bindings.cache_info().misses == 0, "the import asked for the driver"
    assert not {"cakegen.runtime.operators", "cakegen.runtime.projections"} & set(sys.modules)
    moe = LatentMoe(Registry(Path("."), "tiny", tiny_model(), {}, {}, {}))
    operands = front_operands(moe.model, 2, 3)
    moe.front(**operands, backend="reference")
    assert operands["logits"].isfinite().all()
    assert not moe.program_available("cpu", "front", 2, 3)
    print("served")
"""


def test_import_and_reference_need_neither_optional_packages_nor_a_driver() -> None:
    path = [str(ROOT), str(ROOT / "tests")]
    script = f"import sys; sys.path[:0] = {path!r}\n" + textwrap.dedent(BLOCKED)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=900, check=False)
    assert result.stdout.strip() == "served", result.stderr


SIGNATURES = {
    "kimi_k3_latent_moe_front": (
        "x gate_weight down_weight shared_gate_up_weight logits latent shared_act",
        {"backend": "auto", "workspace": None, "overlap": False, "arch": None},
    ),
    "kimi_k3_latent_moe_tail": (
        "routed norm_weight up_weight shared_act shared_down_weight out",
        {"tp": inspect.Parameter.empty, "rank": inspect.Parameter.empty, "y_workspace": inspect.Parameter.empty}
        | {"backend": "auto", "workspace": None, "overlap": False, "arch": None},
    ),
}


@pytest.mark.parametrize("name", [*SIGNATURES, *(f"prepare_{name}" for name in SIGNATURES)])
def test_public_signature_is_the_contracts(name: str) -> None:
    positional, keyword = SIGNATURES[name.removeprefix("prepare_")]
    parameters = inspect.signature(getattr(runtime, name)).parameters.values()
    assert [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD] == positional.split()
    assert {p.name: p.default for p in parameters if p.kind == p.KEYWORD_ONLY} == keyword


def test_public_functions_run_the_published_export(monkeypatch: pytest.MonkeyPatch, kimi_registry: Registry) -> None:
    moe = LatentMoe(kimi_registry)
    monkeypatch.setattr(runtime, "kimi_k3_latent_moe", lambda: moe)
    front = front_operands(moe.model, 16, 1)
    logits, latent, shared_act = runtime.kimi_k3_latent_moe_front(*front.values(), backend="reference")
    assert (logits.shape, latent.shape, shared_act.shape) == ((1, 896), (1, 3584), (1, 384))
    assert logits.dtype == torch.float32
    tail = tail_operands(moe.model, 16, 1)
    y_workspace = tail.pop("y_workspace")
    options = {"tp": 16, "rank": 15, "y_workspace": y_workspace, "backend": "reference"}
    y, out = runtime.kimi_k3_latent_moe_tail(*tail.values(), **options)
    assert y is y_workspace
    assert out.shape == (1, 7168)
    assert not runtime.generated_program_available("cpu", "front", 8, 1)


def test_threads_that_meet_at_the_first_use_share_one_latent_moe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread a GPU is how servers start; two objects would load every program twice, and share no operators."""
    start, found = threading.Barrier(8), []
    monkeypatch.setattr(runtime, "_shared", {})

    def ask() -> None:
        start.wait(10)
        found.append(runtime.shared_latent_moe("tiny_latent_moe"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
