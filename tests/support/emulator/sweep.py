"""Programs of one architecture on the emulator, each key under several requests and schedules; what `make emulate-full`
runs.

Writes one row a request to a table, and starts again where it stopped: a row stays as long as the texts of its program
(their digest) are the same. The table is whole whenever the sweep is killed. With `--split` each schedule of a request
is a row of its own, in a table beside the other, until all of them are there: for requests that take minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import functools
import hashlib
import itertools
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from cakegen.arch import architecture
from cakegen.emulator import Options
from cakegen.emulator.faults import Fault
from cakegen.emulator.launches.cases import Case, CaseReport, emulate_case, find_case, find_cases
from cakegen.errors import EmulationError
from cakegen.model import Model
from cakegen.plan import family_of
from cakegen.plan.records import DecodeForm
from cakegen.registry import Registry, load_registry

ABOUT = ("export", "arch", "key", "digest", "stage", "tp", "tokens", "partials", "rank", "sms", "schedules")
COLUMNS = (*ABOUT, "verdict", "errors", "instructions", "seconds")
PART_COLUMNS = (*COLUMNS, "bits")
EXTREMES = (("early", 0), ("late", 0))
ROW_TILE_ENDS = (129, 255, 256, 257, 384, 385, 511, 512, 513)


@dataclass(frozen=True)
class Sweep:
    """Which keys of an export to run for an architecture, and how.

    Parameters
    ----------
    seeds
        Random schedules of each request, beside the two extremes (0: one random schedule and no extreme).
    edges
        Also the fewest tokens that reach a key, and one token less than the most; of Blackwell's prefill the ends of
        row tiles, each on an SM count that reaches the key there.
    parts
        Each key on every SM count of the target that reaches it, instead of on the largest.
    match
        Only keys in which this regular expression is found.
    only
        The one schedule to run of those, if any.
    """

    export: str
    arch: str
    seeds: int
    edges: bool
    match: str = ""
    only: tuple[str, int] | None = None
    parts: bool = False

    @property
    def schedules(self) -> tuple[tuple[str, int], ...]:
        """What each request runs under."""
        if self.only:
            return (self.only,)
        return (*EXTREMES, *(("random", seed) for seed in range(self.seeds))) if self.seeds else (("random", 0),)


def program_keys(registry: Registry, arch: str, match: str = "") -> list[str]:
    """Every key for an architecture in which a regular expression is found."""
    return [key for key in registry.kernels if arch in registry.program(key).arches and re.search(match, key)]


def cases_of(registry: Registry, sweep: Sweep) -> dict[str, tuple[Case, ...]]:
    """The requests to run for each key: the most tokens of decode or the fewest of prefill, on the last rank; edges."""
    keys = program_keys(registry, sweep.arch, sweep.match)
    if sweep.parts:
        return {key: tuple(_cases_by_part(registry, key, sweep.arch)) for key in keys}
    found = find_cases(registry, keys, sweep.arch)
    if not sweep.edges:
        return {key: (case,) for key, case in found.items()}
    return {key: (case, *_edges(registry.model, key, case)) for key, case in found.items()}


def _cases_by_part(registry: Registry, key: str, arch: str) -> Iterator[Case]:
    """The request that reaches a key on each SM count of a target, where one does."""
    target = registry.model.target(arch)
    assert target is not None
    for sm_count in target.sm_counts:
        one = dataclasses.replace(target, sm_counts=(sm_count,))
        model = dataclasses.replace(registry.model, targets=(one,))
        with contextlib.suppress(EmulationError):
            yield find_case(dataclasses.replace(registry, model=model), key, arch)


def _edges(model: Model, key: str, found: Case) -> Iterator[Case]:
    is_prefill = not isinstance(found.plan(model).launches[-1].form, DecodeForm)
    if is_prefill and architecture(found.arch).family == "sm100":
        yield from _row_tile_edges(model, key, found)
    else:
        # of Hopper's prefill, which has its sizes run on a device, only near the request that was found
        decode = family_of(found.arch).decode(model)
        yield from _count_edges(model, key, found, decode.max_cta_tokens + 1 if is_prefill else 1)


def _count_edges(model: Model, key: str, largest: Case, first: int) -> Iterator[Case]:
    """The fewest tokens with one partial or as few as reach the key, on rank 0; and the most but one, with P = 2."""
    for tokens, partials in itertools.product(range(first, largest.tokens), (1, 2)):
        case = Case(largest.stage, largest.tp, tokens, partials, largest.sm_count, 0, largest.arch)
        if _launches(model, case, key):
            yield case
            break
    rank = largest.tp // 2 if largest.stage == "tail" else 0
    for partials in (2, 1):
        case = Case(largest.stage, largest.tp, largest.tokens - 1, partials, largest.sm_count, rank, largest.arch)
        if case.tokens and _launches(model, case, key):
            yield case
            break


def _row_tile_edges(model: Model, key: str, found: Case) -> Iterator[Case]:
    """Token counts at which the last pair row has one row, one less than all, or all of either CTA; P and rank in turn.

    SM counts take turns too, since they decide how tiles are cut.
    """
    target = model.target(found.arch)
    assert target is not None
    counts, is_tail = target.sm_counts, found.stage == "tail"
    for number, tokens in enumerate(ROW_TILE_ENDS):
        turned = (*counts[number % len(counts) :], *counts[: number % len(counts)])
        partials, rank = (number % 3 + 1, number % found.tp) if is_tail else (1, 0)
        cases = (Case(found.stage, found.tp, tokens, partials, count, rank, found.arch) for count in turned)
        yield from itertools.islice((case for case in cases if case != found and _launches(model, case, key)), 1)


def _launches(model: Model, case: Case, key: str) -> bool:
    if case.stage == "front" and case.partials > 1:
        return False
    return any(launch.key == key for launch in case.plan(model).launches)


def run_case(
    registry: Registry, case: Case, schedules: Sequence[tuple[str, int]], scopes: str = "practice"
) -> tuple[str, CaseReport | None]:
    """Run one request under all schedules: `clean`, or what is wrong; and the first report."""
    first: CaseReport | None = None
    for schedule in schedules:
        try:
            report = emulate_case(registry, case, Options(*schedule, "wide", scopes=scopes))
        except Fault as fault:
            return f"{schedule[0]} {schedule[1]}: {fault.kind}", first
        if report.problems:
            return f"{schedule[0]} {schedule[1]}: {report.problems[0]}", first
        first = first or report
        for name, value in report.outputs.items():
            if not torch.equal(value, first.outputs[name]):
                return f"{schedule[0]} {schedule[1]}: other bits of {name}", first
    return "clean", first


def rows_of(sweeps: Sequence[Sweep], known: set[tuple[str, ...]], jobs: int = 1) -> Iterator[dict[str, str]]:
    """A row for each request that is not known yet, as it ends; `jobs` processes, or this one."""
    todo = [
        (row, case, sweep)
        for sweep in sweeps
        for row, case in _requests(_registry(sweep.export), sweep)
        if identity(row) not in known
    ]
    # what takes longest goes first, so that it does not end alone
    todo.sort(key=lambda item: (-item[1].tokens, item[1].tp))
    if jobs == 1:
        yield from map(_run_row, todo)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from (done.result() for done in as_completed([pool.submit(_run_row, item) for item in todo]))


def parts_of(sweep: Sweep) -> list[Sweep]:
    """A sweep for each of its schedules."""
    return [dataclasses.replace(sweep, only=schedule) for schedule in sweep.schedules]


def join_parts(sweep: Sweep, parts: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """The rows of a sweep's requests whose parts are all there: clean if each is, and all have the same bits."""
    found = {identity(part): part for part in parts}
    rows = []
    for row, _ in _requests(_registry(sweep.export), sweep):
        schedules = row["schedules"].split()
        own = [found.get(identity({**row, "schedules": schedule})) for schedule in schedules]
        present = [part for part in own if part]
        if len(present) == len(schedules):
            rows.append({**row, **_joined(present)})
    return rows


