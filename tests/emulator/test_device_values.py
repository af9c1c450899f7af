"""The emulator against what an H200 computed, bit for bit: `benchmarks/h200/values.*`, written by `record_values.py`.

Bits are compared whatever the program's text is by now; a case may differ only where `values_fell_back.tsv` names it.
A case of each body by default; with `-m thorough` the programs of one TP degree, with `-m long` all, and the full size.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from support.emulator.bodies import current_rows
from support.emulator.device_values import (
    FOLDER,
    RECORD_COMMAND,
    SMALL,
    Named,
    Recording,
    Values,
    describe,
    differing_outputs,
    named_cases,
    problems_of,
    read_fell_back,
    read_recording,
    registry_of,
)

from cakegen.emulator import Options, emulate_plan
from cakegen.runtime.validate import validate_front, validate_tail

pytestmark = pytest.mark.emulator

RECORDING: Recording = read_recording()
FELL_BACK = read_fell_back()
PAGE = FOLDER.parents[1] / "docs" / "hopper-answers.md"
OFTEN = [named for named in RECORDING.values if named.export == SMALL and named.case.tp == 8]


def one_of_each_body() -> frozenset[Named]:
    """Of the frequent cases the fewest whose launches have all the bodies that theirs have."""
    bodies = {(row.arch, row.key): row.body for row in current_rows() if row.export == SMALL}
    found: dict[str, Named] = {}
    for named in OFTEN:
        for launch in named.plan.launches:
            found.setdefault(bodies[named.case.arch, launch.key], named)
    return frozenset(found.values())


QUICK = one_of_each_body()


def param(named: Named) -> object:
    marks = () if named in QUICK else pytest.mark.thorough if named in OFTEN else pytest.mark.long
    return pytest.param(named, id=named.name, marks=marks)


@functools.cache
def emulated(named: Named, arithmetic: str = "hopper") -> Values:
    """One schedule is enough: that values do not depend on it is tested elsewhere, and so is the order of accesses."""
    torch.set_num_threads(1)
    registry, case, operands = registry_of(named.export), named.case, named.operands()
    if case.stage == "front":
        request = validate_front(registry.model, **operands)
    else:
        request = validate_tail(registry.model, **operands, tp=case.tp, rank=case.rank)
    emulate_plan(registry, request, named.plan, Options("early", 0, arithmetic, checks=False))
    return describe(named, operands)


@pytest.mark.parametrize("named", [param(named) for named in RECORDING.values])
def test_values_are_those_of_the_device(named: Named) -> None:
    got, recorded = emulated(named), RECORDING.values[named]
    assert got.inputs == recorded.inputs, "the operands are not those of the recording"
    problems = problems_of(got, recorded, fell_back=named.name in FELL_BACK)
    assert not problems, problems
    if named.name in FELL_BACK:
        assert problems_of(got, recorded), "has the recorded bits again: take it off the list of cases that fell back"


def test_cases_that_fell_back_are_counted() -> None:
    """None unless it is listed with its reason; the page says how many."""
    assert set(FELL_BACK) <= {named.name for named in RECORDING.values}
    assert all(reason.strip() for reason in FELL_BACK.values())
    assert f"{len(FELL_BACK)} of {len(RECORDING.values)} cases fell back" in PAGE.read_text(encoding="utf-8")


@pytest.mark.long
def test_recording_has_a_case_of_every_program() -> None:
    missing = [named.name for named in named_cases() if named not in RECORDING.values]
    if missing:
        pytest.skip(f"{len(missing)} cases are not in the recording; on an H200: {RECORD_COMMAND}")


def first_of(stage: str) -> Values:
    return next(RECORDING.values[named] for named in OFTEN if named.case.stage == stage)


def changed(values: Values, output: str, steps: int, count: int = 1) -> Values:
    """The first elements a few steps further."""
    bits = values.samples[output].copy()
    bits[:count] += np.asarray(steps, bits.dtype)
    return dataclasses.replace(
        values, hashes=values.hashes | {output: "other"}, samples=values.samples | {output: bits}
    )


@pytest.mark.parametrize(
    ("output", "steps", "count", "fell_back", "problem"),
    [
        ("logits", 1, 1, False, "logits has other bits: 1 of 512"),
        ("logits", 1, 1, True, None),
        ("logits", 1 << 22, 1, True, "logits differs by up to"),
        ("latent", 0, 0, False, "latent has other bits: 0 of"),
        ("shared_act", 1, 3, False, None),
        ("shared_act", 2, 1, False, "shared_act has other bits: 1 of 512 sampled elements, by up to 2 ulp"),
        ("shared_act", 1, 6, False, "shared_act has other bits: 6 of 512"),
        ("shared_act", 1, 6, True, None),
        ("y_workspace", 1, 1, True, "y_workspace has other bits"),
        ("out", 1, 1, False, "out has other bits"),
    ],
)
def test_what_differs_is_judged(output: str, steps: int, count: int, fell_back: bool, problem: str | None) -> None:
    recorded = first_of("tail" if output in ("y_workspace", "out") else "front")
    problems = problems_of(changed(recorded, output, steps, count), recorded, fell_back=fell_back)
    assert [problem in each for each in problems] == ([] if problem is None else [True])


def test_a_wide_sum_has_other_bits() -> None:
    """Else equal bits would say nothing about the model of the sum."""
    named = next(named for named in OFTEN if named.case.stage == "front")
    assert {"logits", "latent"} <= set(differing_outputs(emulated(named, "wide"), RECORDING.values[named]))


def test_names_tell_cases_apart() -> None:
    """A recording keeps one entry a name."""
    names = [named.name for named in named_cases()]
    assert len(names) == len(set(names))
    assert any(named.case.tile for named in named_cases())
