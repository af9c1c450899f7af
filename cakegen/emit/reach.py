"""Which programs an export reaches: every plan of the model on every declared part. Imports plan and model; no I/O.

Plans depend on the token count, the TP degree, whether there is one partial or more, and the device; so walking all of
them gives exactly the programs that a runtime can ask for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cakegen.emit.decode import decode_program, norm_program
from cakegen.emit.decode_line import decode_line
from cakegen.emit.gemm_sm90 import gemm_program_sm90
from cakegen.emit.gemm_sm100 import gemm_program_sm100
from cakegen.emit.program import ProgramSpec
from cakegen.errors import EmitError
from cakegen.model import DeviceFacts, Model
from cakegen.plan import family_of, plan_route
from cakegen.plan.records import DecodeForm, Form, GemmForm, NormForm, Plan
from cakegen.plan.route import STAGES

# one an architecture family: their tiles and pipelines differ
_GEMM_PROGRAMS = {"sm90": gemm_program_sm90, "sm100": gemm_program_sm100}


@dataclass(frozen=True)
class ReachedKey:
    """One logical key: the program that serves it, its compile-line constants, and the targets that reach it."""

    key: str
    program: ProgramSpec
    constants: tuple[tuple[str, int], ...]
    arches: tuple[str, ...]


@dataclass(frozen=True)
class Witness:
    """A key, the targets that reach it, and one request whose plan launches it.

    Parameters
    ----------
    tile
        Which of the family's prefill tiles the model must prefer for it; None: its own costs decide.
    """

    key: str
    arches: tuple[str, ...]
    arch: str
    sm_count: int
    stage: str
    tp: int
    tokens: int
    partials: int
    tile: int | None


# Remembered, since one process may write, check and compare a tree; a walk takes seconds.
@functools.lru_cache(maxsize=8)
def reached_keys(model: Model) -> tuple[ReachedKey, ...]:
    """Every key that a plan of this model can name; sorted by key.

    Raises
    ------
    EmitError
        Two different forms share a key.
    PlanError
        A plan does not fit.
    """
    return tuple(reached_key(model, witness) for witness in walk(model).values())


@functools.lru_cache(maxsize=8)
def walk(model: Model) -> dict[str, Witness]:
    """A witness of each key, by rising key; raises as `reached_keys`."""
    forms: dict[str, Form] = {}
    first: dict[str, Witness] = {}
    arches: dict[str, set[str]] = {}
    for tile, plan in _numbered_plans(model):
        for launch in plan.launches:
            key, device = launch.key, plan.device
            known = forms.setdefault(key, launch.form)
            if known != launch.form:
                raise EmitError(f"{model.name}: key {key} stands for two forms: {known} and {launch.form}")
            arches.setdefault(key, set()).add(device.arch)
            if key not in first:
                request = (device.arch, device.sm_count, plan.stage, plan.tp, plan.tokens, plan.partials)
                first[key] = Witness(key, (), *request, tile)
    return {key: replace(first[key], arches=tuple(sorted(arches[key]))) for key in sorted(first)}


def reached_key(model: Model, witness: Witness) -> ReachedKey:
    """The key of a witness with its program.

    Raises
    ------
    ValueError
        Its request does not launch that key.
    PlanError
        Its request has no plan.
    """
    device = DeviceFacts.nominal(witness.arch, witness.sm_count)
    family = family_of(device.arch)
    tiled = model if witness.tile is None else model.preferring(family.tiles(model)[witness.tile])
    request: dict[str, Any] = {
        "stage": witness.stage,
        "tp": witness.tp,
        "tokens": witness.tokens,
        "partials": witness.partials,
    }
    launches = plan_route(tiled, device=device, **request).launches
    form = next((launch.form for launch in launches if launch.key == witness.key), None)
    if form is None:
        raise ValueError(f"{witness.key}: {request} on {device} launches {[launch.key for launch in launches]}")
    constants = line_of(model, form)
    return ReachedKey(witness.key, program_for(model, form, family.name), constants, tuple(witness.arches))


def line_of(model: Model, form: DecodeForm | NormForm | GemmForm) -> tuple[tuple[str, int], ...]:
    """A form's constants on the compile line."""
    if isinstance(form, DecodeForm):
        return tuple(decode_line(model, form).items())
    return form.constants if isinstance(form, GemmForm) else ()


