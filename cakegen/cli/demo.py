"""`cakegen demo`: the whole way from a declaration to a launch, on this machine. Imports cakegen inside functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import torch

    from cakegen.model import ModelDims
    from cakegen.registry import Registry
    from cakegen.runtime import Runner

Tensors = dict[str, "torch.Tensor"]
EXPORT = "kimi_k3_latent_moe"
_TIMED_LAUNCHES = 200
_EMULATED_TOKENS = 8


@click.command("demo")
@click.option("--tp", default=8, show_default=True, help="Tensor-parallel degree; the demo is rank 0 of it.")
@click.option(
    "--tokens",
    "token_counts",
    multiple=True,
    type=int,
    default=(1, 16, 128, 1024),
    show_default=True,
    help=f"To plan for, and to run on a GPU; may be repeated. Without one, T = {_EMULATED_TOKENS} is emulated.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Programs to compile at once; by default one a processor.")
def demo_command(tp: int, token_counts: tuple[int, ...], jobs: int | None) -> None:
    """Check the generated tree, plan, compile every program, and run front and tail: on a GPU, else emulated."""
    from cakegen.registry import load_registry

    check_generated()
    registry = load_registry(EXPORT)
    show_plans(registry, tp, token_counts)
    compile_all(registry, jobs)
    click.secho("4. run", bold=True)
    reason = why_nothing_launches(registry)
    if reason is None:
        run_all(tp, token_counts, "cuda", "auto")
        return
    run_all(tp, (_EMULATED_TOKENS,), "cpu", "emulator")
    click.echo(
        f"   NOT RUN on a GPU: nothing was launched, since {reason}. What ran above is the programs' PTX, emulated on "
        "this machine's CPU; `make gpu-test` on a supported GPU launches all of them."
    )


def check_generated() -> None:
    """Compare the generated tree of every export with what its declaration and the templates give now.

    Raises
    ------
    SealError
        A generated file differs.
    """
    from cakegen import paths
    from cakegen.cli.export import export_command

    click.secho("1. generated tree", bold=True)
    if paths.is_checkout():
        click.get_current_context().invoke(export_command, name=None, check=True, dest=None)
    else:
        click.echo(f"   installed package; its tree is {paths.generated_root()}")


def show_plans(registry: Registry, tp: int, token_counts: Sequence[int]) -> None:
    """Print what both halves would launch on each architecture that has programs."""
    from cakegen.model import DeviceFacts
    from cakegen.plan import plan_route

    click.secho("2. plan", bold=True)
    arches = sorted({arch for program in registry.programs.values() for arch in program.arches})
    for arch in arches:
        target = registry.model.target(arch)
        sm_count = max(target.sm_counts) if target is not None else 0
        device = DeviceFacts.nominal(arch, sm_count)
        click.echo(f"   {arch} with {sm_count} SMs, TP {tp}:")
        for stage in ("front", "tail"):
            for tokens in token_counts:
                plan = plan_route(registry.model, stage=stage, tp=tp, tokens=tokens, partials=1, device=device)
                for launch in plan.launches:
                    click.echo(f"     {stage:5} T {tokens:4}  {launch.grid_ctas[0]:3} CTAs  {launch.key}")


def compile_all(registry: Registry, jobs: int | None) -> None:
    """Compile every program of the export and print what each takes.

    Raises
    ------
    CompileError
        A program was refused.
    """
    from cakegen.cli.compile import compile_with_progress, failures_of, select_jobs, show_outcomes
    from cakegen.errors import CompileError

    click.secho("3. compile", bold=True)
    selected = select_jobs(registry)
    start = time.perf_counter()
    outcomes = compile_with_progress(selected, jobs)
    show_outcomes(selected, outcomes)
    click.echo(f"   {time.perf_counter() - start:.1f} s")
    failures = failures_of(selected, outcomes)
    if failures:
        raise CompileError("\n".join(failures))


def why_nothing_launches(registry: Registry) -> str | None:
    """The reason why this machine can't launch the export's programs, or None where it can."""
    import torch

    from cakegen.arch import architecture_of
    from cakegen.errors import PlanError

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device here (no NVIDIA driver, or no GPU that it may use)"
    try:
        arch = architecture_of(torch.cuda.get_device_capability()).name
    except PlanError as error:
        return f"{torch.cuda.get_device_name()}: {error}"
    arches = sorted({name for program in registry.programs.values() for name in program.arches})
    if arch not in arches:
        return f"{torch.cuda.get_device_name()} is {arch}, and this version's programs are for {', '.join(arches)}"
    return None


def run_all(tp: int, token_counts: Sequence[int], device: str, backend: str) -> None:
    """Run both halves through the public functions and compare them with fp64.

    Raises
    ------
    LaunchError
        A result is outside the tolerance of the contract.
    """
    import torch

    from cakegen.errors import LaunchError

    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    click.echo(f"   on {name}, backend {backend!r}, TP {tp}, rank 0:")
    weights = make_operands(tp, max(token_counts), device)
    for tokens in token_counts:
        problems = run_once(weights, tp, tokens, backend)
        if problems:
            raise LaunchError(f"demo, T {tokens}: {'; '.join(problems)}")


def make_operands(tp: int, tokens: int, device: str) -> Tensors:
    """bf16 operands of both halves for one rank, by name; their products have a variance near 1."""
    import torch

    from cakegen.operands import shape_of
    from cakegen.runtime import kimi_k3_latent_moe

    dims = kimi_k3_latent_moe().model.dims
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return values.mul_(shape[-1] ** -0.5).to(torch.bfloat16)

    # what gives products of order 1: weights by the root of a row's length, activations of order 1
    scales = {"rows": dims.hidden**0.5, "partials": dims.hidden**0.5, "vector": dims.latent**0.5, "weight": 1.0}
    return {
        spec.name: normal(*shape_of(spec, dims, i_local=dims.i_local(tp), tokens=tokens)) * scales[spec.kind]
        for stage in dims.stages.values()
        for spec in stage.inputs
        if spec not in dims.rows_stage.outputs
    }


def run_once(operands: Tensors, tp: int, tokens: int, backend: str) -> list[str]:
    """Run front and tail for the first `tokens` rows, print how far they are from fp64, and return what is wrong."""
    import torch

    from cakegen.operands import shape_of
    from cakegen.runtime import kimi_k3_latent_moe

    moe = kimi_k3_latent_moe()
    dims = moe.model.dims
    specs = dict.fromkeys(spec for stage in dims.stages.values() for spec in stage.operands)
    rows = {spec.name: operands[spec.name] for spec in specs if spec.name in operands}
    rows |= {spec.name: rows[spec.name][:tokens] for spec in specs if spec.kind == "rows" and spec.name in rows}
    rows |= {spec.name: rows[spec.name][:, :tokens] for spec in specs if spec.kind == "partials"}
    x = rows[dims.rows_stage.tokens.name]
    outputs = {
        spec.name: x.new_empty(
            shape_of(spec, dims, i_local=dims.i_local(tp), tokens=tokens), dtype=torch.float32 if spec.fp32 else None
        )
        for stage in dims.stages.values()
        for spec in stage.outputs
    }
    given = rows | outputs
    runners = {
        name: moe.prepare(
            name, {spec.name: given[spec.name] for spec in stage.operands}, tp=tp, rank=0, backend=backend
        )
        for name, stage in dims.stages.items()
    }
    for stage, runner in runners.items():
        run_shown(stage, runner)
    errors, problems = compare_with_fp64(rows, outputs, dims, tp)
    times = ", ".join(f"{stage} {_microseconds(runner)} us" for stage, runner in runners.items() if x.is_cuda)
    click.echo(f"     T {tokens:3}: largest error against fp64: {errors}{f'; {times} (warm)' if times else ''}")
    return problems


def run_shown(stage: str, runner: Runner) -> None:
    """Run a call; an emulated one, which takes seconds, with a progress bar and what it ran."""
    from cakegen.cli.emulate import progress_bar
    from cakegen.emulator import EmulatedRunner

    if not isinstance(runner, EmulatedRunner):
        runner()
        return
    with progress_bar(stage) as advance:
        runner.on_progress = advance
        runner()
    for report in runner.reports:
        click.echo(
            f"     {stage:5} {report.key}: {report.instructions} warp-instructions in {report.seconds:.1f} s, schedule "
            f"{report.schedule_hash}"
        )


def compare_with_fp64(rows: Tensors, outputs: Tensors, dims: ModelDims, tp: int) -> tuple[str, list[str]]:
    """The largest error of each output in words, and the outputs that break the contract."""
    import torch

    from cakegen.runtime.reference import reference_outputs

    errors, problems = [], []
    for name, stage in dims.stages.items():
        exact = reference_outputs(name, dims, rows | outputs, tp=tp, rank=0, dtype=torch.float64)
        for spec in stage.outputs:
            got, wanted, tolerance = outputs[spec.name], exact[spec.short], dims.tolerances[spec.short]
            if tolerance == 0:
                same = torch.equal(got, wanted)
                errors.append(f"{spec.short} {'bit for bit' if same else 'differs'}")
                problems += [f"{spec.short} differs from the reference's bits"] * (not same)
                continue
            errors.append(f"{spec.short} {(got.double() - wanted).abs().max().item():.1e}")
            if not torch.allclose(got.double(), wanted, atol=tolerance, rtol=tolerance):
                problems.append(f"{spec.short} is outside atol = rtol = {tolerance:g}")
    return ", ".join(errors), problems


def _microseconds(call: Callable[[], object]) -> str:
    """Mean time of a call that is repeated on warm caches: a sign of life, not a benchmark."""
    import torch

    start, stop = (torch.Event(device="cuda", enable_timing=True) for _ in range(2))
    for _ in range(10):
        call()
    start.record()
    for _ in range(_TIMED_LAUNCHES):
        call()
    stop.record()
    stop.synchronize()
    return f"{start.elapsed_time(stop) * 1e3 / _TIMED_LAUNCHES:.1f}"
