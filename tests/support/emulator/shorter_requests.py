"""The outputs of a case's first tokens alone, for tests that compare their bits."""

from __future__ import annotations

import dataclasses

import torch

from cakegen.emulator import Options, emulate_plan
from cakegen.emulator.launches.cases import Case, make_operands
from cakegen.registry import Registry
from cakegen.runtime.validate import validate_front, validate_tail


def outputs_of(registry: Registry, case: Case, tokens: int) -> dict[str, torch.Tensor]:
    """What the first `tokens` of a case's tokens give in a request of their own."""
    operands = make_operands(registry.model, case)
    per_token = ("x", "logits", "latent", "shared_act", "routed", "out", "y_workspace")
    operands.update({name: operands[name][..., :tokens, :] for name in per_token if name in operands})
    if case.stage == "front":
        request, names = validate_front(registry.model, **operands), per_token[1:4]
    else:
        request = validate_tail(registry.model, **operands, tp=case.tp, rank=case.rank)
        names = per_token[5:]
    plan = dataclasses.replace(case, tokens=tokens).plan(registry.model)
    emulate_plan(registry, request, plan, Options("early", 0, "wide"))
    return {name: operands[name].clone() for name in names}
