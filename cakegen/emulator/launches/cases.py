"""One front or tail with random operands, emulated and compared with the reference.

What `cakegen emulate` and the tests run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cakegen.emulator.launches.launch import DEFAULT_OPTIONS, Options, emulate_calls, emulate_plan
from cakegen.emulator.launches.stream import LaunchReport
from cakegen.emulator.text.translate import Program
from cakegen.errors import EmulationError, PlanError
from cakegen.model import DeviceFacts, Model, Target
from cakegen.operands import OperandSpec, shape_of
from cakegen.plan import family_of, plan_route
from cakegen.plan.records import DecodeForm, Plan
from cakegen.registry import Registry
from cakegen.rules import HopperTile
from cakegen.runtime.reference import reference_outputs
from cakegen.runtime.validate import Request, validate_front, validate_tail

ARCH = "sm_90a"
# Columns between the rows of pitched operands: NaN in inputs, and no program may write them in outputs.
_GAP_COLS = 64
_CHUNK = 1 << 20
_PREFILL_TOKENS = (129, 193, 256, 257, 300, 512, 513, 1024, 2048, 4096)


@dataclass(frozen=True)
class Case:
    """What to run: `rank` of `tp`, T tokens, P partials (tail), planned for a device of so many SMs and its target.

    With `tile`, one of the model's, Hopper's prefill takes that one whatever it costs.
    """

    stage: str
    tp: int
    tokens: int
    partials: int = 1
    sm_count: int = 132
    rank: int = 0
    arch: str = ARCH
    tile: HopperTile | None = None

    def plan(self, model: Model) -> Plan:
        """Its plan."""
        if self.tile is not None:
            model = model.preferring(self.tile)
        facts = DeviceFacts.nominal(self.arch, self.sm_count)
        return plan_route(model, stage=self.stage, tp=self.tp, tokens=self.tokens, partials=self.partials, device=facts)


@dataclass(frozen=True)
class CaseReport:
    """What came of it.

    Parameters
    ----------
    launches
        One report a launch.
    errors
        Output -> largest difference from fp64; of `y`, the number of elements whose bits differ.
    problems
        In words: outputs outside of the contract. Empty: the case passed.
    outputs
        Copies of the outputs, by name.
    """

    launches: tuple[LaunchReport, ...]
    errors: dict[str, float]
    problems: tuple[str, ...]
    outputs: dict[str, torch.Tensor]

    @property
    def digests(self) -> dict[str, str]:
        """Output, as in `errors` -> 8 hex digits of the sha256 of its bits: equal before and after most refactors."""
        return {
            name.removesuffix("_workspace"): hashlib.sha256(
                value.contiguous().view(torch.uint8).numpy().tobytes()
            ).hexdigest()[:8]
            for name, value in self.outputs.items()
        }


def find_case(registry: Registry, key: str, arch: str = ARCH) -> Case:
    """The largest decode request, or the smallest prefill one, that launches a key; its last rank.

    Raises
    ------
    EmulationError
        The export has no such key for this architecture, or no request that was tried reaches it.
    """
    return find_cases(registry, (key,), arch)[key]


def find_cases(registry: Registry, keys: Sequence[str], arch: str = ARCH) -> dict[str, Case]:
    """`find_case` of several keys in one pass.

    Raises
    ------
    EmulationError
        As `find_case`.
    """
    for key in keys:
        if key not in registry.kernels or arch not in registry.program(key).arches:
            raise EmulationError(f"{key!r} is no {arch} key of {registry.export}; `cakegen list` prints the keys")
    missing, found = set(keys), dict[str, Case]()
    for case in _requests(registry.model, arch):
        if not missing:
            break
        try:
            launches = case.plan(registry.model).launches
        except PlanError:
            continue
        here = missing.intersection(launch.key for launch in launches)
        found.update(dict.fromkeys(here, case))
        missing -= here
    if missing:
        raise EmulationError(
            f"no request that was tried launches {', '.join(sorted(missing))}; "
            "give --stage, --tp, --tokens and --sm-count"
        )
    return {key: found[key] for key in keys}


def _requests(model: Model, arch: str) -> Iterator[Case]:
    target = model.target(arch)
    if target is None:
        return
    family = family_of(arch)
    decode = family.decode(model)
    yield from _each(target, range(decode.max_cta_tokens, 0, -1))
    for case in _each(target, [tokens for tokens in reversed(decode.n_pads) if tokens > decode.max_cta_tokens]):
        if isinstance(case.plan(model).launches[-1].form, DecodeForm):
            yield case
    yield from _each(target, _PREFILL_TOKENS)
    for tile in family.tiles(model):
        yield from _each(target, _PREFILL_TOKENS, tile)


def _each(target: Target, token_counts: Sequence[int], tile: HopperTile | None = None) -> Iterator[Case]:
    for tokens in token_counts:
        for sm_count in reversed(target.sm_counts):
            for tp in target.tp_degrees:
                for stage, partials, rank in (("front", 1, 0), ("tail", 3, tp - 1), ("tail", 1, tp - 1)):
                    yield Case(stage, tp, tokens, partials, sm_count, rank, target.arch, tile)


def emulate_case(
    registry: Registry,
    case: Case,
    options: Options = DEFAULT_OPTIONS,
    *,
    operand_seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    load: Callable[[Registry, str, str], Program] | None = None,
) -> CaseReport:
    """Run a case and compare its outputs with the fp64 reference.

    Raises
    ------
    Fault
        A program did something undefined.
    CakeError
        The request, the plan or a program is refused.
    """
    operands = make_operands(registry.model, case, operand_seed)
    request, plan = planned_call(registry.model, case, operands)
    launches = emulate_plan(registry, request, plan, options, on_progress=on_progress, load=load)
    return _report(registry.model, case, operands, launches)


def emulate_chain(
    registry: Registry,
    case: Case,
    options: Options = DEFAULT_OPTIONS,
    *,
    load: Callable[[Registry, str, str], Program] | None = None,
) -> CaseReport:
    """Run a case behind the other stage, whose output it reads, and then again, in one stream.

    All launches overlap whose programs offer it. Arguments and what is raised as of `emulate_case`.
    """
    model = registry.model
    other = dataclasses.replace(case, stage="tail" if case.stage == "front" else "front", rank=0)
    before, operands = make_operands(model, other, 1), make_operands(model, case)
    dims, stages = model.dims, model.dims.stages
    given = {spec.name for spec in stages[case.stage].inputs} & {spec.name for spec in stages[other.stage].outputs}
    follows = dims.sum_stage.output.name
    operands |= {name: before[name] for name in given} or {dims.rows_stage.tokens.name: before[follows]}
    own = planned_call(model, case, operands)
    launches = emulate_calls(registry, [planned_call(model, other, before), own, own], options, overlap=True, load=load)
    return _report(model, case, operands, launches)


def planned_call(model: Model, case: Case, operands: Mapping[str, torch.Tensor]) -> tuple[Request, Plan]:
    """A case's request on some operands, and its plan.

    Raises
    ------
    CakeError
        An operand or the request is refused.
    """
    if case.stage == "front":
        return validate_front(model, **operands), case.plan(model)
    return validate_tail(model, **operands, tp=case.tp, rank=case.rank), case.plan(model)


def _report(
    model: Model, case: Case, operands: dict[str, torch.Tensor], launches: tuple[LaunchReport, ...]
) -> CaseReport:
    errors, problems = compare(model, case, operands)
    outputs = {spec.name: operands[spec.name].clone() for spec in model.dims.stages[case.stage].outputs}
    return CaseReport(launches, errors, tuple(problems), outputs)


class _Draw:
    """Numbers of mean 0 and variance 1 whose bits are the same on every machine: sums of four raw 16-bit numbers.

    A library's normal numbers depend on its version and on the processor's vector instructions.
    """

    def __init__(self, seed: int) -> None:
        self._source = np.random.PCG64(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        """fp32."""
        values = np.empty(math.prod(shape), np.float32)
        for first in range(0, values.size, _CHUNK):
            part = values[first : first + _CHUNK]
            raw = np.asarray(self._source.random_raw(part.size), np.uint64)
            total = sum((raw >> np.uint64(shift)) & np.uint64(0xFFFF) for shift in (0, 16, 32, 48))
            # the sum and its mean are exact in fp32; a uniform 16-bit number has variance 2^32 / 12
            part[:] = total
            part -= np.float32(2 * 0xFFFF)
            part *= np.float32((12 / 4) ** 0.5 / (1 << 16))
        return torch.from_numpy(values).reshape(shape)


def make_operands(model: Model, case: Case, seed: int = 0) -> dict[str, torch.Tensor]:
    """Keyword operands: weights that give products of order 1, pitched activations, outputs full of NaN.

    Their bits depend on nothing but the arguments.
    """
    dims, make = model.dims, _Draw(seed)
    i_local, tokens, stage = dims.i_local(case.tp), case.tokens, dims.stages[case.stage]
    activated = {product.weight for product in dims.rows_stage.activated}

    def weights(*shape: int) -> torch.Tensor:
        return make.normal(*shape).mul_(shape[-1] ** -0.5).to(torch.bfloat16)

    def rows(cols: int, *outer: int) -> torch.Tensor:
        pitched = torch.full((*outer, tokens, cols + _GAP_COLS), float("nan"), dtype=torch.bfloat16)
        pitched[..., :cols] = make.normal(*outer, tokens, cols).to(torch.bfloat16)
        return pitched[..., :cols]

    def output(cols: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.full((tokens, cols + _GAP_COLS), float("nan"), dtype=dtype)[:, :cols]

    def made(spec: OperandSpec) -> torch.Tensor:
        *outer, cols = shape_of(spec, dims, i_local=i_local, tokens=tokens, partials=case.partials)
        if spec in stage.outputs:
            return output(cols, torch.float32 if spec.fp32 else torch.bfloat16)
        if spec.kind == "vector":
            return make.normal(cols).to(torch.bfloat16)
        if spec.kind == "weight":
            # an activation's rows give twice as much: its branches then reach their bounds
            return weights(*outer, cols) * (2 if spec in activated else 1)
        return rows(cols, *outer[:-1])

    return {spec.name: made(spec) for spec in stage.operands}


@dataclass(frozen=True)
class Comparison:
    """An output beside its fp64 reference.

    Parameters
    ----------
    output
        Its short name.
    values
        How many elements it has.
    error
        Largest difference from fp64; of an output whose bits the contract fixes, how many elements have others.
    share
        Largest difference as a share of what the contract allows that element: above 1, or NaN, the contract is broken.
    tolerance
        atol = rtol; 0: bit for bit.
    """

    output: str
    values: int
    error: float
    share: float
    tolerance: float

    @property
    def problem(self) -> str:
        """What breaks the contract, in words; empty: nothing."""
        if self.share <= 1:
            return ""
        if self.tolerance == 0:
            return f"{self.error:.0f} of {self.values} elements of {self.output} differ from the reference's bits"
        return f"{self.output} is outside atol = rtol = {self.tolerance:g}: largest error {self.error:.3g}"


def compare(model: Model, case: Case, operands: dict[str, torch.Tensor]) -> tuple[dict[str, float], list[str]]:
    """(largest error of each output, what breaks the contract)."""
    compared = compare_outputs(model, case, operands)
    return {each.output: each.error for each in compared}, [each.problem for each in compared if each.problem]


def compare_outputs(model: Model, case: Case, operands: dict[str, torch.Tensor]) -> list[Comparison]:
    """Each output of a case beside what fp64 gives for its inputs; operands by name, on any one device."""
    exact = reference_outputs(case.stage, model.dims, operands, tp=case.tp, rank=case.rank, dtype=torch.float64)
    return [
        _compare_output(spec.short, operands[spec.name], exact[spec.short], model.dims.tolerances[spec.short])
        for spec in model.dims.stages[case.stage].outputs
    ]


def _compare_output(name: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> Comparison:
    if tolerance == 0:
        different = int((wanted.view(torch.int16) != got.view(torch.int16)).sum())
        return Comparison(name, wanted.numel(), different, math.inf if different else 0.0, tolerance)
    errors = (got.double() - wanted).abs()
    shares = errors / (tolerance + tolerance * wanted.abs())
    return Comparison(name, wanted.numel(), errors.max().item(), shares.max().item(), tolerance)
