"""`cakegen plan` says what is launched: every field of every launch is the registry's record, for every request."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import pytest

from cakegen import paths
from cakegen.cli.plan import plan_literal
from cakegen.emit.reach import reached_plans
from cakegen.model import DeviceFacts
from cakegen.plan import family_of, plan_route
from cakegen.plan.records import Plan
from cakegen.registry import LaunchRecord, Registry, load_registry

EXPORTS = sorted(path.parent.name for path in paths.generated_root().glob("*/cake_jit.py"))
ARCHES = ("sm_90a", "sm_100a", "sm_103a")
REQUESTS = (("front", 1), ("tail", 1), ("tail", 2))
DECODE_STRIDE, STRIDE = 5, 257
"""Between the token counts that are tried beside those where a plan changes; primes, so that they fall anywhere in a
range."""


def devices(arch: str, sm_counts: tuple[int, ...]) -> list[DeviceFacts]:
    """Of every declared part, and of the largest with fewer pairs than its SMs allow."""
    found = [DeviceFacts.nominal(arch, count) for count in sm_counts]
    return [*found, dataclasses.replace(found[-1], resident_pairs=found[-1].resident_pairs - 4)]


def plans_at(registry: Registry, arch: str, counts: Iterable[int]) -> Iterator[Plan]:
    """Every request of these token counts."""
    target = registry.model.target(arch)
    assert target is not None
    each = itertools.product(counts, devices(arch, target.sm_counts), target.tp_degrees, REQUESTS)
    for tokens, device, tp, (stage, partials) in each:
        yield plan_route(registry.model, stage=stage, tp=tp, tokens=tokens, partials=partials, device=device)


def record_fields(record: LaunchRecord) -> dict[str, object]:
    """A record as the JSON of a plan spells it."""
    assert record.block[1:] == record.cluster[1:] == (1, 1)
    values = {**dataclasses.asdict(record), "threads": record.block[0], "cluster_ctas": record.cluster[0]}
    return {name: value for name, value in values.items() if name not in ("block", "cluster")}


def check_plans(registry: Registry, plans: Iterable[Plan]) -> set[str]:
    """Hold each field of each plan's launches to the record of its program; the keys."""
    checked: dict[tuple[object, ...], None] = {}
    for plan in plans:
        # what a plan says of a launch follows from these
        facts = (plan.launches, plan.device.max_dynamic_smem_bytes)
        if facts in checked:
            continue
        checked[facts] = None
        for said in plan_literal(plan, plan.partials)["launches"]:
            program = registry.program(said["key"])
            expected = record_fields(program.launch)
            assert {name: said[name] for name in expected} == expected, plan
            assert said["dynamic_smem_bytes"] <= plan.device.max_dynamic_smem_bytes
            # what a launch is given beside its operands are parameters that the program takes
            taken = {name for kind, name in program.arg_plan if kind == "parameter"}
            assert set(said["parameters"]) | set(said["overlapping"] or {}) <= taken
            assert plan.device.arch in program.arches, (plan, "a request reaches a program of another architecture")
    return {launch.key for launches, _ in checked for launch in launches}  # type: ignore[attr-defined]


@pytest.mark.parametrize("export", EXPORTS)
def test_every_distinct_plan_equals_its_launch_records(export: str) -> None:
    """Over every token count, TP degree, architecture and SM count: the plans that have other keys than their
    neighbours. They launch every program of the registry.
    """
    registry = load_registry(export)
    assert check_plans(registry, reached_plans(registry.model)) == set(registry.kernels)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("export", EXPORTS)
def test_plans_of_token_counts_anywhere_equal_their_launch_records(export: str, arch: str) -> None:
    """Not only where a walk over plans looks, and on a device with fewer pairs than its SMs allow."""
    registry = load_registry(export)
    model = registry.model
    decode = range(1, family_of(arch).decode(model).max_tokens + 1, DECODE_STRIDE)
    between = range(1, model.max_tokens + 1, STRIDE)
    keys = check_plans(registry, plans_at(registry, arch, sorted({*decode, *between, model.max_tokens})))
    served = {key for key in registry.kernels if arch in registry.program(key).arches}
    assert len(keys) > 0.5 * len(served), "the counts reach most programs"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("export", EXPORTS)
def test_plans_of_all_token_counts_equal_their_launch_records(export: str, arch: str) -> None:
    registry = load_registry(export)
    check_plans(registry, plans_at(registry, arch, range(1, registry.model.max_tokens + 1)))
