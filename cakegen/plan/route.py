"""From a request to its plan: checks the request, picks the stage's planner, and remembers the answer.

Imports errors, arch, the model and the rest of `plan`; no torch, no pydantic, no I/O.
"""

from __future__ import annotations

import functools

from cakegen.arch import architecture
from cakegen.errors import PlanError
from cakegen.model import DeviceFacts, Model
from cakegen.plan.decode import (
    overlap_rule,
    pair_rule,
    plan_decode_front,
    token_parts_rule,
    weights_ahead,
)
from cakegen.plan.decode_tail import plan_decode_tail
from cakegen.plan.families import family_of
from cakegen.plan.family import Family
from cakegen.plan.gemm import Launches
from cakegen.plan.norm import norm_launch, sum_launches, sum_rule
from cakegen.plan.records import DecodeForm, Launch, Plan, Rule
from cakegen.plan.shape import DecodeShape, decode_shape
from cakegen.plan.spelling import spell_decode_key
from cakegen.rules import DecodeRules

STAGES = ("front", "tail")


def plan_route(model: Model, *, stage: str, tp: int, tokens: int, partials: int, device: DeviceFacts) -> Plan:
    """The launches that serve one request, with the rule behind each decision.

    Parameters
    ----------
    model
        Dimensions and thresholds.
    stage
        `front` or `tail`.
    tp
        Tensor-parallel degree, one of the export's for the device's architecture.
    tokens
        T, from 1 to the model's maximum.
    partials
        P, un-reduced partials of the routed experts; the front has none and ignores it.
    device
        Facts of the device.

    Raises
    ------
    PlanError
        The export does not serve the request, or its launch does not fit the device.
    """
    return _plan(model, stage, tp, tokens, 1 if stage == "front" else partials, device)


# Bounded, so that a sweep over every token count does not stay in memory; a model serves far fewer shapes.
@functools.lru_cache(maxsize=1024)
def _plan(model: Model, stage: str, tp: int, tokens: int, partials: int, device: DeviceFacts) -> Plan:
    _refuse_unserved(model, stage, tp, tokens, partials, device)
    family = family_of(device.arch)
    try:
        shape = _decode_shape(model, family, stage, tp, tokens, partials, device)
        if shape is not None:
            launches, rules = _plan_decode(model, family, shape, device)
        else:
            launches, rules = family.plan_prefill(model, stage, tp, tokens, partials, device)
    except ZeroDivisionError as error:
        raise PlanError(
            f"{model.name} {stage}: T = {tokens}: a tile or a threshold of the model is too small ({error}). No export"
            " declares that, so the registry is damaged; export again."
        ) from None
    return Plan(stage, tp, tokens, partials, device, launches, rules)


def _refuse_unserved(model: Model, stage: str, tp: int, tokens: int, partials: int, device: DeviceFacts) -> None:
    if stage not in STAGES:
        raise PlanError(f"stage {stage!r} is unknown; stages: {', '.join(STAGES)}")
    target = model.target(architecture(device.arch).name)
    if target is None:
        served = ", ".join(t.arch for t in model.targets)
        raise PlanError(f"{model.name} is not exported for {device.arch}; it is for {served}")
    if tp not in target.tp_degrees:
        degrees = ", ".join(str(degree) for degree in target.tp_degrees)
        raise PlanError(f"{model.name} {stage}: TP {tp} is not exported for {device.arch}; it is for TP {degrees}")
    if not 1 <= tokens <= model.max_tokens:
        raise PlanError(
            f"{model.name} {stage}: T = {tokens} is outside 1 … {model.max_tokens}. Split the tokens into several"
            " calls, or raise requests.max_tokens in the export."
        )
    if not 1 <= partials <= model.max_partials:
        raise PlanError(
            f"{model.name} {stage}: P = {partials} is outside 1 … {model.max_partials}. Add partials up before the"
            " call, or raise requests.max_partials in the export."
        )
    if device.sm_count < 1 or device.max_dynamic_smem_bytes < 1:
        raise PlanError(
            f"{device.arch}: device facts of {device.sm_count} SMs and {device.max_dynamic_smem_bytes} bytes of shared"
            " memory a CTA; a launch needs at least 1 of each. Read them from the driver, or use DeviceFacts.nominal."
        )


def _decode_shape(
    model: Model, family: Family, stage: str, tp: int, tokens: int, partials: int, device: DeviceFacts
) -> DecodeShape | None:
    """The shape that decode serves; None where no CTA can multiply the tokens of its tile, or of its part of one."""
    rules = family.decode(model)
    if tokens > rules.max_tokens:
        return None
    shape = decode_shape(model.dims, rules, stage=stage, tp=tp, tokens=tokens, partials=partials)
    if tokens <= rules.max_cta_tokens:
        return shape
    parts = 2 if token_parts_rule(shape, pair_rule(shape, device), rules, device).value == 2 else 1
    return shape if shape.n_pad <= parts * rules.max_cta_tokens else None


def _plan_decode(model: Model, family: Family, shape: DecodeShape, device: DeviceFacts) -> Launches:
    rules = family.decode(model)
    if shape.stage == "front":
        form, why = plan_decode_front(shape, model.dims, rules, device, family.min_stages)
        return (decode_launch(form, model.name, rules, device),), why
    tail = plan_decode_tail(shape, rules, device, family.min_stages)
    launch = decode_launch(tail.form, model.name, rules, device)
    rows_per_cta = family.rules(model).norm_rows_per_cta
    if not shape.normed:
        before = sum_launches(rows_per_cta, shape.tokens, shape.partials, device)
        return (*before, launch), (*tail.rules, sum_rule(shape.partials))
    if not tail.separate_norm:
        return (launch,), tail.rules
    norm = norm_launch(rows_per_cta, shape.tokens, False, device)
    rule = Rule("norm.early_trigger", False, "the launch that follows is an ordinary one and waits for the norm's end")
    return (norm, launch), (*tail.rules, rule)


def decode_launch(form: DecodeForm, export: str, rules: DecodeRules, device: DeviceFacts) -> Launch:
    """A decode form as a launch; its other run-time arguments follow from the operands alone."""
    key = spell_decode_key(form, export, architecture(device.arch).key_suffix)
    ordinary, overlapping = ((("weights_ahead", weights_ahead(form, rules, overlap)),) for overlap in (False, True))
    may_overlap = bool(overlap_rule(form, rules, device).value)
    return Launch(key, (form.grid_ctas, 1, 1), ordinary, form, overlapping if may_overlap else None)
