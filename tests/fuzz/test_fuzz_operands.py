"""Operands of any kind: a refusal that names one, or the right values in the right places and nowhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz.strategies import fuzzed, odd_values
from support.models import tiny_model
from support.runtime.fakes import registry_of

from cakegen.errors import CakeError, LaunchError
from cakegen.runtime import LatentMoe
from cakegen.runtime.reference import reference_front, reference_tail

MODEL = tiny_model()
DIMS = MODEL.dims
GUARD = 7.0
FRONT = ("x", "gate_weight", "down_weight", "shared_gate_up_weight", "logits", "latent", "shared_act")
TAIL = ("routed", "norm_weight", "up_weight", "shared_act", "shared_down_weight", "out", "y_workspace")
OUTPUTS = {"front": ("logits", "latent", "shared_act"), "tail": ("y_workspace", "out")}


@pytest.fixture(scope="module")
def block() -> LatentMoe:
    return LatentMoe(registry_of(MODEL))


def operands(stage: str, tokens: int, tp: int, partials: int) -> dict[str, torch.Tensor]:
    """Whole operands; the values are small integers over eight, so that no sum is rounded."""
    i_local = DIMS.i_local(tp)
    shapes = {
        "x": (tokens, DIMS.hidden),
        "gate_weight": (DIMS.experts, DIMS.hidden),
        "down_weight": (DIMS.latent, DIMS.hidden),
        "shared_gate_up_weight": (2 * i_local, DIMS.hidden),
        "logits": (tokens, DIMS.experts),
        "latent": (tokens, DIMS.latent),
        "shared_act": (tokens, i_local),
        "routed": (partials, tokens, DIMS.latent),
        "norm_weight": (DIMS.latent,),
        "up_weight": (DIMS.hidden, DIMS.latent),
        "shared_down_weight": (DIMS.hidden, i_local),
        "out": (tokens, DIMS.hidden),
        "y_workspace": (tokens, DIMS.latent),
    }
    generator = torch.Generator().manual_seed(tokens)
    found = {}
    for name in FRONT if stage == "front" else TAIL:
        values = torch.randint(-8, 9, shapes[name], generator=generator).float() / 8
        found[name] = values if name == "logits" else values.bfloat16()
    return found


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "same": lambda t: t,
    "padded rows": lambda t: _padded(t, 8),
    "rows off by two bytes": lambda t: _padded(t, 1),
    "transposed": lambda t: t.transpose(-1, -2) if t.dim() > 1 else t[::2],
    "transposed twice": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() > 1 else t,
    "flat": lambda t: t.reshape(-1),
    "one dimension more": lambda t: t[None],
    "fewer rows": lambda t: t[:-1],
    "fewer columns": lambda t: t[..., :-8],
    "columns reversed": lambda t: t.flip(-1)[..., ::1],
    "expanded": lambda t: t[:1].expand(t.shape),
    "no rows": lambda t: t[:0],
    "scalar": lambda t: torch.tensor(1.0, dtype=t.dtype),
    "fp32": lambda t: t.float(),
    "fp16": lambda t: t.half(),
    "int64": lambda t: t.long(),
    "complex": lambda t: t.to(torch.complex64),
    "bool": lambda t: t.bool(),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr() if t.dim() == 2 else t.to_sparse(),
    "negated view": lambda t: torch._neg_view(t),
    "needs a gradient": lambda t: t.clone().requires_grad_(t.is_floating_point()),
    "unaligned": lambda t: torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape),
    "parameter": lambda t: torch.nn.Parameter(t.clone(), requires_grad=False),
    "list": lambda t: t.float().reshape(-1)[:2].tolist(),
    "numpy": lambda t: t.float().numpy(),
    "none": lambda t: None,
}


def _padded(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """The tensor as a part of one with wider rows, whose other columns hold the guard."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + columns), GUARD, dtype=tensor.dtype)
    part = wide[..., : tensor.shape[-1]]
    part.copy_(tensor)
    return part


def prepare(block: LatentMoe, stage: str, given: dict[str, Any], tp: Any, rank: Any, **options: Any) -> Any:
    if stage == "front":
        return block.prepare_front(*(given[name] for name in FRONT), **options)
    outputs = {"y_workspace": given["y_workspace"]}
    return block.prepare_tail(*(given[name] for name in TAIL[:-1]), tp=tp, rank=rank, **outputs, **options)


