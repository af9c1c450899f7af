"""`cakegen emulate`: run programs on this machine's CPU and compare them. Imports cakegen inside functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from cakegen.emulator import Options
    from cakegen.emulator.cases import Case, CaseReport
    from cakegen.registry import Registry


@click.command("emulate")
@click.argument("key", required=False)
@click.option("--stage", type=click.Choice(["front", "tail"]), help="Half of the block; not with KEY.")
@click.option("--tp", type=int, help="Tensor-parallel degree; not with KEY.")
@click.option("--tokens", type=int, help="Token count; not with KEY.")
@click.option("--partials", default=1, show_default=True, help="Partial sums of the routed experts (tail).")
@click.option("--rank", default=0, show_default=True, help="Rank whose slice the tail multiplies.")
@click.option("--arch", help="Target, e.g. sm_100a.  [default: the first of KEY's, else sm_90a]")
@click.option("--sm-count", type=int, help="SMs of the device to plan for.  [default: of its largest part]")
@click.option("--model", "export", default="kimi_k3_latent_moe", show_default=True, metavar="NAME|DIR", help="Export.")
@click.option("--schedule", default="random", show_default=True, type=click.Choice(["random", "early", "late"]))
@click.option("--seed", default=0, show_default=True, help="First seed of the random schedule.")
@click.option("--seeds", default=1, show_default=True, type=click.IntRange(min=1), help="How many seeds to run.")
@click.option(
    "--arithmetic",
    default="hopper",
    show_default=True,
    type=click.Choice(["hopper", "wide"]),
    help="Tensor core: truncated sums as measured on Hopper, or fp64 (faster).",
)
@click.option(
    "--tensor-order",
    default="strict",
    show_default=True,
    type=click.Choice(["strict", "practice"]),
    help="tcgen05: ordered only where the ISA says so, or as programs widely assume.",
)
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write who ran, waited and copied, of the last seed, as JSON for a trace viewer.",
)
@click.option(
    "--timeline",
    "timeline_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the first cluster's pipeline of the last seed (.svg, .png); needs matplotlib.",
)
def emulate_command(
    key: str | None,
    stage: str | None,
    tp: int | None,
    tokens: int | None,
    partials: int,
    rank: int,
    arch: str | None,
    sm_count: int | None,
    export: str,
    schedule: str,
    seed: int,
    seeds: int,
    arithmetic: str,
    tensor_order: str,
    trace_file: Path | None,
    timeline_file: Path | None,
) -> None:
    """Run the programs of a request, or one that launches KEY, under a hostile schedule, without a GPU.

    Prints the differences from the fp64 reference; a fault of a program is an error with its place.
    """
    from cakegen.arch import architecture
    from cakegen.emulator import Options
    from cakegen.emulator.cases import ARCH, Case, find_case
    from cakegen.errors import EmulationError
    from cakegen.registry import load_registry

    registry = load_registry(export)
    if key is not None:
        if (stage, tp, tokens) != (None, None, None):
            raise click.UsageError("KEY says what to run; leave out --stage, --tp and --tokens")
        arches = registry.program(key).arches if key in registry.kernels else (ARCH,)
        case = find_case(registry, key, arch or arches[0])
    elif stage is None or tp is None or tokens is None:
        raise click.UsageError("give a KEY, or --stage, --tp and --tokens")
    else:
        arch = arch or ARCH
        sms = max(part.sm_count for part in architecture(arch).parts) if sm_count is None else sm_count
        case = Case(stage, tp, tokens, partials, sms, rank, arch)
    _announce(registry, case)
    failures = []
    for each in range(seed, seed + (seeds if schedule == "random" else 1)):
        name = f"seed {each}" if schedule == "random" else schedule
        with _tracing(registry, trace_file, timeline_file) as machine:
            problems = run_case(
                registry, case, Options(schedule, each, arithmetic, tensor_order=tensor_order, **machine), name
            )
        failures += [f"{name}: {problem}" for problem in problems]
    if failures:
        raise EmulationError("; ".join(failures))


@contextmanager
def _tracing(registry: Registry, trace_file: Path | None, timeline_file: Path | None) -> Iterator[dict[str, Any]]:
    """What `Options` needs for the files that were asked for; they are written at the end, also after a fault."""
    if trace_file is None and timeline_file is None:
        yield {}
        return
    from cakegen.emulator.timeline import write_timeline
    from cakegen.emulator.trace import Trace
    from cakegen.emulator.trace_json import write_trace

    def read_line(file: str, number: int) -> str:
        lines = registry.read(file).splitlines()
        return lines[number - 1] if number <= len(lines) else ""

    trace = Trace()
    try:
        yield {"machine": trace.machine}
    finally:
        if trace_file is not None:
            write_trace(trace, trace_file, read_line)
        if timeline_file is not None:
            write_timeline(trace, timeline_file, read_line)


def _announce(registry: Registry, case: Case) -> None:
    click.echo(
        f"{registry.export} {case.stage}: TP {case.tp} rank {case.rank}, T = {case.tokens}, P = {case.partials}, "
        f"planned for {case.sm_count} SMs of {case.arch}"
    )
    for launch in case.plan(registry.model).launches:
        grid = " x ".join(str(extent) for extent in launch.grid_ctas)
        click.echo(f"  {launch.key}  [{grid} CTAs]")


def run_case(registry: Registry, case: Case, options: Options, name: str) -> tuple[str, ...]:
    """Emulate one case with a progress bar, print what it gave, and return what is wrong with it.

    Raises
    ------
    EmulationError
        A program committed a fault, or holds an instruction that is not modelled.
    """
    from cakegen.emulator.cases import emulate_case

    with progress_bar(name) as advance:
        report = emulate_case(registry, case, options, on_progress=advance)
    click.echo(f"  {name}: {_summary(report)}")
    return report.problems


def _summary(report: CaseReport) -> str:
    instructions = sum(launch.instructions for launch in report.launches)
    seconds = sum(launch.seconds for launch in report.launches)
    hashes = " ".join(launch.schedule_hash for launch in report.launches)
    differences = [
        ("y bit for bit" if not error else f"y differs in {error:.0f}") if output == "y" else f"{output} {error:.1e}"
        for output, error in report.errors.items()
    ]
    return (
        f"{', '.join(differences)}; {instructions} warp-instructions in {seconds:.1f} s "
        f"({instructions / max(seconds, 1e-9):,.0f}/s), schedule {hashes}"
    )


@contextmanager
def progress_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of the clusters that have ended, on a terminal's stderr; it is gone when the launch has ended."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TextColumn("clusters"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name)
        yield lambda done, total: progress.update(task, completed=done, total=total)
