"""A layer's front and tail for `cakegen demo`: where they run, what fp64 says. Imports cakegen inside functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from cakegen.cli.transcript import Transcript
    from cakegen.emulator.launches.cases import Case, Comparison
    from cakegen.model import DeviceFacts, Model
    from cakegen.plan import Plan
    from cakegen.registry import Registry
    from cakegen.runtime import LatentMoe, Runner

Tensors = dict[str, "torch.Tensor"]
_TIMED_LAUNCHES = 200


@dataclass(frozen=True)
class Place:
    """Where requests run.

    Parameters
    ----------
    name
        For people.
    device
        Of the tensors, as torch names it.
    backend
        Of the public functions: `emulator`, or what launches.
    facts
        The device to plan for.
    """

    name: str
    device: str
    backend: str
    facts: DeviceFacts

    @property
    def emulates(self) -> bool:
        """Whether nothing is launched."""
        return self.backend == "emulator"

    @property
    def words(self) -> str:
        """The place, and what is planned for."""
        device = f"{self.facts.arch} with {self.facts.sm_count} SMs"
        return f"{self.name}, planned for {device}" if self.emulates else f"{self.name}, {device}"


def emulated_place(model: Model) -> Place:
    """The emulator, for the device that `backend="emulator"` plans for."""
    from cakegen.runtime.emulation import emulated_facts

    return Place("the emulator", "cpu", "emulator", emulated_facts(model, None))


def gpu_place() -> Place:
    """The current GPU.

    Raises
    ------
    LaunchError
        The driver refuses it.
    """
    import torch

    from cakegen.runtime.device import open_device

    return Place(torch.cuda.get_device_name(), "cuda", "auto", open_device(torch.cuda.current_device()).facts)


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


def plan_request(model: Model, stage: str, tp: int, tokens: int, device: DeviceFacts) -> Plan:
    """The plan of a request of one partial sum.

    Raises
    ------
    PlanError
        No plan covers it.
    """
    from cakegen.plan import plan_route

    return plan_route(model, stage=stage, tp=tp, tokens=tokens, partials=1, device=device)


def plan_words(plan: Plan) -> str:
    """A request, and what is launched for it, in a line."""
    launches = [f"{launch.key} on {launch.grid_ctas[0]} CTAs" for launch in plan.launches]
    return f"{plan.stage}, T = {plan.tokens}: {', then '.join(launches)}"


def run_layer(
    shown: Transcript, moe: LatentMoe, place: Place, tp: int, tokens: int, schedules: Sequence[str]
) -> list[Comparison]:
    """Run front and tail as rank 0 of `tp`, the tail on what the front wrote, and compare all outputs with fp64.

    Parameters
    ----------
    schedules
        In which the emulator runs each launch, one after another; without meaning on a GPU.

    Raises
    ------
    CakeError
        A request or a program is refused; a program commits a fault; an output is outside of the contract, or has
        other bits in another schedule.
    """
    from cakegen.emulator.launches.cases import Case, compare_outputs
    from cakegen.errors import LaunchError

    found: list[Comparison] = []
    written: Tensors = {}
    for name, stage in moe.model.dims.stages.items():
        case = Case(name, tp, tokens, sm_count=place.facts.sm_count, arch=place.facts.arch)
        operands = _operands_of(moe.model, case, place.device)
        operands |= {spec.name: written[spec.name] for spec in stage.inputs if spec.name in written}
        runner = moe.prepare(name, operands, tp=tp, rank=0, backend=place.backend)
        outputs = {spec.short: operands[spec.name] for spec in stage.outputs}
        request = f"{name}, T = {tokens}"
        if place.emulates:
            shown.step("emulate", f"{request}: {emulate(request, runner, outputs, schedules)}")
        else:
            runner()
            shown.step("launch", f"{request}: {_microseconds(runner)} us, the mean of {_TIMED_LAUNCHES} (warm caches)")
        compared = compare_outputs(moe.model, case, operands)
        shown.step("compare", f"{request}: {comparison_words(compared)}")
        problems = [each.problem for each in compared if each.problem]
        if problems:
            raise LaunchError(f"{request}: {'; '.join(problems)}")
        written |= {spec.name: operands[spec.name] for spec in stage.outputs}
        found += compared
    return found


def _operands_of(model: Model, case: Case, device: str) -> Tensors:
    from cakegen.emulator.launches.cases import make_operands

    made = make_operands(model, case)
    # on the CPU they keep their pitch, with NaN between the rows
    return made if device == "cpu" else {name: value.to(device) for name, value in made.items()}


def emulate(request: str, runner: Runner, outputs: Tensors, schedules: Sequence[str]) -> str:
    """Run a call in each schedule, with progress on stderr, and say in words what ran.

    Raises
    ------
    EmulationError
        A program commits a fault, or outputs have other bits in another schedule.
    """
    from cakegen.cli.progress import emulation_progress
    from cakegen.emulator import EmulatedRunner
    from cakegen.errors import EmulationError

    assert isinstance(runner, EmulatedRunner), "the public functions give one for this backend"
    instructions, first = 0, dict[str, bytes]()
    for schedule in schedules:
        for output in outputs.values():
            output.fill_(float("nan"))
        runner.options = replace(runner.options, schedule=schedule)
        with emulation_progress(f"{request}, schedule {schedule}") as advance:
            runner.on_progress = advance
            runner()
        instructions += sum(report.instructions for report in runner.reports)
        for name, output in outputs.items():
            if first.setdefault(name, _bits(output)) != _bits(output):
                raise EmulationError(
                    f"{request}: {name} has other bits in schedule {schedule} than in {schedules[0]}; no schedule may "
                    "change any"
                )
    count = "schedules" if len(schedules) > 1 else "schedule"
    same = ": the same bits in each" if len(schedules) > 1 else ""
    return f"{instructions:,} warp-instructions in {len(schedules)} {count} ({', '.join(schedules)}){same}"


def _bits(values: torch.Tensor) -> bytes:
    import torch

    return values.contiguous().view(torch.uint8).numpy().tobytes()


def comparison_words(compared: Sequence[Comparison]) -> str:
    """The largest error of each output, and how much of its tolerance that takes."""
    words = [
        f"{each.output} {each.error:.1e} ({each.share:.0%})"
        if each.tolerance
        else f"{each.output} {f'differs in {each.error:.0f}' if each.error else 'bit for bit'}"
        for each in compared
    ]
    return f"largest error (of its tolerance): {', '.join(words)}"


def total_words(compared: Sequence[Comparison]) -> str:
    """How many values were compared, and the largest of their errors."""
    return (
        f"{sum(each.values for each in compared):,} values agree with fp64, "
        f"error up to {max(each.error for each in compared if each.tolerance):.1e} "
        f"and up to {max(each.share for each in compared):.0%} of the tolerance"
    )


def tolerance_words(tolerances: Mapping[str, float]) -> str:
    """What the contract allows a value v of each output."""
    outputs: dict[float, list[str]] = {}
    for output, tolerance in tolerances.items():
        outputs.setdefault(tolerance, []).append(output)
    return "; ".join(
        f"{', '.join(names)} {f'{tolerance:g} * (1 + |v|)' if tolerance else 'none, every bit counts'}"
        for tolerance, names in outputs.items()
    )


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
