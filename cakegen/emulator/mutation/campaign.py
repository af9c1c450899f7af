"""Many mutants, on several processors, into a file that a killed run leaves usable.

The file holds one JSON object a line: a header, then one object a mutant, written as soon as its site is done. A run
with the same file goes on where the last one ended.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from cakegen.compile import load_nvrtc
from cakegen.emulator.mutation.mutants import Mutant
from cakegen.emulator.mutation.sequences import SequenceTarget, SequenceTrial
from cakegen.emulator.mutation.targets import Mutated, Site, all_targets, target_of
from cakegen.emulator.mutation.trial import ALIVE, RequestTrial, Trial
from cakegen.errors import EmulationError
from cakegen.registry import Registry, load_registry

# Programs that reach this share of what the best one reaches are as good, and the fastest of them is taken.
_NEARLY = 0.8
# Sites, or programs, that a process takes at a time.
_CHUNK = 4
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Campaign:
    """What is run: the mutants of some programs, of an export or of launch files, under both extremes and the seeds.

    Parameters
    ----------
    keys
        Programs, as `target_of` reads them; or the names of `sequences`.
    operators
        Names of operators; empty: all.
    attempts
        Mutants of one site that run under all schedules until one is killed. Before them one a program runs under
        the first schedule.
    """

    export: str
    arch: str
    keys: tuple[str, ...]
    seeds: int
    operators: tuple[str, ...] = ()
    attempts: int = 4
    sequences: tuple[SequenceTarget, ...] = ()

    def header(self) -> dict[str, Any]:
        """The first line of the file: what a resumed run must agree with."""
        major, minor = load_nvrtc().version
        if self.sequences:
            texts: list[Any] = [each.digest for each in self.sequences]
        else:
            registry = _registry(self.export)
            texts = [registry.program(name.partition("/")[0]).closure_digest for name in self.keys]
        digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
        given = {name: value for name, value in vars(self).items() if name != "sequences"}
        return {**json.loads(json.dumps(given)), "nvrtc": f"NVRTC {major}.{minor}", "source_digest": digest}

    def trial(self, name: str) -> Trial:
        """The trial of one of its programs; a process keeps those that it has made."""
        for sequence in self.sequences:
            if sequence.name == name:
                return _sequence_trial(sequence, self.seeds)
        return _trial(self.export, name, self.arch, self.seeds)


def choose_keys(
    export: str, arch: str, jobs: int, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[str, ...]:
    """A few programs whose runs reach every site that the run of any program reaches.

    Programs whose rings wrap around come first: what a ring needs only then shows only there. Of those that reach
    nearly as many missing sites as the best one, the one that runs fewest instructions.
    """
    names = [target.name for target in all_targets(_registry(export), arch)]
    reached: list[Reached] = []
    for each in _mapped(functools.partial(_reach, export, arch), names, jobs):
        reached.append(each)
        on_progress(len(reached), len(names))
    # workers end in any order
    return choose(sorted(reached, key=lambda program: names.index(program.name)))


def _reach(export: str, arch: str, name: str) -> Reached:
    trial = _trial(export, name, arch, 0)
    sites = {trial.target.site(each) for each in trial.reached(trial.target.mutants)}
    return Reached(name, trial.wraps, trial.instructions, sites)


@dataclass(frozen=True)
class Reached:
    """What a program's run reaches."""

    name: str
    wraps: bool
    instructions: int
    sites: set[Site]


def choose(programs: Sequence[Reached]) -> tuple[str, ...]:
    """A few programs that reach together what all reach."""
    missing: set[Site] = set().union(*(program.sites for program in programs))
    chosen = []
    while missing:
        useful = [program for program in programs if program.sites & missing]
        pool = [program for program in useful if program.wraps] or useful
        most = max(len(program.sites & missing) for program in pool)
        near = [program for program in pool if len(program.sites & missing) >= _NEARLY * most]
        best = min(near, key=lambda program: program.instructions)
        missing -= best.sites
        chosen.append(best.name)
    return tuple(chosen)


@functools.cache
def _registry(export: str) -> Registry:
    torch.set_num_threads(1)
    return load_registry(export)


@functools.lru_cache(maxsize=16)
def _trial(export: str, name: str, arch: str, seeds: int) -> RequestTrial:
    registry = _registry(export)
    return RequestTrial(registry, target_of(registry, name, arch), seeds)


@functools.lru_cache(maxsize=16)
def _sequence_trial(target: SequenceTarget, seeds: int) -> SequenceTrial:
    return SequenceTrial(target, seeds)


@dataclass(frozen=True)
class Work:
    """A site: the mutants of it that may be run, as (program, number of the mutant); the first `programs` differ."""

    campaign: Campaign
    site: str
    candidates: tuple[tuple[str, int], ...]
    programs: int


