"""A plan on CPU tensors: the same validation, planner, registry and argument binding as on a device.

Imports compile, plan, registry, the runtime's plain records, and this package.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from cakegen.compile import CompileRequest, compile_ptx, request_for
from cakegen.emulator.adversary import Adversary
from cakegen.emulator.faults import Fault
from cakegen.emulator.machine import LaunchShape, Machine
from cakegen.emulator.memory import Buffer, GlobalMemory
from cakegen.emulator.parse import parse_kernel
from cakegen.emulator.tensor_core import multiply_add_hopper, multiply_add_wide
from cakegen.emulator.translate import Program
from cakegen.errors import EmulationError
from cakegen.plan import control_words, partials_elems
from cakegen.plan.records import Launch, Plan
from cakegen.registry import Program as ProgramRecord
from cakegen.registry import Registry
from cakegen.runtime.arguments import bind_arguments
from cakegen.runtime.runner import run_parameters
from cakegen.runtime.validate import Operand, Request

ARITHMETIC = {"hopper": multiply_add_hopper, "wide": multiply_add_wide}
_OUTPUTS = {"front": ("logits", "latent", "shared_act"), "tail": ("y_workspace", "out")}
# A wait's limit in ns of modelled time that no run reaches: a wait that can't end is found by who waits for whom.
_NEVER_NS = 1 << 62
_RECORD_WORDS = 16
# Line information makes a fault name the line of the source; it changes no instruction.
_FLAGS = ("-lineinfo",)


@dataclass(frozen=True)
class LaunchReport:
    """One emulated launch.

    Parameters
    ----------
    key
        Logical key of its program.
    instructions
        Warp-instructions that ran.
    seconds
        Wall time.
    schedule_hash
        Names the schedule that the adversary took.
    """

    key: str
    instructions: int
    seconds: float
    schedule_hash: str


@dataclass(frozen=True)
class Options:
    """How to run: the adversary's schedule and seed, and the tensor core's arithmetic (`hopper` or `wide`).

    `checks` says whether the order of accesses is checked (races, proxies). A launch that still runs after
    `instruction_limit` warp-instructions counts as one that never ends. `machine` makes the machine of a launch:
    `Machine`, or one that also looks on. `tensor_order`: tcgen05 instructions are ordered only where the ISA says so
    (`strict`), or as programs widely assume (`practice`).
    """

    schedule: str = "random"
    seed: int = 0
    arithmetic: str = "hopper"
    checks: bool = True
    instruction_limit: int = 2_000_000_000
    machine: Callable[..., Machine] = Machine
    tensor_order: str = "strict"


DEFAULT_OPTIONS = Options()


def emulate_plan(
    registry: Registry,
    request: Request,
    plan: Plan,
    options: Options = DEFAULT_OPTIONS,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    load: Callable[[Registry, str, str], Program] | None = None,
) -> tuple[LaunchReport, ...]:
    """Run a plan's launches one after another on the request's CPU tensors.

    Parameters
    ----------
    request
        A validated call (`validate_front`, `validate_tail`) of CPU tensors; its outputs are written.
    plan
        What `plan_route` says for it, for any device that the export serves.
    on_progress
        Called with (clusters that have ended, clusters of the launch).
    load
        Where programs come from; by default from NVRTC, remembered.

    Raises
    ------
    Fault
        A program did something undefined, can't go on, or left an output unwritten.
    EmulationError
        It uses something that is not modelled, or the tensors are not on the CPU.
    """
    if request.device.type != "cpu":
        raise EmulationError(f"{request.stage}: the emulator works on CPU tensors; got {request.device}")
    with torch.no_grad():
        scratch = _Scratch(plan)
        memory = GlobalMemory([*_operand_buffers(request), *scratch.buffers])
    reports = tuple(
        _run_launch(registry, request, launch, plan.device.arch, memory, scratch, options, on_progress, load)
        for launch in plan.launches
    )
    _check_outputs(request, memory)
    if scratch.counters.any():
        raise Fault("output", f"control words are {scratch.counters.tolist()} after the launch; each leaves them at 0")
    return reports


class _Scratch:
    """What a launch needs beside its operands, and the runtime owns."""

    def __init__(self, plan: Plan) -> None:
        words = max(control_words(launch) for launch in plan.launches)
        elems = max(partials_elems(launch) for launch in plan.launches)
        self.counters = _aligned(words, np.int32)
        self.partials = _aligned(elems, np.float32)
        self.partials.fill(np.nan)
        self.record = _aligned(_RECORD_WORDS, np.uint64)
        self.record[0] = _NEVER_NS
        self.addresses = {name: array.ctypes.data if array.size else 0 for name, array in self._arrays()}

    def _arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        yield "counters", self.counters
        yield "partials", self.partials
        yield "wait_record", self.record

    @property
    def buffers(self) -> list[Buffer]:
        """As allocations; the partials of a segment come from one CTA."""
        return [
            Buffer(name, array.ctypes.data, array.nbytes, output=name == "partials")
            for name, array in self._arrays()
            if array.size
        ]


def _aligned(count: int, dtype: type) -> np.ndarray:
    size = count * np.dtype(dtype).itemsize
    raw = np.zeros(size + 256, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + size].view(dtype)


def _operand_buffers(request: Request) -> Iterator[Buffer]:
    for name, operand in request.operands.items():
        yield _buffer(name, operand, name in _OUTPUTS[request.stage])


def _buffer(name: str, operand: Operand, output: bool) -> Buffer:
    size = operand.element_bytes
    plane = operand.partial_stride * size
    return Buffer(
        name,
        operand.address,
        operand.span_elems * size,
        row_bytes=operand.cols * size,
        pitch_bytes=operand.pitch * size,
        plane_bytes=plane if plane >= operand.rows * operand.pitch * size else 0,
        output=output,
        read_only=not output,
    )


def _run_launch(
    registry: Registry,
    request: Request,
    launch: Launch,
    arch: str,
    memory: GlobalMemory,
    scratch: _Scratch,
    options: Options,
    on_progress: Callable[[int, int], None],
    load: Callable[[Registry, str, str], Program] | None,
) -> LaunchReport:
    record = registry.program(launch.key)
    buffers = {name: operand.address for name, operand in request.operands.items()} | scratch.addresses
    parameters = run_parameters(request) | dict(launch.parameters)
    arguments = bind_arguments(record, request.operands, buffers, parameters)
    adversary = Adversary(options.schedule, options.seed)
    machine = options.machine(
        (load or load_program)(registry, launch.key, arch),
        memory,
        launch_shape(record, launch),
        [argument.value for argument in arguments],
        adversary,
        barrier_names(record),
        ARITHMETIC[options.arithmetic],
        instruction_limit=options.instruction_limit,
        on_retire=on_progress,
        checks=options.checks,
        strict_tensor_order=options.tensor_order == "strict",
    )
    start = time.perf_counter()
    machine.run()
    elapsed = time.perf_counter() - start
    return LaunchReport(launch.key, machine.instructions_run, elapsed, adversary.schedule_hash)


def launch_shape(record: ProgramRecord, launch: Launch) -> LaunchShape:
    """A launch's shape from its registry record and its plan."""
    attributes = record.launch
    return LaunchShape(
        launch.grid_ctas,
        attributes.block,
        attributes.cluster,
        attributes.dynamic_smem_bytes,
        attributes.cooperative,
    )


