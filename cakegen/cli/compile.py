"""`cakegen compile`: every program of an export to a cubin, and what each takes. Imports cakegen inside functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from cakegen.cli.selection import Selection, select_keys, selected_by, take_selection
from cakegen.cli.table import fitted_lines

if TYPE_CHECKING:
    from cakegen.compile import CompiledProgram, CompileRequest, Outcome
    from cakegen.registry import Registry

_COLUMNS = (
    "program",
    "arch",
    "registers",
    "shared memory",
    "stack",
    "instructions",
    "cubin",
    "lines",
    "ms",
    "from",
    "keys",
)
# on a narrow terminal, the first of them first
_FIRST_TO_GO = ("from", "lines", "ms", "cubin", "program", "stack", "instructions")


@dataclass(frozen=True)
class Job:
    """One compilation: its request, the logical keys it serves, and the launch's dynamic shared memory."""

    request: CompileRequest
    keys: tuple[str, ...]
    dynamic_smem_bytes: int


@click.command("compile")
@selected_by
@click.option("--jobs", type=click.IntRange(min=1), help="Programs at once; by default one a processor.")
@click.option(
    "--flag",
    "flags",
    multiple=True,
    help="Further compiler option that a tree may ask for, e.g. -DCAKEGEN_CHAOS; may be repeated.",
)
@click.option("--clear-cache", is_flag=True, help="Remove every cached cubin first.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, one line a program and target.")
def compile_command(
    export: str, jobs: int | None, flags: tuple[str, ...], clear_cache: bool, as_json: bool, **selection: Any
) -> None:
    """Compile programs to cubins through the cache and report what each takes.

    KEY is a logical key, a program's name, or a pattern of either (`decode:*`); without one, every program is compiled.
    """
    from cakegen import compile as compiling
    from cakegen.registry import load_registry

    selected = jobs_of(load_registry(export), take_selection(selection), flags)
    # only for a command line that is right, and a compiler that is there: what goes is compiled again
    compiling.load_nvrtc()
    if clear_cache:
        click.echo(f"removed {compiling.clear_cache()} files from {compiling.cache_root()}", err=True)
    outcomes = compile_with_progress(selected, jobs)
    if as_json:
        for job, outcome in zip(selected, outcomes, strict=True):
            click.echo(json.dumps(_literal(job, outcome)))
    else:
        show_outcomes(selected, outcomes)
    failures = failures_of(selected, outcomes)
    for failure in failures:
        click.echo(failure, err=True)
    if failures:
        raise click.exceptions.Exit(1)


def select_jobs(registry: Registry, patterns: Sequence[str] = ()) -> list[Job]:
    """The compilations behind keys that match some patterns, for all targets; raises as `jobs_of`."""
    return jobs_of(registry, Selection(tuple(patterns)))


def jobs_of(registry: Registry, selection: Selection, flags: Sequence[str] = ()) -> list[Job]:
    """The compilations behind some keys, each once, in the registry's order.

    Raises
    ------
    click.UsageError
        A pattern, a target or the requests match nothing.
    """
    from cakegen.compile import request_for

    found: dict[CompileRequest, list[str]] = {}
    for key in select_keys(registry, selection):
        for arch in registry.program(key).arches:
            if not selection.arches or arch in selection.arches:
                found.setdefault(request_for(registry, key, arch, flags), []).append(key)
    return [
        Job(request, tuple(served), registry.programs[request.name].launch.dynamic_smem_bytes)
        for request, served in found.items()
    ]


def compile_with_progress(selected: Sequence[Job], jobs: int | None = None) -> list[Outcome]:
    """Compile all of `selected`, with progress on stderr.

    Raises
    ------
    CompileError
        There is no compiler; what it refuses is an outcome.
    """
    from cakegen.cli.progress import progress
    from cakegen.compile import compile_many, load_nvrtc

    load_nvrtc()
    with progress(len(selected)) as advance:
        return compile_many([job.request for job in selected], jobs, lambda request, _: advance(request.name))


def show_outcomes(selected: Sequence[Job], outcomes: Sequence[Outcome]) -> None:
    """Print one row a compiled program and a closing line: as wide as the terminal, else columns parted by tabs."""
    from rich.console import Console

    from cakegen.compile import load_nvrtc

    console = Console()
    if console.is_terminal:
        # a program's name ends in what tells it from others
        short = [(name.rpartition("_")[2], *cells) for name, *cells in _rows(selected, outcomes)]
        for line in fitted_lines(_COLUMNS, short, console.width, _FIRST_TO_GO):
            click.echo(line)
    else:
        click.echo(table_text(selected, outcomes), nl=False)
    click.echo(f"{closing_line(selected, outcomes)}; {load_nvrtc().label}")


