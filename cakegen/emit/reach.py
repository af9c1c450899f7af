"""Which programs an export reaches: every plan of the model on every declared part. Imports plan and model; no I/O.

Plans depend on the token count, the TP degree, whether there is one partial or more, and the device; so walking all of
them gives exactly the programs that a runtime can ask for.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from cakegen.arch import architecture
from cakegen.emit.decode import decode_program, norm_program
from cakegen.emit.gemm_sm90 import gemm_program_sm90
from cakegen.emit.gemm_sm100 import gemm_program_sm100
from cakegen.emit.program import ProgramSpec
from cakegen.errors import EmitError
from cakegen.model import DeviceFacts, Model
from cakegen.plan import plan_route
from cakegen.plan.records import DecodeForm, GemmForm, NormForm, Plan
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


# Remembered, since one process may write, check and compare a tree; a walk takes seconds.
@functools.lru_cache(maxsize=8)
def reached_keys(model: Model) -> tuple[ReachedKey, ...]:
    """Every key that a plan of this model can name, for the families that have a template; sorted by key.

    Raises
    ------
    EmitError
        Two different forms share a key, or a route needs a family without a template.
    PlanError
        A plan does not fit.
    """
    forms: dict[str, DecodeForm | NormForm | GemmForm] = {}
    arches: dict[str, set[str]] = {}
    for plan in reached_plans(model):
        for launch in plan.launches:
            known = forms.setdefault(launch.key, launch.form)
            if known != launch.form:
                raise EmitError(f"{model.name}: key {launch.key} stands for two forms: {known} and {launch.form}")
            arches.setdefault(launch.key, set()).add(plan.device.arch)
    return tuple(_reached(model, key, forms[key], tuple(sorted(arches[key]))) for key in sorted(forms))


def _reached(model: Model, key: str, form: DecodeForm | NormForm | GemmForm, arches: tuple[str, ...]) -> ReachedKey:
    family = architecture(arches[0]).family
    constants = form.constants if isinstance(form, GemmForm) else ()
    return ReachedKey(key, program_for(model, form, family), constants, arches)


def program_for(model: Model, form: DecodeForm | NormForm | GemmForm, arch_family: str) -> ProgramSpec:
    """The specification of the program that runs one form.

    Raises
    ------
    EmitError
        The export declares no template of the form's family for these architectures.
    """
    if isinstance(form, DecodeForm):
        return decode_program(model, form, arch_family)
    if isinstance(form, NormForm):
        return norm_program(model, form, arch_family)
    return _GEMM_PROGRAMS[arch_family](model, form, arch_family)


def reached_plans(model: Model) -> Iterator[Plan]:
    """Every plan whose families have templates: all targets, their TP degrees and SM counts, all token counts.

    Raises
    ------
    PlanError
        A plan does not fit.
    """
    for target in model.targets:
        family = architecture(target.arch).family
        ranges = {stage: tuple(token_ranges(model, family, _last_token(model, family, stage))) for stage in STAGES}
        largest = {stage: found[-1:] for stage, found in ranges.items()}
        for tp in target.tp_degrees:
            for sm_count in target.sm_counts:
                yield from _plans(model, tp, ranges, DeviceFacts.nominal(target.arch, sm_count))
            if family == "sm90":
                device = DeviceFacts.nominal(target.arch, target.sm_counts[-1])
                for each in _one_tile_models(model):
                    yield from _plans(each, tp, largest, device)


def _one_tile_models(model: Model) -> Iterator[Model]:
    """The model with each of Hopper's prefill tiles in turn.

    Which of them a plan takes depends on the pairs that are resident, and a device may hold fewer than its SMs allow.
    """
    for tile in model.prefill_sm90.tiles:
        yield model.preferring(tile)


def _plans(model: Model, tp: int, ranges: Mapping[str, tuple[range, ...]], device: DeviceFacts) -> Iterator[Plan]:
    """The ends of each range; where they have other keys, those of its halves."""
    rules = model.for_family(architecture(device.arch).family).decode
    for stage, ranges_of_stage in ranges.items():
        for partials in (1,) if stage == "front" else _partial_counts(model.max_partials):
            plan = functools.partial(plan_route, model, stage=stage, tp=tp, partials=partials, device=device)
            for tokens in ranges_of_stage:
                if partials > 2 and tokens[0] > rules.max_tokens:
                    continue  # prefill's launches are those of two
                yield from _ends(plan, tokens)


def _ends(plan: Callable[..., Plan], tokens: range) -> Iterator[Plan]:
    ends = [plan(tokens=count) for count in dict.fromkeys((tokens[0], tokens[-1]))]
    if len({tuple(launch.key for launch in end.launches) for end in ends}) == 1 or len(tokens) == 2:
        yield from ends
    else:
        yield from _ends(plan, tokens[: len(tokens) // 2])
        yield from _ends(plan, tokens[len(tokens) // 2 :])


def token_ranges(model: Model, arch_family: str, last: int) -> Iterator[range]:
    """Ranges of token counts, from 1 to `last`, inside which all plans have the keys of both ends, if those agree.

    A decode plan depends on T only through the token tile and what the tail keeps in shared memory. Inside a pair row
    of prefill it does so only through the rows of the norm: whether it is fused, and whether it triggers early. Each of
    the two changes at most once as T grows.
    """
    decode = model.for_family(arch_family).decode
    resident = (decode.resident_tokens_staged, decode.resident_tokens_long, decode.resident_tokens_short)
    ends = {*decode.n_pads, *resident, decode.max_tokens, decode.max_cta_tokens, last}
    starts = {1} | {end + 1 for end in ends}
    if arch_family == "sm90":
        starts |= set(range(1, last, 2 * model.prefill_sm90.block_m))
    else:
        rules = model.prefill
        starts |= set(range(1, last, 2 * rules.block_m))
        starts |= {rules.short_ring_max_tokens + 1, rules.narrow_tokens, rules.narrow_tokens + 1}
    for start, end in itertools.pairwise(sorted(start for start in starts if 1 <= start <= last + 1)):
        yield range(start, end)


def _partial_counts(most: int) -> tuple[int, ...]:
    """One partial, more than one, and the most: a plan asks for no more than whether there is one."""
    return tuple(sorted({1, min(2, most), most}))


def _last_token(model: Model, arch_family: str, stage: str) -> int:
    """Largest token count at which a stage has templates on these architectures (0: none has)."""
    if model.template_for(f"{stage}_gemm", arch_family):
        return model.max_tokens
    decode = model.for_family(arch_family).decode
    # up to there every request is decode
    return min(decode.max_tokens, decode.max_cta_tokens) if model.template_for("decode", arch_family) else 0