def barrier_names(record: ProgramRecord) -> dict[int, str]:
    """Offset in dynamic shared memory -> `stage_full[2]`, from the order in the registry's record."""
    names = [f"{name}[{i}]" if count > 1 else name for name, count in record.barriers for i in range(count)]
    return {8 * index: name for index, name in enumerate(names)}


def load_program(registry: Registry, key: str, arch: str) -> Program:
    """The translated program of a key, compiled by NVRTC with line information; remembered by what it is made of."""
    return _translated(request_for(registry, key, arch, _FLAGS))


@functools.lru_cache(maxsize=64)
def _translated(request: CompileRequest) -> Program:
    return program_of(compile_ptx(request), request.kernel_symbol)


def program_of(ptx: str, symbol: str) -> Program:
    """A program from PTX text; every block is translated, so that an unknown instruction is found here.

    Raises
    ------
    EmulationError
        The text holds something that is not modelled.
    """
    program = Program(parse_kernel(ptx, symbol))
    program.translate_all()
    return program


def _check_outputs(request: Request, memory: GlobalMemory) -> None:
    for buffer in memory.buffers:
        if buffer.name in _OUTPUTS[request.stage] and (missing := buffer.unwritten_bytes()):
            raise Fault("output", f"{missing} bytes of {buffer.name} were never written")
