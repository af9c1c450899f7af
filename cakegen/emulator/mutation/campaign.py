"""Many mutants, on several processors, into a file that a killed run leaves usable. Imports targets, trial, compile.

The file holds one JSON object a line: a header, then one object a mutant, each written as soon as it is known. A run
with the same file goes on where the last one ended.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cakegen.compile import load_nvrtc
from cakegen.emulator.mutation.mutants import Mutant
from cakegen.emulator.mutation.targets import Site, Target, all_targets, target_of
from cakegen.emulator.mutation.trial import Trial
from cakegen.errors import EmulationError
from cakegen.registry import Registry, load_registry

# Programs that reach this share of what the best one reaches are as good, and the fastest of them is taken.
_NEARLY = 0.8


@dataclass(frozen=True)
class Campaign:
    """What is run: the mutants of some programs of an export, under both extremes and so many seeds.

    Parameters
    ----------
    operators
        Names of operators; empty: all.
    """

    export: str
    arch: str
    keys: tuple[str, ...]
    seeds: int
    operators: tuple[str, ...] = ()

    def header(self) -> dict[str, Any]:
        """The first line of the file: what a resumed run must agree with."""
        return {**json.loads(json.dumps(asdict(self))), "nvrtc": load_nvrtc().label}


def choose_keys(
    registry: Registry, arch: str, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[str, ...]:
    """A few programs whose runs reach every site that the run of any program reaches.

    Programs whose rings wrap around come first: what a ring needs only then shows only there. Of those that reach
    nearly as many missing sites as the best one, the one that runs fewest instructions.
    """
    targets = list(all_targets(registry, arch))
    reached: list[Reached] = []
    for number, target in enumerate(targets, 1):
        trial = Trial(registry, target, 0)
        sites = {target.site(each) for each in trial.reached(target.mutants)}
        reached.append(Reached(target.name, trial.wraps, trial.instructions, sites))
        on_progress(number, len(targets))
    return choose(reached)


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


@functools.lru_cache(maxsize=2)
def _trial(export: str, key: str, arch: str, seeds: int) -> Trial:
    registry = _registry(export)
    return Trial(registry, target_of(registry, key, arch), seeds)


Work = tuple[str, str, str, int, int]


def _run_one(work: Work) -> dict[str, Any]:
    """One mutant by its number, in a worker."""
    export, key, arch, seeds, number = work
    trial = _trial(export, key, arch, seeds)
    mutant = trial.target.mutants[number]
    return {**describe(trial.target, mutant), **asdict(trial.run(mutant))}


def describe(target: Target, mutant: Mutant) -> dict[str, Any]:
    """A mutant's entry in the file, without its verdict."""
    return {
        "id": identity(target, mutant),
        "key": target.name,
        "operator": mutant.operator,
        "change": mutant.change,
        "instruction": mutant.instruction.text[:120],
        "line": target.kernel_line(mutant),
        "site": site_name(target.site(mutant)),
        "place": str(mutant.instruction.place),
    }


def identity(target: Target, mutant: Mutant) -> str:
    """What names a mutant in the file: its program and its edits."""
    what = json.dumps([target.name, target.request.name, mutant.operator, mutant.change, mutant.edits])
    return hashlib.sha256(what.encode()).hexdigest()[:16]


def site_name(site: Site) -> str:
    """A short name of a site, the same in every program."""
    return hashlib.sha256(json.dumps(site).encode()).hexdigest()[:12]


def planned(campaign: Campaign) -> list[tuple[str, Work]]:
    """(identity, work) of every mutant of a campaign whose instruction the program reaches."""
    registry = _registry(campaign.export)
    found = []
    for key in campaign.keys:
        trial = Trial(registry, target_of(registry, key, campaign.arch), 0)
        reached = set(trial.reached(trial.target.mutants))
        for number, mutant in enumerate(trial.target.mutants):
            if mutant in reached and (not campaign.operators or mutant.operator in campaign.operators):
                work = (campaign.export, key, campaign.arch, campaign.seeds, number)
                found.append((identity(trial.target, mutant), work))
    return found


def read_campaign(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(header, results) of a file; a last line that was cut off is left out.

    Raises
    ------
    EmulationError
        It is no file of a campaign.
    """
    lines = file.read_text(encoding="utf-8").split("\n")
    # what follows the last newline was cut off, or is nothing
    rows = [json.loads(line) for line in lines[:-1] if line]
    if not rows or "nvrtc" not in rows[0]:
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
        done = {entry["id"] for entry in results}
        _cut_off(file)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(header) + "\n", encoding="utf-8")
    work = planned(campaign)
    left = [each for name, each in work if name not in done]
    finished = len(work) - len(left)
    on_progress(finished, len(work), None)
    with file.open("a", encoding="utf-8") as out:
        for number, entry in enumerate(_results(left, jobs), finished + 1):
            out.write(json.dumps(entry) + "\n")
            out.flush()
            on_progress(number, len(work), entry)


def _cut_off(file: Path) -> None:
    """Remove what a killed run left behind the last newline."""
    raw = file.read_bytes()
    file.write_bytes(raw[: raw.rindex(b"\n") + 1])


def _results(work: Sequence[Work], jobs: int) -> Iterator[dict[str, Any]]:
    if jobs == 1:
        yield from map(_run_one, work)
        return
    # spawned: a forked child would share the parent's threads of numpy and torch
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        results: Iterable[dict[str, Any]] = pool.imap_unordered(_run_one, work, chunksize=4)
        yield from results