def program_for(model: Model, form: Form, arch_family: str) -> ProgramSpec:
    """The specification of the program that runs one form."""
    if isinstance(form, DecodeForm):
        return decode_program(model, form, arch_family)
    if isinstance(form, NormForm):
        return norm_program(model, form, arch_family)
    return _GEMM_PROGRAMS[arch_family](model, form, arch_family)


def reached_plans(model: Model) -> Iterator[Plan]:
    """Every plan: all targets, their TP degrees and SM counts, all token counts.

    Raises
    ------
    PlanError
        A plan does not fit.
    """
    return (plan for _, plan in _numbered_plans(model))


def requested_keys(
    model: Model,
    *,
    stage: str | None = None,
    tp: int | None = None,
    tokens: range | None = None,
    arches: Sequence[str] = (),
) -> set[str]:
    """Keys that some requests launch on the declared parts; what is left out (arches: empty) is any.

    Raises
    ------
    PlanError
        A plan does not fit, such as that of more tokens than the model declares.
    """
    plans = reached_plans(model) if tokens is None else _plans_of(model, tokens, tp, arches)
    return {
        launch.key
        for plan in plans
        if stage in (None, plan.stage) and tp in (None, plan.tp) and (not arches or plan.device.arch in arches)
        for launch in plan.launches
    }


def _plans_of(model: Model, tokens: range, tp: int | None, arches: Sequence[str]) -> Iterator[Plan]:
    for target in model.targets:
        degrees = [degree for degree in target.tp_degrees if tp in (None, degree)]
        if arches and target.arch not in arches:
            continue
        for degree in degrees:
            for sm_count in target.sm_counts:
                yield from _plans(model, degree, (tokens,), DeviceFacts.nominal(target.arch, sm_count))


def _numbered_plans(model: Model) -> Iterator[tuple[int | None, Plan]]:
    """Each plan behind the number of the tile that its model prefers."""
    for target in model.targets:
        family = family_of(target.arch)
        ranges = tuple(family.token_ranges(model, model.max_tokens))
        for tp in target.tp_degrees:
            for sm_count in target.sm_counts:
                device = DeviceFacts.nominal(target.arch, sm_count)
                yield from ((None, plan) for plan in _plans(model, tp, ranges, device))
            # which tile a plan takes depends on the resident pairs, and a device may hold fewer than its SMs allow
            device = DeviceFacts.nominal(target.arch, target.sm_counts[-1])
            for number, tile in enumerate(family.tiles(model)):
                yield from ((number, plan) for plan in _plans(model.preferring(tile), tp, ranges[-1:], device))


def _plans(model: Model, tp: int, ranges: Sequence[range], device: DeviceFacts) -> Iterator[Plan]:
    """The ends of each range; where they have other keys, those of its halves."""
    decode_tokens = family_of(device.arch).decode(model).max_tokens
    for stage in STAGES:
        for partials in (1,) if stage == "front" else _partial_counts(model.max_partials):
            plan = functools.partial(plan_route, model, stage=stage, tp=tp, partials=partials, device=device)
            for tokens in ranges:
                if partials > 2 and tokens[0] > decode_tokens:
                    continue  # prefill's launches are those of two
                yield from _ends(plan, tokens)


def _ends(plan: Callable[..., Plan], tokens: range) -> Iterator[Plan]:
    ends = [plan(tokens=count) for count in dict.fromkeys((tokens[0], tokens[-1]))]
    if len({tuple(launch.key for launch in end.launches) for end in ends}) == 1 or len(tokens) == 2:
        yield from ends
    else:
        yield from _ends(plan, tokens[: len(tokens) // 2])
        yield from _ends(plan, tokens[len(tokens) // 2 :])


def _partial_counts(most: int) -> tuple[int, ...]:
    """One partial, more than one, and the most: a plan asks for no more than whether there is one."""
    return tuple(sorted({1, min(2, most), most}))