def table_text(selected: Sequence[Job], outcomes: Sequence[Outcome]) -> str:
    """The columns' names, and below them a line a compiled program; columns are parted by tabs."""
    return "".join("\t".join(row) + "\n" for row in (_COLUMNS, *_rows(selected, outcomes)))


def family_lines(registry: Registry, selected: Sequence[Job], outcomes: Sequence[Outcome]) -> Iterator[str]:
    """One line a kernel family: how many programs of it were compiled, the worst of them, and the compiler's time."""
    families: dict[str, list[CompiledProgram]] = {}
    for _, program in compiled_of(selected, outcomes):
        families.setdefault(registry.programs[program.name].role, []).append(program)
    for family, programs in sorted(families.items()):
        reports = [program.report for program in programs]
        spilled = max(report.spill_bytes for report in reports)
        yield (
            f"{family}: {len(programs)} program{'s' * (len(programs) != 1)}, at most "
            f"{max(report.registers for report in reports)} registers a thread, "
            f"{f'at most {spilled} bytes spilled' if spilled else 'no spills'}; "
            f"{sum(report.compile_ms for report in reports) / 1e3:.1f} s of compiling"
        )


def compiled_of(selected: Sequence[Job], outcomes: Sequence[Outcome]) -> list[tuple[Job, CompiledProgram]]:
    """What was not refused."""
    from cakegen.errors import CompileError

    return [(job, out) for job, out in zip(selected, outcomes, strict=True) if not isinstance(out, CompileError)]


def _rows(selected: Sequence[Job], outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    return [_row(job, program) for job, program in compiled_of(selected, outcomes)]


def _literal(job: Job, outcome: Outcome) -> dict[str, Any]:
    """What `--json` says of a program: sizes in bytes, or the compiler's refusal."""
    from cakegen.errors import CompileError
    from cakegen.review.cost import cost_of

    about = {"program": job.request.name, "arch": job.request.arch, "keys": list(job.keys)}
    if isinstance(outcome, CompileError):
        return {**about, "error": str(outcome)}
    cost = cost_of(outcome, job.dynamic_smem_bytes)
    return {
        **about,
        "registers": cost.registers,
        "smem_bytes": cost.smem_bytes,
        "stack_bytes": outcome.report.stack_bytes,
        "spill_bytes": cost.spill_bytes,
        "instructions": cost.instructions,
        "cubin_bytes": outcome.report.cubin_bytes,
        "lines": job.request.source.count("\n"),
        "compile_ms": outcome.report.compile_ms,
        "cached": outcome.cached,
    }


def failures_of(selected: Sequence[Job], outcomes: Sequence[Outcome]) -> list[str]:
    """A paragraph for each program that was refused: its target, its first key, and the compiler's words."""
    from cakegen.errors import CompileError

    return [
        f"FAILED {job.keys[0]} ({job.request.arch}): {outcome}"
        for job, outcome in zip(selected, outcomes, strict=True)
        if isinstance(outcome, CompileError)
    ]


def _row(job: Job, program: CompiledProgram) -> tuple[str, ...]:
    from cakegen.review.cost import cost_of

    report = program.report
    cost = cost_of(program, job.dynamic_smem_bytes)
    others = f" (+{len(job.keys) - 1})" if len(job.keys) > 1 else ""
    return (
        program.name,
        program.arch,
        str(report.registers),
        str(cost.smem_bytes),
        str(report.stack_bytes),
        str(cost.instructions),
        str(report.cubin_bytes),
        str(job.request.source.count("\n")),
        f"{report.compile_ms:.0f}",
        "cache" if program.cached else "compiler",
        f"{job.keys[0]}{others}",
    )


def closing_line(selected: Sequence[Job], outcomes: Sequence[Outcome]) -> str:
    """How many programs were compiled, came from the cache, or were refused, and their bytes."""
    compiled = [program for _, program in compiled_of(selected, outcomes)]
    fresh = sum(not program.cached for program in compiled)
    total_bytes = sum(program.report.cubin_bytes for program in compiled)
    return (
        f"{len(compiled)} of {len(selected)} programs: {fresh} compiled, {len(compiled) - fresh} from the cache, "
        f"{len(selected) - len(compiled)} failed; {total_bytes} bytes"
    )
