"""From a request to its plan: checks the request, picks the stage's planner, and remembers the answer.

Imports errors, arch, the model and the rest of `plan`; no torch, no pydantic, no I/O.
"""

from __future__ import annotations

import functools

from cakegen.arch import architecture
from cakegen.errors import PlanError
from cakegen.model import DeviceFacts, Model
from cakegen.plan.decode import overlap_rule, pair_rule, plan_decode_front, token_parts_rule, weights_ahead
from cakegen.plan.decode_tail import plan_decode_tail
from cakegen.plan.norm import norm_launch
from cakegen.plan.prefill import plan_prefill
from cakegen.plan.prefill_sm90 import plan_prefill_sm90
from cakegen.plan.records import DecodeForm, Launch, Plan, Rule
from cakegen.plan.shape import decode_shape

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
    model = model.for_family(architecture(device.arch).family)
    try:
        planner = _plan_decode if _is_decode(model, stage, tp, tokens, partials, device) else _plan_prefill
        launches, rules = planner(model, stage, tp, tokens, partials, device)
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


def _is_decode(model: Model, stage: str, tp: int, tokens: int, partials: int, device: DeviceFacts) -> bool:
    """Whether decode serves a request: a CTA can multiply the tokens of its tile, or of its part of one."""
    if tokens > model.decode.max_tokens:
        return False
    if tokens <= model.decode.max_cta_tokens:
        return True
    shape = decode_shape(model, stage, tp, tokens, partials)
    parts = 2 if token_parts_rule(shape, pair_rule(shape, device), model, device).value == 2 else 1
    return shape.n_pad <= parts * model.decode.max_cta_tokens


def _plan_decode(
    model: Model, stage: str, tp: int, tokens: int, partials: int, device: DeviceFacts
) -> tuple[tuple[Launch, ...], tuple[Rule, ...]]:
    shape = decode_shape(model, stage, tp, tokens, partials)
    if stage == "front":
        form, rules = plan_decode_front(shape, model, device)
        return (decode_launch(form, model, device),), rules
    tail = plan_decode_tail(shape, model, device)
    launch = decode_launch(tail.form, model, device)
    if not tail.separate_norm:
        return (launch,), tail.rules
    norm = norm_launch(model, tokens, False, device)
    rule = Rule("norm.early_trigger", False, "the launch that follows is an ordinary one and waits for the norm's end")
    return (norm, launch), (*tail.rules, rule)


def decode_launch(form: DecodeForm, model: Model, device: DeviceFacts) -> Launch:
    """A decode form as an ordinary launch; its other run-time arguments follow from the operands alone."""
    parameters = (("weights_ahead", weights_ahead(form, model, False)),)
    key = f"decode:{form.symbol}{architecture(device.arch).key_suffix}"
    return Launch(key, (form.grid_ctas, 1, 1), parameters, form, bool(overlap_rule(form, model, device).value))


def _plan_prefill(
    model: Model, stage: str, tp: int, tokens: int, partials: int, device: DeviceFacts
) -> tuple[tuple[Launch, ...], tuple[Rule, ...]]:
    """Prefill by architecture family: their tiles and tensor memory differ. On SM100 partials change no launch."""
    if architecture(device.arch).family == "sm90":
        return plan_prefill_sm90(model, stage, tp, tokens, partials, device)
    return plan_prefill(model, stage, tp, tokens, device)
