"""`cakegen emulate`: run programs on this machine's CPU and compare them. Imports cakegen inside functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cakegen.cli.names import ARCH, EXPORT, KEY
from cakegen.cli.options import refuse_ignored

if TYPE_CHECKING:
    from cakegen.emulator import Options
    from cakegen.emulator.launches.cases import Case, CaseReport
    from cakegen.registry import Registry

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(file_okay=False, path_type=Path)
_NOT_BOTH = "KEY says what to run; leave out --stage, --tp and --tokens"


@click.command("emulate")
@click.argument("key", required=False, type=KEY)
@click.option("--stage", type=click.Choice(["front", "tail"]), help="Half of the block; not with KEY.")
@click.option("--tp", type=int, help="Tensor-parallel degree; not with KEY.")
@click.option("--tokens", type=int, help="Token count; not with KEY.")
@click.option("--partials", default=1, show_default=True, help="Partial sums of the routed experts (tail).")
@click.option("--rank", default=0, show_default=True, help="Rank whose slice the tail multiplies.")
@click.option(
    "--arch", type=ARCH, help="Target, e.g. sm_100a; also of --cuda.  [default: the first of KEY's, else sm_90a]"
)
@click.option("--sm-count", type=int, help="SMs of the device to plan for.  [default: of its largest part]")
@click.option(
    "--model",
    "--export",
    "export",
    default="kimi_k3_latent_moe",
    show_default=True,
    type=EXPORT,
    help="Export, or a tree's folder.",
)
@click.option("--schedule", default="random", show_default=True, type=click.Choice(["random", "early", "late"]))
@click.option("--seed", default=0, show_default=True, help="First seed of the random schedule.")
@click.option(
    "--seeds", "count", default=1, show_default=True, type=click.IntRange(min=1), help="How many seeds to run."
)
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
    "--scopes",
    default="practice",
    show_default=True,
    type=click.Choice(["strict", "practice"]),
    help="A write behind another CTA's reads: by scopes that hold both, or by any arrival and wait.",
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
@click.option(
    "--limit-instructions",
    default=2_000_000_000,
    show_default=True,
    type=click.IntRange(min=1),
    help="Warp-instructions of a launch after which it counts as one that never ends: a fault.",
)
@click.option(
    "--limit-seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="Wall time of a run after which it is given up, without a verdict.  [default: none]",
)
@click.option("--ptx", type=_FILE, help="A PTX file whose kernels --launch runs; not with KEY.")
@click.option("--cuda", type=_FILE, help="The same of a CUDA file, compiled by NVRTC first.")
@click.option("--launch", type=_FILE, help="JSON: buffers, launches, arguments (`cakegen docs emulate-launch`).")
@click.option("--entry", help="The kernel of launches that name none.")
@click.option("--out", type=_FOLDER, help="Folder for the buffers that the launches may write, as NAME.npy.")
@click.option("--no-checks", is_flag=True, help="Look for no races and missing proxy fences; faster.")
@click.option("--include", multiple=True, type=_FOLDER, help="Folder for --cuda's includes.")
@click.option("--option", "nvrtc_options", multiple=True, help="NVRTC option for --cuda, such as --option=-DN=4.")
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
    count: int,
    arithmetic: str,
    tensor_order: str,
    scopes: str,
    trace_file: Path | None,
    timeline_file: Path | None,
    no_checks: bool,
    limit_instructions: int,
    limit_seconds: float | None,
    **files: Any,
) -> None:
    """Run the programs of a request, or of one for each key that KEY matches, under a hostile schedule, without a GPU.

    Prints the differences from the fp64 reference, and a digest of each output's bits: the same before and after a
    change that left the values alone. A fault of a program is an error with its place.

    With --ptx or --cuda, and --launch: anybody's kernels. The exit status is then 0 for a clean run, 1 for a fault, 2
    for wrong input, 3 for what is not modelled, 4 for other values than expected, 5 where --limit-seconds came first.
    """
    from cakegen.cli.emulate_files import FileRequest, run_files
    from cakegen.emulator import Options
    from cakegen.emulator.launches.cases import ARCH
    from cakegen.registry import load_registry

    if schedule != "random":
        refuse_ignored("is of --schedule random; the others have no seeds", "seed", "count")
    options = Options(
        *(schedule, 0, arithmetic, not no_checks),
        instruction_limit=limit_instructions,
        seconds_limit=limit_seconds,
        tensor_order=tensor_order,
        scopes=scopes,
    )
    schedules = [replace(options, seed=seed + number) for number in range(count if schedule == "random" else 1)]
    if any(files[name] for name in ("ptx", "cuda", "launch")):
        _refuse_beside_files((key, stage, tp, tokens, trace_file, timeline_file), is_ptx=bool(files["ptx"]))
        click.get_current_context().exit(run_files(FileRequest(arch=arch or ARCH, **files), schedules))
    refuse_ignored("is of --launch, which is not there", "entry", "out", "include", "nvrtc_options")
    _require_writable(trace_file, timeline_file)
    registry = load_registry(export)
    if stage is None or tp is None or tokens is None:
        cases = _cases_of_key(registry, key, arch, (stage, tp, tokens))
    elif key is not None:
        raise click.UsageError(_NOT_BOTH)
    else:
        cases = [_case_of_request(stage, tp, tokens, partials, sm_count, rank, arch or ARCH)]
    _run_cases(registry, cases, schedules, (trace_file, timeline_file))


def _run_cases(
    registry: Registry, cases: Sequence[Case], schedules: Sequence[Options], traces: tuple[Path | None, Path | None]
) -> None:
    if len(cases) > 1 and any(traces):
        raise click.UsageError(f"KEY matches {len(cases)} keys; --trace and --timeline are of one run")
    for case in cases:
        _run_schedules(registry, case, schedules, traces)


def _refuse_beside_files(given: tuple[object, ...], *, is_ptx: bool) -> None:
    """Refuse what says nothing about files: parts of a request (None: not given), and options of the other format."""
    if any(each is not None for each in given):
        raise click.UsageError("--launch says what to run; no KEY, --stage, --tp, --tokens, --trace or --timeline")
    refuse_ignored("is of a request of an export; --launch says what to run", "partials", "rank", "sm_count", "export")
    if is_ptx:
        refuse_ignored("is of --cuda; PTX names its target itself", "arch", "include", "nvrtc_options")


def _require_writable(trace_file: Path | None, timeline_file: Path | None) -> None:
    """Refuse, before the run, files that can't be written behind it."""
    from cakegen.emulator.trace.timeline import require_drawing

    for file in (trace_file, timeline_file):
        if file is not None and not file.parent.is_dir():
            raise click.UsageError(f"{file}: there is no folder {file.parent}; make it first")
    if timeline_file is not None:
        require_drawing(timeline_file)