def _joined(parts: list[dict[str, str]]) -> dict[str, str]:
    first = parts[0]
    wrong = [part["verdict"] for part in parts if part["verdict"] != "clean"]
    wrong += [f"{part['schedules']}: other bits" for part in parts if part["bits"] != first["bits"]]
    return {
        "verdict": wrong[0] if wrong else "clean",
        "errors": first["errors"],
        "instructions": first["instructions"],
        "seconds": f"{sum(float(part['seconds']) for part in parts):.1f}",
    }


def _requests(registry: Registry, sweep: Sweep) -> Iterator[tuple[dict[str, str], Case]]:
    schedules = " ".join(f"{name}:{seed}" for name, seed in sweep.schedules)
    for key, cases in cases_of(registry, sweep).items():
        digest = dict(registry.program(key).closure_digest)[sweep.arch][:12]
        for case in cases:
            shape = (case.stage, case.tp, case.tokens, case.partials, case.rank, case.sm_count)
            about = (sweep.export, sweep.arch, key, digest, *map(str, shape), schedules)
            yield dict(zip(ABOUT, about, strict=True)), case


def _run_row(item: tuple[dict[str, str], Case, Sweep]) -> dict[str, str]:
    row, case, sweep = item
    torch.set_num_threads(1)
    start = time.perf_counter()
    verdict, report = run_case(_registry(sweep.export), case, sweep.schedules)
    errors = report.errors if report else {}
    return {
        **row,
        "verdict": verdict,
        "errors": " ".join(f"{name}:{value:.3g}" for name, value in errors.items()),
        "instructions": str(sum(launch.instructions for launch in report.launches) if report else 0),
        "seconds": f"{time.perf_counter() - start:.1f}",
        "bits": _digest(report) if report else "",
    }


