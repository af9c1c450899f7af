"""The committed mutation run of the hand-written tcgen05 programs: a sample is killed, and every survivor explained."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

import cakegen
from cakegen.cli.emulate_files import FileRequest
from cakegen.cli.mutate_files import sequence_targets
from cakegen.emulator.mutation.campaign import describe
from cakegen.emulator.mutation.sequences import SequenceTarget, SequenceTrial
from cakegen.emulator.mutation.table import Explanation, read_explanations

ROOT = Path(cakegen.__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "mutation" / "tcgen05"
INCLUDE = (ROOT / "generated/shared", ROOT / "tests/emulator/kernels")
EXPLANATIONS = read_explanations(FOLDER / "explained.json")
# Every so manyth site of a program is run.
SAMPLE = {"one_cta": 17, "pair": 31, "launch_control": 41}

pytestmark = [pytest.mark.emulator, pytest.mark.xdist_group("mutation")]


@functools.cache
def target(name: str) -> SequenceTarget:
    cuda, launch = FOLDER / f"{name}.cu", FOLDER / f"{name}.json"
    (found,) = sequence_targets([FileRequest(None, cuda, launch, None, None, "sm_100a", INCLUDE, ())])
    return found


@functools.cache
def entries() -> list[dict[str, object]]:
    return [describe(target(name), mutant) for name in SAMPLE for mutant in target(name).mutants]


@pytest.mark.parametrize("explanation", EXPLANATIONS, ids=lambda each: str(sorted(each.patterns.items()))[:80])
def test_explanation_speaks_of_a_mutant_that_exists(explanation: Explanation) -> None:
    assert any(explanation.matches(entry) for entry in entries())


def test_committed_survivors_exist_and_are_explained() -> None:
    survivors = [json.loads(line) for line in (FOLDER / "survivors.jsonl").read_text().splitlines()]
    assert survivors
    sites = {entry["site"] for entry in entries()}
    assert [each["site"] for each in survivors if each["site"] not in sites] == []
    assert [each for each in survivors if not any(why.matches(each) for why in EXPLANATIONS)] == []


@pytest.mark.parametrize("name", SAMPLE)
def test_sample_is_killed_or_explained(name: str) -> None:
    trial = SequenceTrial(target(name), seeds=1)
    assert trial.scopes == "strict"
    alive, ran = [], 0
    for mutant in {trial.target.site(each): each for each in trial.reached(trial.target.mutants)}.values():
        entry = describe(trial.target, mutant)
        if int(str(entry["site"]), 16) % SAMPLE[name] or any(why.matches(entry) for why in EXPLANATIONS):
            continue
        ran += 1
        verdict = trial.run(mutant)
        if not verdict.killed:
            alive.append(f"{verdict.outcome}: {entry['operator']} ({entry['change']}) {entry['place']}")
    assert ran > 2
    assert alive == []