def _cases_of_key(registry: Registry, pattern: str | None, arch: str | None, request: tuple[object, ...]) -> list[Case]:
    """A case each key that matches, for a target of its program."""
    from cakegen.cli.selection import matching_keys
    from cakegen.emulator.launches.cases import find_case

    if pattern is None:
        raise click.UsageError("give a KEY, or --stage, --tp and --tokens")
    if any(each is not None for each in request):
        raise click.UsageError(_NOT_BOTH)
    refuse_ignored("is of --stage, --tp and --tokens; KEY finds its own request", "partials", "rank", "sm_count")
    keys = matching_keys(registry, [pattern])
    reached = [key for key in keys if arch in (None, *registry.program(key).arches)]
    return [find_case(registry, key, arch or registry.program(key).arches[0]) for key in reached or keys]


def _case_of_request(
    stage: str, tp: int, tokens: int, partials: int, sm_count: int | None, rank: int, arch: str
) -> Case:
    from cakegen.arch import architecture
    from cakegen.emulator.launches.cases import Case

    sms = max(part.sm_count for part in architecture(arch).parts) if sm_count is None else sm_count
    return Case(stage, tp, tokens, partials, sms, rank, arch)


def _run_schedules(
    registry: Registry, case: Case, schedules: Sequence[Options], traces: tuple[Path | None, Path | None]
) -> None:
    from cakegen.errors import EmulationError

    _announce(registry, case)
    failures: list[str] = []
    digests: dict[str, tuple[str, str]] = {}
    for options in schedules:
        name = f"seed {options.seed}" if options.schedule == "random" else options.schedule
        with _tracing(registry, *traces) as machine:
            report = run_case(registry, case, replace(options, **machine), name)
        failures += [f"{name}: {problem}" for problem in report.problems]
        for output, digest in report.digests.items():
            first, name_of_first = digests.setdefault(output, (digest, name))
            if digest != first:
                failures.append(
                    f"{name}: {output} has other bits than with {name_of_first}; no schedule may change any"
                )
    click.echo(f"  bits: {', '.join(f'{output} {digest}' for output, (digest, _) in digests.items())}")
    if failures:
        raise EmulationError("; ".join(failures))


@contextmanager
def _tracing(registry: Registry, trace_file: Path | None, timeline_file: Path | None) -> Iterator[dict[str, Any]]:
    """What `Options` needs for the files that were asked for; they are written at the end, also after a fault."""
    if trace_file is None and timeline_file is None:
        yield {}
        return
    from cakegen.emulator.trace.chrome import write_trace
    from cakegen.emulator.trace.recorder import Trace
    from cakegen.emulator.trace.timeline import write_timeline
    from cakegen.errors import CakeError

    def read_line(file: str, number: int) -> str:
        lines = registry.read(file).splitlines()
        return lines[number - 1] if number <= len(lines) else ""

    def write() -> None:
        if trace_file is not None:
            write_trace(trace, trace_file, read_line)
        if timeline_file is not None:
            write_timeline(trace, timeline_file, read_line)

    trace = Trace()
    try:
        yield {"machine": trace.machine}
    except CakeError:
        # what went wrong is the answer; a picture of it may be impossible
        with suppress(CakeError, OSError):
            write()
        raise
    write()


def _announce(registry: Registry, case: Case) -> None:
    click.echo(
        f"{registry.export} {case.stage}: TP {case.tp} rank {case.rank}, T = {case.tokens}, P = {case.partials}, "
        f"planned for {case.sm_count} SMs of {case.arch}"
    )
    for launch in case.plan(registry.model).launches:
        grid = " x ".join(str(extent) for extent in launch.grid_ctas)
        click.echo(f"  {launch.key}  [{grid} CTAs]")


def run_case(registry: Registry, case: Case, options: Options, name: str) -> CaseReport:
    """Emulate one case with progress on stderr, and print what it gave.

    Raises
    ------
    EmulationError
        A program committed a fault, or holds an instruction that is not modelled.
    """
    from cakegen.cli.progress import emulation_progress
    from cakegen.emulator.launches.cases import emulate_case

    with emulation_progress(name) as advance:
        report = emulate_case(registry, case, options, on_progress=advance)
    click.echo(f"  {name}: {_summary(report)}")
    return report


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