def _digest(report: CaseReport) -> str:
    """Of the bits of all outputs."""
    seen = hashlib.sha256()
    for _, value in sorted(report.outputs.items()):
        seen.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()[:12]


@functools.cache
def _registry(export: str) -> Registry:
    return load_registry(export)


def identity(row: dict[str, str]) -> tuple[str, ...]:
    """What a row is about: all but what came of it."""
    return tuple(row[name] for name in ABOUT)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream, delimiter="\t"))


def write_rows(path: Path, rows: Iterable[dict[str, str]], columns: Sequence[str] = COLUMNS) -> None:
    """Write a table, sorted by what its rows are about; whoever reads finds the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new")
    with beside.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, delimiter="\t", lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(sorted(rows, key=identity))
    os.replace(beside, path)


def run_missing(path: Path, sweeps: Sequence[Sweep], jobs: int, columns: Sequence[str]) -> list[dict[str, str]]:
    """Run what a table lacks of sweeps over one export and architecture, written row by row; all of its rows."""
    rows = current_rows(path, sweeps[0])
    for row in rows_of(sweeps, {identity(row) for row in rows if row["verdict"] == "clean"}, jobs):
        rows = [other for other in rows if identity(other) != identity(row)] + [row]
        write_rows(path, rows, columns)
        sys.stderr.write(f"{row['verdict']}  {row['key']}  T {row['tokens']}  {row['schedules']}  {row['seconds']} s\n")
    return rows


def current_rows(path: Path, sweep: Sweep) -> list[dict[str, str]]:
    """A table's rows, less those of a program whose text has changed since: they say nothing."""
    registry = _registry(sweep.export)
    keys = program_keys(registry, sweep.arch)
    digests = {dict(registry.program(key).closure_digest)[sweep.arch][:12] for key in keys}
    swept = (sweep.export, sweep.arch)
    return [row for row in read_rows(path) if (row["export"], row["arch"]) != swept or row["digest"] in digests]


def run_split(path: Path, sweep: Sweep, jobs: int) -> list[dict[str, str]]:
    """As `run_missing`, a schedule at a time: parts in a table beside, which goes once the rows are made of them."""
    rows = current_rows(path, sweep)
    known = {identity(row) for row in rows if row["verdict"] == "clean"}
    if all(identity(row) in known for row, _ in _requests(_registry(sweep.export), sweep)):
        return rows
    beside = path.with_name(f"{path.name}.parts")
    joined = join_parts(sweep, run_missing(beside, parts_of(sweep), jobs, PART_COLUMNS))
    made = {identity(row) for row in joined}
    rows = [row for row in rows if identity(row) not in made] + joined
    write_rows(path, rows)
    beside.unlink()
    return rows


def main() -> int:
    """Run what is missing in a table; 1 where a row is not clean."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--export", default="tiny_latent_moe")
    parser.add_argument("--arch", default="sm_100a")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--edges", action="store_true")
    parser.add_argument("--match", default="")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--split", action="store_true")
    given = parser.parse_args()
    sweep = Sweep(given.export, given.arch, given.seeds, given.edges, given.match, parts=given.parts)
    if given.split:
        rows = run_split(given.table, sweep, given.jobs)
    else:
        rows = run_missing(given.table, [sweep], given.jobs, COLUMNS)
    return int(any(row["verdict"] != "clean" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
