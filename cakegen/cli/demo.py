"""`cakegen demo`: requests from declaration to verdict, on this machine. Imports cakegen inside functions."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cakegen.cli.names import EXPORT
from cakegen.cli.transcript import Transcript

if TYPE_CHECKING:
    from cakegen.cli.compile import Job
    from cakegen.cli.demo_request import Place
    from cakegen.compile import CompileRequest, Outcome
    from cakegen.emulator.launches.cases import Comparison
    from cakegen.model import Model
    from cakegen.registry import Registry

SMALL_EXPORT = "tiny_latent_moe"
# a decode and a prefill request: programs of every family
SMALL_PARTS = {"small model, decode": (8,), "small model, prefill": (200,)}
EMULATED_TOKENS = (8,)
LAUNCHED_TOKENS = (1, 16, 128, 1024)
# of the emulator; the full size takes the first one, and all with --full
SCHEDULES = ("random", "early", "late")


@click.command("demo")
@click.option("--tp", default=8, show_default=True, help="Tensor-parallel degree; the demo is rank 0 of it.")
@click.option(
    "--tokens",
    "token_counts",
    multiple=True,
    type=click.IntRange(min=1),
    metavar="T",
    help="Token count to run; may be repeated.  [default: 8 and 200, then 8, or on a GPU 1, 16, 128 and 1024]",
)
@click.option(
    "--export",
    "export",
    default="kimi_k3_latent_moe",
    show_default=True,
    type=EXPORT,
    help="What runs behind the small model: an export, or a tree's folder.",
)
@click.option(
    "--full", is_flag=True, help="Go on with all the rest: every schedule, the generated trees, plans, every program."
)
@click.option("--jobs", type=click.IntRange(min=1), help="Programs to compile at once; by default one a processor.")
@click.option(
    "--tables",
    default="build/demo",
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for a table an export: what each compiled program takes.",
)
def demo_command(
    tp: int, token_counts: tuple[int, ...], export: str, full: bool, jobs: int | None, tables: Path
) -> None:
    """Plan, compile and run a layer of a small model, then of an export, and compare every value with fp64.

    On the GPU where there is one that the programs are for, else in the emulator. Each line begins with the seconds
    since the start; the last one is the verdict, and the exit status is 1 where it is FAIL.
    """
    shown = Transcript()
    tables.mkdir(parents=True, exist_ok=True)
    shown.line(f"cakegen {_version()}: GPU programs are planned, compiled, run and compared with fp64")
    from cakegen.cli.demo_request import emulated_place, gpu_place, why_nothing_launches
    from cakegen.registry import load_registry

    small, registry = load_registry(SMALL_EXPORT), load_registry(export)
    reason = why_nothing_launches(registry)
    place = emulated_place(registry.model) if reason else gpu_place()
    introduce(shown, place, reason, registry.model.dims.tolerances)
    demo, where = Demo(shown, tp, jobs, tables), f"TP {tp}, {place.words}"
    for name, counts in ({"small model": token_counts} if token_counts else SMALL_PARTS).items():
        demo.attempt(name, f"{small.export}, {where}", partial(demo.run, small, place, counts, SCHEDULES))
    schedules = SCHEDULES if full else SCHEDULES[:1]
    counts = token_counts or (EMULATED_TOKENS if reason else LAUNCHED_TOKENS)
    demo.attempt(registry.export, where, partial(demo.run, registry, place, counts, schedules))
    if full:
        demo.attempt("generated trees", "every text is written again, and compared with its file", demo.check_trees)
        demo.attempt(
            *("plans", f"{registry.export}, TP {tp}, on every architecture"),
            partial(demo.show_plans, registry.model, token_counts or LAUNCHED_TOKENS),
        )
        demo.attempt("programs", f"all of {registry.export}", partial(demo.compile_all, registry))
    demo.conclude(not_run(demo, registry, reason, full=full))


def introduce(shown: Transcript, place: Place, reason: str | None, tolerances: Mapping[str, float]) -> None:
    """Say on what machine this runs, and in what words."""
    import torch

    from cakegen.cli.demo_request import tolerance_words

    processors = len(os.sched_getaffinity(0))
    shown.line(
        f"machine: {_processor()}, {processors} processor{'s' * (processors != 1)}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )
    if reason is None:
        shown.line(f"GPU: {place.name}; programs are launched on it")
    else:
        shown.line(f"no launches: {reason}")
        shown.line("the emulator runs the programs' PTX on the CPU, and reports races, deadlocks and stray accesses")
        shown.line("schedule: an order of warps and copies that a GPU may take; it must not change any bit")
    shown.line("front and tail: a layer's products before and behind its routed experts; T: tokens in the batch")
    shown.line(f"tolerance of a value v against fp64: {tolerance_words(tolerances)}")


@dataclass
class Demo:
    """Runs the parts of the demo, and remembers what came of them.

    Parameters
    ----------
    tp
        Tensor-parallel degree.
    jobs
        Programs to compile at once; None: one a processor.
    tables
        Folder of the tables; it is there.
    compiled
        Export -> request -> what was compiled, and how it ended.
    compared
        Every output that agreed with fp64.
    passed, failed
        Name of a part -> what it found, or what is wrong.
    """

    shown: Transcript
    tp: int
    jobs: int | None
    tables: Path
    compiled: dict[str, dict[CompileRequest, tuple[Job, Outcome]]] = field(default_factory=dict)
    compared: list[Comparison] = field(default_factory=list)
    passed: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def attempt(self, name: str, subject: str, part: Callable[[], str]) -> None:
        """Run a part and print its verdict; an error of cakegen is a failure of that part, and the next one goes on.

        Parameters
        ----------
        name, subject
            What its heading says; the verdict repeats the name.
        part
            What to run; it gives the verdict's words.
        """
        from cakegen.errors import CakeError
        from cakegen.visible import visible

        self.shown.head(f"{len(self.passed) + len(self.failed) + 1}. {name}: {subject}")
        try:
            self.passed[name] = part()
            self.shown.step("PASS", self.passed[name])
        except CakeError as error:
            self.failed[name] = visible(str(error), "\n\t")
            self.shown.step("FAIL", self.failed[name])

    def run(self, registry: Registry, place: Place, token_counts: Sequence[int], schedules: Sequence[str]) -> str:
        """Plan, compile, run and compare a layer for each token count.

        Raises
        ------
        CakeError
            A request or a program is refused, or a result is not as the contract says.
        """
        from cakegen.cli.demo_request import plan_request, plan_words, run_layer, total_words
        from cakegen.runtime import LatentMoe
        from cakegen.runtime.programs import check_registered

        requests = [(stage, tokens) for tokens in token_counts for stage in registry.model.dims.stages]
        plans = [plan_request(registry.model, stage, self.tp, tokens, place.facts) for stage, tokens in requests]
        for plan in plans:
            check_registered(registry, plan, place.name)
            self.shown.step("plan", plan_words(plan))
        self._compile(registry, [launch.key for plan in plans for launch in plan.launches], place.facts.arch)
        moe = LatentMoe(registry)
        found: list[Comparison] = []
        for tokens in token_counts:
            found += run_layer(self.shown, moe, place, self.tp, tokens, schedules)
        self.compared += found
        return f"{total_words(found)}; {_runs(place, schedules)}"

    def compile_all(self, registry: Registry) -> str:
        """Compile every program for each of its architectures.

        Raises
        ------
        CompileError
            A program was refused.
        """
        return self._compile(registry, ())

    def _compile(self, registry: Registry, keys: Sequence[str], *arches: str) -> str:
        """Compile programs, print a line a family, and write the table of all that was compiled of the export."""
        from cakegen.cli import compile as compiling
        from cakegen.cli.selection import Selection
        from cakegen.errors import CompileError

        selected = compiling.jobs_of(registry, Selection(tuple(keys), arches=arches))
        outcomes = compiling.compile_with_progress(selected, self.jobs)
        for line in compiling.family_lines(registry, selected, outcomes):
            self.shown.step("compile", line)
        closing = compiling.closing_line(selected, outcomes)
        self.shown.step("compile", closing)
        known = self.compiled.setdefault(registry.export, {})
        for job, outcome in zip(selected, outcomes, strict=True):
            known.setdefault(job.request, (job, outcome))
        table = self.tables / f"{registry.export}.tsv"
        table.write_text(compiling.table_text(*zip(*known.values(), strict=True)), encoding="utf-8")
        self.shown.step("compile", f"each program with its registers, memory and size: {table}")
        failures = compiling.failures_of(selected, outcomes)
        if failures:
            raise CompileError("\n".join(failures))
        return closing

    def check_trees(self) -> str:
        """Compare the generated trees with their declarations.

        Raises
        ------
        SealError
            A generated file differs.
        """
        from cakegen.cli import export

        export.check_trees(lambda line: self.shown.step("check", line))
        return "files are what the exports and templates say"

    def show_plans(self, model: Model, token_counts: Sequence[int]) -> str:
        """Print what both halves launch on the largest part of each architecture.

        Raises
        ------
        PlanError
            No plan covers a request.
        """
        from cakegen.cli.demo_request import plan_request, plan_words
        from cakegen.model import DeviceFacts

        planned = 0
        for target in model.targets:
            device = DeviceFacts.nominal(target.arch, max(target.sm_counts))
            if self.tp not in target.tp_degrees:
                self.shown.step("plan", f"{target.arch}: the export has no TP {self.tp} for it")
                continue
            for tokens in token_counts:
                for stage in model.dims.stages:
                    words = plan_words(plan_request(model, stage, self.tp, tokens, device))
                    self.shown.step("plan", f"{target.arch} with {device.sm_count} SMs, {words}")
                    planned += 1
        return f"{planned} requests"

    def conclude(self, missing: Sequence[str]) -> None:
        """Print the verdict of all, and leave with status 1 where it is FAIL."""
        from cakegen.cli.demo_request import total_words

        self.shown.head("verdict")
        for line in missing:
            self.shown.step("not run", line)
        for name, found in self.passed.items():
            self.shown.step("PASS", f"{name}: {found}")
        for name, error in self.failed.items():
            self.shown.step("FAIL", f"{name}: {error.splitlines()[0]}")
        took = f"in {self.shown.seconds:.0f} s ({time.process_time():.0f} s of processor time)"
        if self.failed:
            self.shown.line(click.style(f"FAIL {took}: {', '.join(self.failed)}", fg="red", bold=True))
            raise click.exceptions.Exit(1)
        self.shown.line(click.style(f"PASS {took}: {total_words(self.compared)}", fg="green", bold=True))


def not_run(demo: Demo, registry: Registry, reason: str | None, *, full: bool) -> list[str]:
    """What a reader might take for verified and was not run, each with the command that runs it."""
    from cakegen import paths
    from cakegen.cli.compile import jobs_of
    from cakegen.cli.selection import Selection

    missing = []
    if reason is not None:
        missing.append(f"launches on a GPU ({reason}); on a supported one: `make gpu-test`")
    if not full:
        command = "`make demo DEMO=--full`" if paths.is_checkout() else "`cakegen demo --full`"
        programs = {job.request for job in jobs_of(registry, Selection())}
        others = programs - demo.compiled.get(registry.export, {}).keys()
        missing.append(
            f"{len(others)} of {len(programs)} programs of {registry.export}, other plans, generated trees: {command}"
        )
        if reason is not None:
            missing.append(f"{registry.export} in schedules {' and '.join(SCHEDULES[1:])}: {command}")
    return missing


def _runs(place: Place, schedules: Sequence[str]) -> str:
    if not place.emulates:
        return "launched"
    return f"the same bits in {len(schedules)} schedules" if len(schedules) > 1 else "1 schedule"


def _version() -> str:
    from cakegen.version import full_version

    return full_version()


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
