"""Campaigns: results on disk one by one, runs that go on where they ended, and the choice of programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cakegen.emulator.mutation.campaign import (
    Campaign,
    Reached,
    Work,
    _run_site,
    choose,
    choose_keys,
    planned,
    read_campaign,
    run_campaign,
)
from cakegen.emulator.mutation.mutants import Mutant
from cakegen.emulator.mutation.targets import target_of
from cakegen.emulator.mutation.trial import Trial, Verdict
from cakegen.errors import EmulationError
from cakegen.registry import load_registry

KEY = "decode:tail_tp8_n8_r11_apart@sm_90a"
CAMPAIGN = Campaign("tiny_latent_moe", "sm_90a", (KEY,), 1, ("parity", "bytes", "neighbour"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """Sites get a verdict without a run; the list is of those that were asked for."""
    sites: list[Work] = []

    def verdict(work: Work) -> list[dict[str, Any]]:
        sites.append(work)
        return [{"site": work.site, "outcome": "survived"}, {"site": work.site, "outcome": "deadlock"}]

    monkeypatch.setattr("cakegen.emulator.mutation.campaign._run_site", verdict)
    return sites


def test_killed_run_goes_on_behind_its_last_whole_line(tmp_path: Path, asked: list[Work]) -> None:
    file, work = tmp_path / "deep" / "results.jsonl", planned(CAMPAIGN)
    assert len(work) > 8

    def stop(done: int, total: int, entry: dict[str, Any] | None) -> None:
        assert total == len(work)
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_campaign(CAMPAIGN, file, 1, stop)
    with file.open("a") as out:
        out.write('{"site": "cut o')
    asked.clear()
    seen: list[int] = []
    run_campaign(CAMPAIGN, file, 1, lambda done, total, entry: seen.append(done))
    assert seen == list(range(5, len(work) + 1))
    assert len(asked) == len(work) - 5
    header, results = read_campaign(file)
    assert header["seeds"] == 1
    assert [entry["site"] for entry in results[::2]] == [each.site for each in work]


@pytest.mark.parametrize(("name", "value"), [("seeds", 9), ("source_digest", "of texts before an edit")])
def test_file_of_another_campaign_or_of_other_texts_is_refused(tmp_path: Path, name: str, value: object) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(json.dumps({**CAMPAIGN.header(), name: value}) + "\n")
    with pytest.raises(EmulationError, match=f"holds a run with another {name}; give another file"):
        run_campaign(CAMPAIGN, file, 1, lambda done, total, entry: None)


def test_file_that_holds_no_campaign_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    for text, message in (
        ('{"hello": 1}\n', "no header of a mutation run"),
        ("[1]\n", "no header of a mutation run"),
        ("key\n", r"holds no results of a mutation run \(Expecting value"),
    ):
        file.write_text(text)
        with pytest.raises(EmulationError, match=message):
            read_campaign(file)


def test_sites_that_only_a_failing_wait_reaches_are_left_out() -> None:
    """A wait that gives up stores a record in front of a trap; no run of a correct program comes there."""
    work = planned(Campaign("tiny_latent_moe", "sm_90a", (KEY,), 1))
    mutants = target_of(load_registry("tiny_latent_moe"), KEY, "sm_90a").mutants
    record = {number for number, mutant in enumerate(mutants) if "volatile" in mutant.instruction.parts}
    numbers = {number for each in work for _, number in each.candidates}
    assert record
    assert not record & numbers
    assert len({each.site for each in work}) == len(work)
    assert {each.programs for each in work} == {1}


def test_site_runs_under_one_schedule_in_every_program_and_then_under_all(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bool] = []

    def run(outcomes: str, trial: Trial, mutant: Mutant, first_only: bool) -> Verdict:
        runs.append(first_only)
        return Verdict(outcomes.split()[len(runs) - 1], "", "", 0.1)

    work = Work(CAMPAIGN, "x", tuple((KEY, number) for number in range(9)), 2)
    monkeypatch.setattr(Trial, "run", lambda *arguments: run("survived race", *arguments))
    assert [entry["outcome"] for entry in _run_site(work)] == ["survived", "race"]
    assert runs == [True, True]
    runs.clear()
    monkeypatch.setattr(Trial, "run", lambda *arguments: run("survived " * 6, *arguments))
    assert [entry["outcome"] for entry in _run_site(work)] == ["survived"] * 4
    assert runs == [True] * 2 + [False] * 4


def test_programs_are_chosen_by_what_their_runs_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program twice: once will do."""
    target = target_of(load_registry("tiny_latent_moe"), KEY, "sm_90a")
    monkeypatch.setattr("cakegen.emulator.mutation.campaign.all_targets", lambda registry, arch: [target, target])
    seen: list[tuple[int, int]] = []
    assert choose_keys("tiny_latent_moe", "sm_90a", 1, lambda done, total: seen.append((done, total))) == (target.name,)
    assert seen == [(1, 2), (2, 2)]


def test_choice_takes_rings_that_wrap_first_and_fast_programs_among_equals() -> None:
    sites = [("parity", "flipped", "mbarrier", (text,)) for text in "abcde"]
    programs = [
        Reached("long", True, 900, set(sites[:4])),
        Reached("short", True, 100, set(sites[:4])),
        Reached("flat", False, 1, set(sites)),
        Reached("idle", True, 1, set()),
    ]
    assert choose(programs) == ("short", "flat")