def expected(stage: str, given: dict[str, Any], tp: int, rank: int) -> dict[str, torch.Tensor]:
    names = FRONT[:4] if stage == "front" else TAIL[:5]
    inputs = [given[name].detach().clone() for name in names]
    values = reference_front(DIMS, *inputs) if stage == "front" else reference_tail(DIMS, *inputs, tp=tp, rank=rank)
    return dict(zip(OUTPUTS[stage], values, strict=True))


@pytest.mark.parametrize("stage", ["front", "tail"])
@fuzzed
@given(
    changed=st.dictionaries(st.sampled_from(sorted({*FRONT, *TAIL})), st.sampled_from(sorted(CHANGES)), max_size=2),
    tokens=st.integers(1, 3),
    tp=st.sampled_from((1, 2, 4)),
    partials=st.integers(1, 2),
)
def test_changed_operands_are_refused_or_give_the_right_values(
    block: LatentMoe, stage: str, changed: dict[str, str], tokens: int, tp: int, partials: int
) -> None:
    given = operands(stage, tokens, tp, partials)
    for name, change in changed.items():
        if name in given:
            given[name] = CHANGES[change](given[name])
    rank = tp - 1
    try:
        runner = prepare(block, stage, given, tp, rank, backend="reference")
    except LaunchError as error:
        message = str(error)
    else:
        wanted = expected(stage, given, tp, rank)
        runner()
        for name, values in wanted.items():
            assert torch.equal(given[name], values), name
            _guards_are_whole(given[name])
        return
    assert message.startswith(f"{stage}: ")


def _guards_are_whole(output: torch.Tensor) -> None:
    """Between the rows of a padded output nothing was written."""
    base = output._base
    if base is not None and base.dim() == output.dim() and base.shape[-1] > output.shape[-1]:
        assert bool((base[..., output.shape[-1] :] == GUARD).all())


@fuzzed
@given(tp=odd_values, rank=odd_values, backend=odd_values, workspace=odd_values)
def test_odd_options_are_refused(block: LatentMoe, tp: Any, rank: Any, backend: Any, workspace: Any) -> None:
    """The reference takes whole numbers only, and None for a workspace; nothing of this is a CUDA call."""
    given = operands("tail", 2, 2, 1)
    for options in ({"backend": backend}, {"backend": "reference", "workspace": workspace}):
        with contextlib.suppress(CakeError):
            prepare(block, "tail", given, tp, rank, **options)()
    for numbers in ((tp, 0), (2, rank)):
        with contextlib.suppress(CakeError):
            runner = prepare(block, "tail", given, *numbers, backend="reference")
            assert all(type(number) is int for number in numbers)
            wanted = expected("tail", given, *numbers)
            runner()
            assert torch.equal(given["out"], wanted["out"])


@fuzzed
@given(device=odd_values, stage=odd_values, tp=odd_values, tokens=odd_values, partials=odd_values)
def test_availability_of_anything_is_yes_or_no(
    block: LatentMoe, device: Any, stage: Any, tp: Any, tokens: Any, partials: Any
) -> None:
    for arguments in ((device, "front", 8, 16, 1), ("cuda", stage, tp, tokens, partials), ("cpu", stage, 1, 1, 1)):
        assert block.program_available(*arguments) in (True, False)


@pytest.mark.parametrize("name", ["x", "gate_weight", "logits", "shared_act"])
@pytest.mark.parametrize("change", ["list", "numpy", "none", "sparse", "csr", "negated view", "needs a gradient"])
def test_operand_that_is_no_plain_tensor_is_named(block: LatentMoe, name: str, change: str) -> None:
    given = operands("front", 2, 2, 1)
    given[name] = CHANGES[change](given[name])
    if change == "needs a gradient" and name in ("x", "gate_weight"):
        prepare(block, "front", given, 2, 0, backend="reference")()  # read only: as for torch's own functions
        return
    with pytest.raises(LaunchError, match=rf"^front: {name} must be "):
        prepare(block, "front", given, 2, 0, backend="reference")
