"""The committed mutation run: its programs hold every line, its explanations speak of mutants, a sample is killed."""

from __future__ import annotations

import collections
import functools
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

import cakegen
from cakegen.compile import compile_ptx, request_for
from cakegen.emulator.launches.cases import Case
from cakegen.emulator.mutation.campaign import describe
from cakegen.emulator.mutation.table import Explanation, read_explanations
from cakegen.emulator.mutation.targets import Target, target_of
from cakegen.emulator.mutation.trial import RequestTrial
from cakegen.registry import Registry, load_registry

FOLDER = Path(cakegen.__file__).parents[1] / "benchmarks" / "mutation"
ARCH = "sm_90a"
REQUESTS = FOLDER.joinpath("programs.txt").read_text().split()
LISTED = tuple(name.partition("/")[0] for name in REQUESTS)
EXPLANATIONS = read_explanations(FOLDER / "explained.json")
BLACKWELL = "sm_100a"
REQUESTS_BLACKWELL = FOLDER.joinpath("programs_sm_100a.txt").read_text().split()
LISTED_BLACKWELL = tuple(name.partition("/")[0] for name in REQUESTS_BLACKWELL)
EXPLANATIONS_BLACKWELL = read_explanations(FOLDER / "explained_sm_100a.json")
# Every so manyth site of a program is run: quick ones, of both halves.
SAMPLE = (
    ("decode:tail_tp2_n8_r11_resident@sm_90a", 13),
    ("decode:front_tp16_n8_r7_d2_m96_pair@sm_90a", 11),
)

# Into so many parts all programs are divided.
PARTS = 5
# Mutants of a site that may survive before one is killed; sites that stand once have one.
ATTEMPTS = 4

pytestmark = [pytest.mark.emulator, pytest.mark.xdist_group("mutation")]


@functools.cache
def compiled(key: str, arch: str) -> Target:
    """A target without a request: for what its text says."""
    registry = load_registry("tiny_latent_moe")
    request = request_for(registry, key, arch, ("-lineinfo",))
    return Target(key, request, compile_ptx(request), Case("", 0, 0))


@functools.cache
def entries(keys: tuple[str, ...], arch: str = ARCH) -> list[dict[str, object]]:
    targets = [compiled(key, arch) for key in keys]
    return [describe(target, mutant) for target in targets for mutant in target.mutants]


def unlisted_lines(keys: Iterable[str]) -> set[tuple[object, object]]:
    """What can be broken in some programs and not in the listed ones."""
    everywhere = {(entry["operator"], entry["line"]) for entry in entries(tuple(keys))}
    return everywhere - {(entry["operator"], entry["line"]) for entry in entries(LISTED)}


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(PARTS))
def test_listed_programs_hold_every_line_of_all_programs_with_something_to_break(registry: Registry, part: int) -> None:
    programs = {registry.kernels[key]: key for key in registry.kernels if ARCH in registry.program(key).arches}
    keys = list(programs.values())[part::PARTS]
    assert keys
    assert unlisted_lines(keys) == set()


@pytest.mark.parametrize(
    ("name", "arch"),
    [(name, ARCH) for name in REQUESTS if "/" in name]
    + [(name, BLACKWELL) for name in REQUESTS_BLACKWELL if "/" in name],
)
def test_listed_request_launches_its_program(registry: Registry, name: str, arch: str) -> None:
    """Whichever tile is the cheapest one there now."""
    case = target_of(registry, name, arch).case
    assert name.partition("/")[0] in [launch.key for launch in case.plan(registry.model).launches]


@pytest.mark.parametrize("explanation", EXPLANATIONS, ids=lambda each: str(sorted(each.patterns.items()))[:80])
def test_explanation_speaks_of_a_mutant_that_exists(explanation: Explanation) -> None:
    # `key` tells requests apart, and these targets have none
    patterns = {name: pattern for name, pattern in explanation.patterns.items() if name != "key"}
    assert any(Explanation(patterns, explanation.kind, explanation.why).matches(entry) for entry in entries(LISTED))


@pytest.mark.parametrize(
    "explanation", EXPLANATIONS_BLACKWELL, ids=lambda each: str(sorted(each.patterns.items()))[:80]
)
def test_explanation_speaks_of_a_mutant_of_blackwell(explanation: Explanation) -> None:
    assert any(explanation.matches(entry) for entry in entries(LISTED_BLACKWELL, BLACKWELL))


def test_committed_survivors_of_blackwell_are_explained() -> None:
    survivors = [json.loads(line) for line in (FOLDER / "survivors_sm_100a.jsonl").read_text().splitlines()]
    unexplained = [each for each in survivors if not any(why.matches(each) for why in EXPLANATIONS_BLACKWELL)]
    assert [each["kind"] for each in unexplained] == ["unexplained"] * len(unexplained)
    assert all(each["kind"] != "unexplained" for each in survivors if each not in unexplained)


def test_committed_survivors_are_explained() -> None:
    survivors = [json.loads(line) for line in (FOLDER / "survivors.jsonl").read_text().splitlines()]
    unexplained = [each for each in survivors if not any(why.matches(each) for why in EXPLANATIONS)]
    assert [each["kind"] for each in unexplained] == ["unexplained"] * len(unexplained)
    assert all(each["kind"] != "unexplained" for each in survivors if each not in unexplained)


@pytest.mark.parametrize(("name", "step"), SAMPLE, ids=lambda value: str(value)[28:60])
def test_sample_is_killed_or_explained(registry: Registry, name: str, step: int) -> None:
    trial = RequestTrial(registry, target_of(registry, name, ARCH), seeds=1)
    alive, sites = [], collections.defaultdict(list)
    for mutant in trial.reached(trial.target.mutants):
        sites[trial.target.site(mutant)].append(mutant)
    for mutants in sites.values():
        entry = describe(trial.target, mutants[-1])
        if int(str(entry["site"]), 16) % step or any(why.matches(entry) for why in EXPLANATIONS):
            continue
        # as in a campaign: of a loop that was unrolled, some turns may be of stages that the ring does not use
        verdicts = (trial.run(each) for each in (mutants[-1], *mutants[:-1])[:ATTEMPTS])
        if not any(verdict.killed for verdict in verdicts):
            alive.append(f"{entry['operator']} ({entry['change']}) {entry['place']}")
    assert alive == []
