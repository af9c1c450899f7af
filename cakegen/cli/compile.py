"""`cakegen compile`: every program of an export to a cubin, and what each takes. Imports cakegen inside functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

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


@dataclass(frozen=True)
class Job:
    """One compilation: its request, the logical keys it serves, and the launch's dynamic shared memory."""

    request: CompileRequest
    keys: tuple[str, ...]
    dynamic_smem_bytes: int


@click.command("compile")
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--export", "export", default="kimi_k3_latent_moe", show_default=True, help="Export, or a tree's folder.")
@click.option("--arch", "arches", multiple=True, help="Only this target, e.g. sm_90a; may be repeated.")
@click.option("--jobs", type=click.IntRange(min=1), help="Programs at once; by default one a processor.")
@click.option(
    "--flag",
    "flags",
    multiple=True,
    help="Further compiler option that a tree may ask for, e.g. -DCAKEGEN_CHAOS; may be repeated.",
)
@click.option("--clear-cache", is_flag=True, help="Remove every cached cubin first.")
def compile_command(
    keys: tuple[str, ...],
    export: str,
    arches: tuple[str, ...],
    jobs: int | None,
    flags: tuple[str, ...],
    clear_cache: bool,
) -> None:
    """Compile programs to cubins through the cache and report what each takes.

    KEY is a logical key, a program's name, or a pattern of either (`decode:*`); without one, every program is compiled.
    """
    from cakegen import compile as compiling
    from cakegen.registry import load_registry

    selected = select_jobs(load_registry(export), keys, arches, flags)
    # only for a command line that is right, and a compiler that is there: what goes is compiled again
    compiling.load_nvrtc()
    if clear_cache:
        click.echo(f"removed {compiling.clear_cache()} files from {compiling.cache_root()}", err=True)
    outcomes = compile_with_progress(selected, jobs)
    show_outcomes(selected, outcomes)
    failures = failures_of(selected, outcomes)
    for failure in failures:
        click.echo(failure, err=True)
    if failures:
        raise click.exceptions.Exit(1)


def select_jobs(
    registry: Registry, patterns: Sequence[str] = (), arches: Sequence[str] = (), flags: Sequence[str] = ()
) -> list[Job]:
    """The compilations behind some keys, each once, in the registry's order.

    Raises
    ------
    click.UsageError
        A pattern or a target matches nothing.
    """
    from cakegen.compile import request_for

    wanted = _matching_keys(registry, patterns)
    found: dict[CompileRequest, list[str]] = {}
    for key in wanted:
        for arch in registry.program(key).arches:
            if not arches or arch in arches:
                found.setdefault(request_for(registry, key, arch, flags), []).append(key)
    unused = sorted(set(arches) - {request.arch for request in found})
    if unused or not found:
        present = sorted({arch for key in wanted for arch in registry.program(key).arches})
        raise click.UsageError(
            f"{registry.export}: no selected program is written for {', '.join(unused) or 'any target'}; "
            f"there is: {', '.join(present) or 'none'}"
        )
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
    """Print one row a compiled program and a closing line: a table on a terminal, else columns parted by tabs."""
    from rich.console import Console
    from rich.table import Table

    from cakegen.errors import CompileError

    compiled = [(job, out) for job, out in zip(selected, outcomes, strict=True) if not isinstance(out, CompileError)]
    rows = [_row(job, program) for job, program in compiled]
    console = Console()
    if console.is_terminal:
        table = Table(*_COLUMNS[:2])
        for column in _COLUMNS[2:-1]:
            table.add_column(column, justify="right")
        table.add_column(_COLUMNS[-1], overflow="fold")
        for name, *cells in rows:
            table.add_row(name.rpartition("_")[2], *cells)
        console.print(table)
    else:
        for row in (_COLUMNS, *rows):
            click.echo("\t".join(row))
    click.echo(_summary([program for _, program in compiled], len(selected)))


def failures_of(selected: Sequence[Job], outcomes: Sequence[Outcome]) -> list[str]:
    """A paragraph for each program that was refused: its target, its first key, and the compiler's words."""
    from cakegen.errors import CompileError

    return [
        f"FAILED {job.keys[0]} ({job.request.arch}): {outcome}"
        for job, outcome in zip(selected, outcomes, strict=True)
        if isinstance(outcome, CompileError)
    ]


def _matching_keys(registry: Registry, patterns: Sequence[str]) -> list[str]:
    from fnmatch import fnmatchcase

    if not patterns:
        return list(registry.kernels)
    for pattern in patterns:
        if not any(fnmatchcase(key, pattern) or fnmatchcase(name, pattern) for key, name in registry.kernels.items()):
            raise click.UsageError(f"{registry.export}: no key or program matches {pattern!r}; see `cakegen list`")
    return [
        key
        for key, name in registry.kernels.items()
        if any(fnmatchcase(key, pattern) or fnmatchcase(name, pattern) for pattern in patterns)
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


def _summary(compiled: Sequence[CompiledProgram], count: int) -> str:
    from cakegen.compile import load_nvrtc

    fresh = sum(not program.cached for program in compiled)
    total_bytes = sum(program.report.cubin_bytes for program in compiled)
    return (
        f"{len(compiled)} of {count} programs: {fresh} compiled, {len(compiled) - fresh} from the cache, "
        f"{count - len(compiled)} failed; {total_bytes} bytes; {load_nvrtc().label}"
    )
