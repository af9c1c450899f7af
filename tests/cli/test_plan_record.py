"""`cakegen plan` says what is launched: every field of every launch is the registry's record, for every request."""

from __future__ import annotations

import dataclasses

import pytest

from cakegen import paths
from cakegen.cli.plan import plan_literal
from cakegen.model import DeviceFacts
from cakegen.plan import family_of, plan_route
from cakegen.registry import LaunchRecord, load_registry

EXPORTS = sorted(path.parent.name for path in paths.generated_root().glob("*/cake_jit.py"))
ARCHES = ("sm_90a", "sm_100a", "sm_103a")


def token_counts(export: str, arch: str) -> list[int]:
    """Both ends of every range in which no plan changes, and of those of prefill every eighth."""
    model = load_registry(export).model
    ranges = list(family_of(arch).token_ranges(model, model.max_tokens))
    decode_tokens = family_of(arch).decode(model).max_tokens
    chosen = [span for number, span in enumerate(ranges) if span[0] <= decode_tokens or number % 8 == 0]
    return sorted({end for span in (*chosen, ranges[-1]) for end in (span[0], span[-1])})


def devices(arch: str, sm_counts: tuple[int, ...]) -> list[DeviceFacts]:
    """Of every declared part, and of the largest with fewer pairs than its SMs allow."""
    found = [DeviceFacts.nominal(arch, count) for count in sm_counts]
    return [*found, dataclasses.replace(found[-1], resident_pairs=found[-1].resident_pairs - 4)]


def record_fields(record: LaunchRecord) -> dict[str, object]:
    """A record as the JSON of a plan spells it."""
    assert record.block[1:] == record.cluster[1:] == (1, 1)
    values = {**dataclasses.asdict(record), "threads": record.block[0], "cluster_ctas": record.cluster[0]}
    return {name: value for name, value in values.items() if name not in ("block", "cluster")}


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("export", EXPORTS)
def test_plan_equals_the_launch_record(export: str, arch: str) -> None:
    registry = load_registry(export)
    target = registry.model.target(arch)
    assert target is not None
    seen = set()
    for device in devices(arch, target.sm_counts):
        for tp in target.tp_degrees:
            for tokens in token_counts(export, arch):
                for stage, partials in (("front", 1), ("tail", 1), ("tail", 2)):
                    request = {"stage": stage, "tp": tp, "tokens": tokens, "partials": partials}
                    plan = plan_route(registry.model, device=device, **request)  # type: ignore[arg-type]
                    for said, launch in zip(plan_literal(plan, partials)["launches"], plan.launches, strict=True):
                        program = registry.program(said["key"])
                        expected = record_fields(program.launch)
                        assert {name: said[name] for name in expected} == expected, (device, request)
                        assert said["dynamic_smem_bytes"] <= device.max_dynamic_smem_bytes
                        # what a launch is given beside its operands are parameters that the program takes
                        taken = {name for kind, name in program.arg_plan if kind == "parameter"}
                        assert set(said["parameters"]) | set(said["overlapping"] or {}) <= taken
                        seen.add(launch.key)
    served = {key for key in registry.kernels if arch in registry.program(key).arches}
    assert len(seen) > 0.7 * len(served), "the sweep reaches most programs"