def _run_site(work: Work) -> list[dict[str, Any]]:
    """Run a site's mutants until one is killed; in a worker."""
    campaign, entries = work.campaign, []
    quick = [(candidate, True) for candidate in work.candidates[: work.programs]]
    thorough = [(candidate, False) for candidate in work.candidates[: campaign.attempts]]
    for (name, number), first_only in (*quick, *thorough):
        trial = campaign.trial(name)
        mutant = trial.target.mutants[number]
        verdict = trial.run(mutant, first_only)
        entries.append({**describe(trial.target, mutant), **asdict(verdict)})
        if verdict.killed:
            break
    # a mutant that survived the first schedule was run again under all
    return entries if entries[-1]["outcome"] not in ALIVE else entries[len(quick) :]


def describe(target: Mutated, mutant: Mutant) -> dict[str, Any]:
    """A mutant's entry in the file, without its verdict."""
    return {
        "key": target.name,
        "operator": mutant.operator,
        "change": mutant.change,
        "instruction": mutant.instruction.text[:120],
        "line": target.kernel_line(mutant),
        "site": site_name(target.site(mutant)),
        "place": str(mutant.instruction.place),
    }


def site_name(site: Site) -> str:
    """A short name of a site, the same in every program."""
    return hashlib.sha256(json.dumps(site).encode()).hexdigest()[:12]


def planned(campaign: Campaign) -> list[Work]:
    """Every site that the programs of a campaign reach, in the order of their hashes.

    So a run that was ended early has done a fair sample.
    """
    found: dict[str, dict[str, list[int]]] = {}
    for name in campaign.keys:
        trial = campaign.trial(name)
        reached = set(trial.reached(trial.target.mutants))
        for number, mutant in enumerate(trial.target.mutants):
            if mutant in reached and (not campaign.operators or mutant.operator in campaign.operators):
                found.setdefault(site_name(trial.target.site(mutant)), {}).setdefault(name, []).append(number)
    return [Work(campaign, site, _candidates(found[site]), len(found[site])) for site in sorted(found)]


def _candidates(numbers: dict[str, list[int]]) -> tuple[tuple[str, int], ...]:
    """The first mutant of each program, then the second of each, …"""
    ranked = [(rank, name, number) for name, each in numbers.items() for rank, number in enumerate(each)]
    # the sort is stable: programs stay in their order
    return tuple((name, number) for _, name, number in sorted(ranked, key=lambda entry: entry[0]))


def read_campaign(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(header, results) of a file; a last line that was cut off is left out.

    Raises
    ------
    EmulationError
        It is no file of a campaign.
    """
    # what follows the last newline was cut off, or is nothing
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1] if line]
    except ValueError as error:
        raise EmulationError(f"{file}: holds no results of a mutation run ({error}); give another file") from None
    if not rows or not isinstance(rows[0], dict) or "nvrtc" not in rows[0]:
        raise EmulationError(f"{file}: its first line is no header of a mutation run; give another file")
    return rows[0], rows[1:]


def run_campaign(
    campaign: Campaign, file: Path, jobs: int, on_progress: Callable[[int, int, dict[str, Any] | None], None]
) -> None:
    """Run what the file does not hold yet.

    Raises
    ------
    EmulationError
        The file belongs to another campaign.
    """
    header, done = campaign.header(), set()
    if file.exists() and file.stat().st_size:
        before, results = read_campaign(file)
        if before != header:
            changed = [name for name in header if before.get(name) != header[name]]
            raise EmulationError(f"{file}: holds a run with another {', '.join(changed)}; give another file")
        done = {entry["site"] for entry in results}
        _cut_off(file)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(header) + "\n", encoding="utf-8")
    work = planned(campaign)
    left = [each for each in work if each.site not in done]
    finished = len(work) - len(left)
    on_progress(finished, len(work), None)
    with file.open("a", encoding="utf-8") as out:
        for number, entries in enumerate(_mapped(_run_site, left, jobs), finished + 1):
            # one write a site: what is in the file is whole
            out.write("".join(f"{json.dumps(entry)}\n" for entry in entries))
            out.flush()
            on_progress(number, len(work), entries[-1])


def _cut_off(file: Path) -> None:
    """Remove what a killed run left behind the last newline."""
    raw = file.read_bytes()
    file.write_bytes(raw[: raw.rindex(b"\n") + 1])


def _mapped(function: Callable[[_Item], _Result], items: Sequence[_Item], jobs: int) -> Iterator[_Result]:
    """Results as they come, of several processes."""
    if jobs == 1:
        yield from map(function, items)
        return
    # spawned: a forked child would share the parent's threads of numpy and torch
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(function, items, chunksize=_CHUNK)
